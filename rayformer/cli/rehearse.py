"""``rayformer rehearse``: a job cut short, and whether it survives a loss and a resume as the real one must."""

from __future__ import annotations

import json
import shutil
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rayformer.cell.origin import run_folder
from rayformer.cell.plan import EXIT_ABORTED, EXIT_BAD_JOB, EXIT_FAILED, EXIT_FINISHED, EXIT_STOPPED
from rayformer.ckpt.manifest import step_folder
from rayformer.cli.apart import CHECKS, setting, train_apart
from rayformer.config.job import Job
from rayformer.config.load import load_job
from rayformer.config.model import CustomModelConfig
from rayformer.errors import ConfigError, Problem
from rayformer.faults.cut import SAVED, Settings, Trial, cut, trials, value_at
from rayformer.faults.rehearsed import (
    Rehearsed,
    Verdict,
    judge_calm,
    judge_resumed,
    judge_struck,
    no_devices,
    was_asked_to_stop,
)
from rayformer.observe.rundir import RunDir

LOG = "driver.log"
NO_BREAK = "\N{NO-BREAK SPACE}"
LAST_LINES, WIDEST = 20, 240  # of what a failed run printed


@dataclass(frozen=True, kw_only=True)
class Tried:
    """One trial and what came of it; ``run`` is None if it was not started."""

    trial: Trial
    verdict: Verdict
    seconds: float = 0.0
    run: Rehearsed | None = None


def rehearse_command(job_file: Path, sets: Sequence[str], json_file: Path | None) -> int:
    """Run the cut job in every way that is tried, printing what comes of each; the exit status.

    Raises ConfigError for a bad job, before anything starts.
    """
    job = load_job(job_file, sets, [*CHECKS, _can_be_written(json_file)])
    settings = cut(job)
    base = [*sets, *_sets(settings)]
    plan = list(trials(load_job(job_file, base, CHECKS), job.run.name))
    width = max(len(trial.in_words) for trial in plan)
    print("\n".join(_head(job, settings)))
    print(f"  what the runs print: {job.run.dir}/{plan[0].called.removesuffix(plan[0].kind)}*/logs/{LOG}", flush=True)
    tried: list[Tried] = []
    for trial in plan:
        one = _try(trial, job_file, base, calm=tried[0].run if tried else None)
        if (status := _passed_on(one)) is not None:
            return status
        tried.append(one)
        _print_row(one, width)
        if tried[0].verdict.outcome == "failed":
            break
    errors = [problem for one in tried for problem in one.verdict.problems]
    if json_file is not None:
        json_file.write_text(json.dumps(as_json(job, settings, tried), indent=2) + "\n")
    for error in errors:
        print(f"error: {error}", file=sys.stderr)
    if errors:
        return EXIT_FAILED
    for one in tried:
        if one.run is not None:  # only what was written just now, and nobody will go on from
            shutil.rmtree(one.run.files.checkpoints, ignore_errors=True)
    print(_survives(tried))
    return EXIT_FINISHED


def as_json(job: Job, settings: Settings, tried: Sequence[Tried]) -> dict[str, Any]:
    """Everything that is known of a rehearsal, as plain values."""
    return {
        "run": job.run.name,
        "cut": {key: {"from": value_at(job, key), "to": value} for key, value in settings.items()},
        "trials": [
            {
                "kind": one.trial.kind,
                "tried": one.trial.in_words,
                "changes": dict(one.trial.changes),
                "outcome": one.verdict.outcome,
                "in_words": one.verdict.in_words,
                "seconds": one.seconds,
                "status": None if one.run is None else one.run.status,
                "folder": None if one.run is None else str(one.run.files.path),
            }
            for one in tried
        ],
        "survives": not any(one.verdict.problems for one in tried),
        "errors": [str(problem) for one in tried for problem in one.verdict.problems],
    }


def _try(trial: Trial, job_file: Path, base: Sequence[str], calm: Rehearsed | None) -> Tried:
    """Run one trial in a process and a folder of its own, and judge it; one whose job is not valid is skipped."""
    settings = [*base, *_sets(trial.changes)]
    try:
        job = load_job(job_file, settings, CHECKS)
    except ConfigError as error:
        reason = " ".join(map(str, error.problems))
        return Tried(trial=trial, verdict=Verdict(outcome="skipped", in_words=reason))
    files = run_folder(job)
    if trial.resumes:
        assert calm is not None
        settings.append(setting("checkpoint.resume", str(calm.files.checkpoints / step_folder(SAVED))))
    files.set_aside()
    files.create()
    started = time.monotonic()
    with _log_of(files).open("wb") as output:
        status = train_apart(job_file, settings, output=output)
    seconds = time.monotonic() - started
    run = Rehearsed(job=job, files=files, status=status, about=trial.about)
    if calm is None:
        verdict = judge_calm(run)
    elif trial.resumes:
        missing = no_devices(calm, run, _printed(run))
        verdict = judge_resumed(calm, run) if missing is None else Verdict(outcome="skipped", in_words=missing)
    else:
        verdict = judge_struck(calm, run)
    return Tried(trial=trial, verdict=verdict, seconds=seconds, run=run)


def _passed_on(one: Tried) -> int | None:
    """The status that ends this command too: a signal's, or that of a job that was refused after all."""
    run = one.run
    if run is None:
        return None
    if run.status == EXIT_ABORTED or (run.status == EXIT_STOPPED and was_asked_to_stop(run.files)):
        return run.status
    if run.status == EXIT_BAD_JOB and one.trial.kind == "calm":
        print("\n".join(_printed(run)), file=sys.stderr)
        return EXIT_BAD_JOB
    return None


def _head(job: Job, settings: Settings) -> Iterator[str]:
    changes = [f"{key} {_shown(value_at(job, key))} -> {_shown(value)}" for key, value in settings.items()]
    text = f"{job.run.name}, cut: {', '.join(change.replace(' ', NO_BREAK) for change in changes)}"
    for line in textwrap.wrap(text, 118, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False):
        yield line.replace(NO_BREAK, " ")
    if isinstance(job.model, CustomModelConfig):
        yield f"  the model of {job.model.factory} stays whole: only its factory knows what could be cut"


def _print_row(one: Tried, width: int) -> None:
    seconds = f"{one.seconds:5.1f} s" if one.run else "      -"
    print(f"  {one.trial.in_words:{width}}  {one.verdict.outcome:7}  {seconds}  {one.verdict.in_words}", flush=True)
    if one.verdict.outcome == "failed" and one.run is not None:
        print(f"the end of {_log_of(one.run.files)}:", file=sys.stderr)
        for line in _printed(one.run)[-LAST_LINES:]:
            print(f"  | {line[:WIDEST]}", file=sys.stderr, flush=True)


def _survives(tried: Sequence[Tried]) -> str:
    """The last line of a rehearsal in which nothing failed."""
    of = {
        outcome: [one.trial.in_words for one in tried[1:] if one.verdict.outcome == outcome]
        for outcome in ("held", "skipped")
    }
    not_tried = f"; not tried: {', '.join(of['skipped'])}" if of["skipped"] else ""
    return f"this job survives: {', '.join(of['held'])}{not_tried}"


def _sets(settings: Settings) -> list[str]:
    return [setting(key, value) for key, value in settings.items()]


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _log_of(files: RunDir) -> Path:
    return files.logs / LOG


def _printed(run: Rehearsed) -> list[str]:
    return _log_of(run.files).read_text(encoding="utf-8", errors="replace").splitlines()


def _can_be_written(path: Path | None) -> Callable[[Job], Iterator[Problem]]:
    """A check that the file of ``--json`` has a folder: it is written only after minutes."""

    def check(_: Job) -> Iterator[Problem]:
        if path is not None and not path.absolute().parent.is_dir():
            rule, fix = "there is no such folder", "make it, or name another file"
            yield Problem(keys={"--json": str(path)}, rule=rule, fix=fix)

    return check
