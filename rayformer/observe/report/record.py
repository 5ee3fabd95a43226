"""What the files of a run folder tell, read so that half a line or an old one in them can not break a page."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from rayformer.observe.jsonl import read_lines
from rayformer.observe.rundir import RunDir

Line = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Record:
    """A run: ``executed`` are all lines of metrics.jsonl as written, ``steps`` the last one of every step that counts.

    ``outcome`` is ``finished``, ``stopped``, ``failed``, or ``open`` if its last attempt recorded no end.
    """

    name: str
    job: Line
    executed: tuple[Line, ...]
    steps: tuple[Line, ...]
    journal: tuple[Line, ...]
    outcome: str

    @property
    def total_steps(self) -> int | None:
        return integer(self.job, "run", "steps")

    @property
    def num_redone(self) -> int:
        """Executions of steps that were executed again, or that a return to an older checkpoint made void."""
        return len(self.executed) - len(self.steps)

    @property
    def attempts(self) -> list[int]:
        return sorted({line["attempt"] for line in (*self.executed, *self.journal)})


def read_record(files: RunDir) -> Record:
    """The record of the run in a folder; what is missing there is empty here."""
    executed = [line for line in read_lines(files.metrics) if _is_whole(line) and isinstance(line.get("step"), int)]
    journal = [line for line in read_lines(files.journal) if _is_whole(line) and isinstance(line.get("kind"), str)]
    end = journal[-1] if journal else {}
    ends = [line for line in journal if line["attempt"] == end.get("attempt") and line["kind"] in ("done", "failed")]
    outcome = "open"
    last_step: float = math.inf
    if ends and (not executed or executed[-1]["attempt"] <= ends[-1]["attempt"]):
        outcome = "failed" if ends[-1]["kind"] == "failed" else str(ends[-1].get("outcome"))
        last_step = number(ends[-1], "step") or math.inf
    last = {line["step"]: line for line in executed}
    return Record(
        name=files.path.resolve().name,
        job=job_of(files),
        executed=tuple(executed),
        steps=tuple(last[step] for step in sorted(last) if step <= last_step),
        journal=tuple(journal),
        outcome=outcome,
    )


def number(line: Line, key: str) -> float | None:
    """The finite number under ``key``; None for anything else."""
    value = line.get(key)
    return value if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) else None


def inner(tree: Any, *keys: str) -> Any:
    """The value under nested keys; None where there is none."""
    for key in keys:
        tree = tree.get(key) if isinstance(tree, Mapping) else None
    return tree


def integer(tree: Any, *keys: str) -> int | None:
    value = inner(tree, *keys)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _is_whole(line: Line) -> bool:
    return isinstance(line.get("attempt"), int) and number(line, "time") is not None


def job_of(files: RunDir) -> Line:
    """The job as plain values; empty if it cannot be read."""
    try:
        job = yaml.safe_load(files.job_yaml.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return job if isinstance(job, dict) else {}
