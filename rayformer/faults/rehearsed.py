"""What the runs of a rehearsal show: each judged by its folder, against that of the undisturbed one. Starts nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isclose
from statistics import median
from typing import Any, Literal

from rayformer.cell.plan import EXIT_FINISHED, EXIT_STOPPED
from rayformer.config.job import Job
from rayformer.errors import Problem
from rayformer.faults.cut import SAVED, STRUCK
from rayformer.faults.outcome import Difference, differences, prove
from rayformer.faults.plan import resolve_faults
from rayformer.observe.journal import read_journal
from rayformer.observe.metrics import read_metrics
from rayformer.observe.rundir import RunDir

# How far losses may lie apart, relative to their size, where sums are formed in another order; norms ten times as far.
ROUNDING = {"fp32": 1e-5, "bf16": 1e-2, "fp16": 1e-2}
COLD_START_S = 0.5  # a standby takes over at once; a process that must start first takes longer than this

Line = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What came of one run, and what is wrong if it failed."""

    outcome: Literal["held", "failed", "skipped"]
    in_words: str
    problems: tuple[Problem, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Rehearsed:
    """One run: its job, its folder, the exit status, and the key and value it was ``about``."""

    job: Job
    files: RunDir
    status: int
    about: Mapping[str, object]

    def failed(self, rule: str, fix: str) -> Verdict:
        """The verdict that this run broke a rule."""
        return Verdict(outcome="failed", in_words=rule, problems=(Problem(keys=self.about, rule=rule, fix=fix),))


def judge_calm(calm: Rehearsed) -> Verdict:
    """Whether the job runs at all, and with losses that are numbers."""
    if calm.status != EXIT_FINISHED:
        return calm.failed(f"it ended with status {calm.status}, undisturbed", "mend the job first")
    lines = read_metrics(calm.files.metrics)
    lost = next((line["step"] for line in lines if line["loss"] is None), None)
    if lost is not None:
        return calm.failed(f"the loss of step {lost} is no finite number", "lower optim.lr, or look at the data")
    skipped = sum(line["skipped"] for line in lines)
    skips = f", {skipped} without an update" if skipped else ""
    return Verdict(
        outcome="held",
        in_words=f"{len(lines)} steps of {median(line['step_s'] for line in lines):.3f} s{skips}, saved after {SAVED}",
    )


def judge_struck(calm: Rehearsed, struck: Rehearsed) -> Verdict:
    """Whether the lost cell was replaced, and the rest of the run is as if it had not been lost."""
    (fault,) = resolve_faults(struck.job.faults, struck.job.layout.degrees)
    journal = read_journal(struck.files.journal)
    if struck.status != EXIT_FINISHED and struck.job.recovery.max_failures == 0:
        rule = f"the loss of {fault.cell} in step {STRUCK} ended the run, as nothing may be repaired"
        problem = Problem(keys={"recovery.max_failures": 0}, rule=rule, fix="use 10, the default, or -1")
        return Verdict(outcome="failed", in_words=rule, problems=(problem,))
    if struck.status == EXIT_STOPPED:
        return struck.failed(
            "the lost cell found no place within cluster.wait_s", "leave room: recovery.spare_bundles=1, or more nodes"
        )
    if struck.status != EXIT_FINISHED:
        return struck.failed(
            f"its loss in step {STRUCK} ended the run with status {struck.status}", "see what it printed"
        )
    if not all(proof.is_proven for proof in prove([fault], [line for line in journal if line["kind"] == "fault"])):
        return struck.failed(f"it was not lost in step {STRUCK}, so nothing is shown", "see what the run printed")
    repairs = [line for line in journal if line["kind"] == "recovered" and fault.cell in line["cells"]]
    if not repairs:
        return struck.failed("the journal tells of no repair", f"see {struck.files.journal}")
    told = {line["step"] for line in read_metrics(struck.files.metrics)}
    lines = read_metrics(calm.files.metrics)
    expected = [line for line in lines if line["step"] in told or line["step"] >= STRUCK]
    untold = len(lines) - len(expected)  # a first cell takes along what it had not told yet
    done = _repair(repairs[0], journal) + (f", {_steps(untold)} before it untold" if untold else "")
    return _compared(calm, struck, expected, done)


def judge_resumed(calm: Rehearsed, resumed: Rehearsed) -> Verdict:
    """Whether a run with another microbatch or width went on from the undisturbed one's checkpoint as that did."""
    if resumed.status != EXIT_FINISHED:
        rule = f"the run that was to go on from step {SAVED} ended with status {resumed.status}"
        return resumed.failed(rule, "see what it printed")
    first = min(line["step"] for line in read_metrics(resumed.files.metrics))
    if first != SAVED + 1:
        rule = f"its first step was {first}, so it did not go on from the checkpoint of step {SAVED}"
        return resumed.failed(rule, "see what it printed")
    expected = [line for line in read_metrics(calm.files.metrics) if line["step"] > SAVED]
    return _compared(calm, resumed, expected, f"went on after step {SAVED}")


def no_devices(calm: Rehearsed, run: Rehearsed, printed: Sequence[str]) -> str | None:
    """Why a run of more cells than the job's found no devices, by its journal or what it printed; None if it did."""
    if run.job.layout.degrees.world <= calm.job.layout.degrees.world:
        return None
    for line in read_journal(run.files.journal):
        if line["kind"] == "placement_failed":
            return str(line["missing"])
    refusal = "error: cluster.device="
    return next((line.removeprefix("error: ") for line in printed if line.startswith(refusal)), None)


def was_asked_to_stop(files: RunDir) -> bool:
    """Whether somebody wanted the run to stop: a signal, and not the want of a place."""
    return any(line["kind"] == "stop_asked" for line in read_journal(files.journal))


def _compared(calm: Rehearsed, run: Rehearsed, expected: Sequence[Line], done: str) -> Verdict:
    """The verdict on a run that came to its end: its steps must be those ``expected`` of the calm one."""
    lines = read_metrics(run.files.metrics)
    found = differences(expected, lines)
    allowed = _rounding(calm.job, run.job)
    if allowed:
        found = tuple(one for one in found if not _is_rounding(one, allowed))
    if found:
        more = f" and {len(found) - 1} more differences" if len(found) > 1 else ""
        rule = f"{_in_words(found[0])}{more}"
        if allowed:
            rule += f"; rounding explains {allowed:g}"
        return run.failed(rule, f"compare {run.files.path} with {calm.files.path}")
    if not allowed:
        return Verdict(outcome="held", in_words=f"{done}; the same bits")
    losses = zip((line["loss"] for line in expected), (line["loss"] for line in lines))
    apart = max(abs(a - b) / abs(a) if a else 0.0 for a, b in losses)
    return Verdict(outcome="held", in_words=f"{done}; losses {apart:.1g} apart, {allowed:g} being rounding")


def _in_words(found: Difference) -> str:
    if found.key == "step":
        return f"step {found.step} is told of in one of the runs only"
    where = "at the end" if found.step is None else f"in step {found.step}"
    return f"{found.key} {where} is {found.chaos}, and {found.calm} in the undisturbed run"


def _rounding(calm: Job, job: Job) -> float:
    """How far the losses of two jobs may lie apart, relatively; 0 where they must be the same bits."""
    same_sums = job.batch.micro == calm.batch.micro and job.layout.degrees.dp <= _shares(calm)
    return 0.0 if same_sums and job.precision.deterministic else ROUNDING[job.precision.params]


def _shares(job: Job) -> int:
    asked = job.batch.virtual_ranks
    return max(job.layout.degrees.dp, 1 if asked == "auto" else asked)


def _is_rounding(found: Difference, allowed: float) -> bool:
    if found.key == "state_hash":
        return found.calm is not None and found.chaos is not None
    if not isinstance(found.calm, float) or not isinstance(found.chaos, float):
        return False
    return isclose(found.calm, found.chaos, rel_tol=allowed if found.key == "loss" else 10 * allowed)


def _repair(line: Line, journal: Sequence[Line]) -> str:
    """A repair in words, such as ``repaired in 2.31 s from holder by a cold start, no step done again``."""
    steps = _steps(STRUCK - 1 - line["step"])
    how = _new_owner(line["cells"], journal)
    return f"repaired in {line['total_s']:.2f} s from {line['source']}{how}, {steps} done again"


def _steps(number: int) -> str:
    return "no step" if not number else f"{number} step{'s' if number > 1 else ''}"


def _new_owner(cells: Sequence[str], journal: Sequence[Line]) -> str:
    """Whether a standby took over or a process had to start, as far as the time it took tells that."""
    asked = next((line["time"] for line in journal if line["kind"] == "replace"), None)
    placed = next((line["time"] for line in journal if line["kind"] == "cell_placed" and line["cell"] in cells), None)
    if asked is None or placed is None:
        return ""
    return " by a standby" if placed - asked < COLD_START_S else " by a cold start"
