"""What faults did to a run: its folder against that of the same run without them. Reads lines, starts nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rayformer.faults.plan import Fault
from rayformer.layout import Cell
from rayformer.observe.journal import read_journal
from rayformer.observe.jsonl import read_lines
from rayformer.observe.metrics import read_metrics
from rayformer.observe.rundir import RunDir

INCIDENT_KEYS = (
    "cells", "cause", "source", "why", "detect_s", "drain_s", "form_s", "restore_s", "first_step_s", "total_s",
    "steps_redone",
)  # fmt: skip
COMPARED = ("loss", "grad_norm")

Line = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Ran:
    """One of the two runs. ``goodput`` is the seconds of its steps, each counted once, over all its seconds."""

    folder: str
    steps: int
    executed: int
    steps_s: float
    wall_s: float
    goodput: float
    state_hash: str | None


@dataclass(frozen=True, kw_only=True)
class Proof:
    """A fault of the plan, and the journal's lines that say it took place."""

    fault: Fault
    lines: tuple[Line, ...]

    @property
    def is_proven(self) -> bool:
        return bool(self.lines)


@dataclass(frozen=True, kw_only=True)
class Difference:
    """A value that the two runs don't share; ``step`` is None for the final state's hash."""

    step: int | None
    key: str
    calm: object
    chaos: object


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What came of a plan of faults."""

    calm: Ran
    chaos: Ran
    incidents: tuple[Line, ...]
    proofs: tuple[Proof, ...]
    differences: tuple[Difference, ...]

    @property
    def is_void(self) -> bool:
        """Whether some fault did not take place, so that nothing is shown."""
        return not all(proof.is_proven for proof in self.proofs)

    @property
    def is_equal(self) -> bool:
        """Whether the final state and every step have the bits of the undisturbed run."""
        return not self.differences


def read_outcome(faults: Sequence[Fault], *, calm: RunDir, chaos: RunDir) -> Outcome:
    """What the folders of the two runs show."""
    journal = read_journal(chaos.journal)
    return Outcome(
        calm=_ran(calm),
        chaos=_ran(chaos),
        incidents=tuple(
            {"step": line.get("step"), "time": line["time"]} | {key: line.get(key) for key in INCIDENT_KEYS}
            for line in journal
            if line.get("kind") == "recovered"
        ),
        proofs=prove(faults, [line for line in journal if line.get("kind") == "fault"]),
        differences=differences(read_metrics(calm.metrics), read_metrics(chaos.metrics)),
    )


def differences(calm: Sequence[Line], chaos: Sequence[Line]) -> tuple[Difference, ...]:
    """What the lines of two runs, one for each step, don't share of the steps and of the final state."""
    return (*_step_differences(calm, chaos), *_hash_difference(_final_hash(calm), _final_hash(chaos)))


def prove(faults: Sequence[Fault], lines: Sequence[Line]) -> tuple[Proof, ...]:
    """Each fault with the ``fault`` lines that tell of it; one line is enough, but it tells of one fault only."""
    told: dict[int, list[Line]] = {fault.number: [] for fault in faults}
    for line in lines:
        fitting = [fault for fault in faults if _fits(fault, line) and len(told[fault.number]) < fault.times]
        if fitting:
            told[min(fitting, key=lambda fault: (bool(told[fault.number]), fault.number)).number].append(line)
    return tuple(Proof(fault=fault, lines=tuple(told[fault.number])) for fault in faults)


def _fits(fault: Fault, line: Line) -> bool:
    if "number" in line:
        return bool(line["number"] == fault.number)
    return line["effect"] == fault.effect and str(Cell.parse(line["cell"])) == fault.cell and fault.is_due(line["step"])


def _ran(files: RunDir) -> Ran:
    steps, lines = read_metrics(files.metrics), read_lines(files.metrics)
    times = [line["time"] for line in (*lines, *read_journal(files.journal))]
    wall_s = max(times) - min(times) if times else 0.0
    steps_s = sum(line["step_s"] for line in steps)
    return Ran(
        folder=str(files.path),
        steps=len(steps),
        executed=len(lines),
        steps_s=steps_s,
        wall_s=wall_s,
        goodput=steps_s / wall_s if wall_s else 0.0,
        state_hash=_final_hash(steps),
    )


def _final_hash(steps: Sequence[Line]) -> str | None:
    return next((line["state_hash"] for line in reversed(steps) if "state_hash" in line), None)


def _step_differences(calm: Sequence[Line], chaos: Sequence[Line]) -> Iterator[Difference]:
    by_step = [{line["step"]: line for line in lines} for lines in (calm, chaos)]
    for step in sorted(by_step[0].keys() | by_step[1].keys()):
        first, second = (lines.get(step) for lines in by_step)
        if first is None or second is None:
            yield Difference(step=step, key="step", calm=first and "done", chaos=second and "done")
            continue
        for key in COMPARED:
            if first[key] != second[key]:
                yield Difference(step=step, key=key, calm=first[key], chaos=second[key])


def _hash_difference(calm: str | None, chaos: str | None) -> Iterator[Difference]:
    if calm is None or calm != chaos:  # without one, nothing is shown
        yield Difference(step=None, key="state_hash", calm=calm, chaos=chaos)
