"""A job cut short for a rehearsal: few layers, few samples and few steps, in the layout and formats it has. Pure.

step        1   2   3   4   5   6
                    |       |   the struck run loses a cell
                    every run saves; the resumed ones start from here
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from random import Random
from typing import Any

from rayformer.config.batch import BatchConfig
from rayformer.config.job import Job
from rayformer.config.model import ModelConfig
from rayformer.stages.schedules import TABLE
from rayformer.stages.split import drawn

STEPS, SAVED, STRUCK = 6, 3, 5
SEED = 1  # of the cell that is lost
LONGEST_NAME = 64
PATIENCE_S = 30.0  # for devices that the job itself does not need

Settings = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One run of a rehearsal: its ``changes`` to the cut job, the key and value it is ``about``, and what it shows.

    ``resumes`` says that it goes on from the undisturbed run's checkpoint of step 3.
    """

    kind: str
    in_words: str
    about: Settings
    changes: Settings
    resumes: bool = False

    @property
    def called(self) -> str:
        """The run's name."""
        return str(self.changes["run.name"])


def cut(job: Job) -> Settings:
    """The keys in which the cut job differs from ``job``, a valid one, with their values there.

    The learning rate follows the job's own schedule, of which these are the first steps.
    """
    every = job.recovery.snapshot_every
    decay_steps = job.optim.decay_steps
    wanted = {
        **_model(job),
        "run.steps": STEPS,
        "run.stop_at": None,
        **_batch(job),
        **_schedule(job),
        "optim.decay_steps": job.run.steps if decay_steps == "auto" else decay_steps,
        "eval.every": 0,
        "eval.batches": 1,
        "checkpoint.dir": "auto",
        "checkpoint.every": SAVED,
        "checkpoint.keep": 0,
        "checkpoint.resume": "auto",
        "recovery.snapshot_every": every if every == "auto" else min(every, STRUCK - SAVED),
        "faults": [],
        "cluster.dashboard": False,
        "observe.progress": "plain",
    }
    return {key: value for key, value in wanted.items() if value != value_at(job, key)}


def value_at(job: Job, key: str) -> Any:
    """What ``job`` has at a key such as ``batch.global``, as a plain value."""
    at: Any = job.dump()
    for name in key.split("."):
        at = at[name]
    return at


def trials(job: Job, name: str) -> Iterator[Trial]:
    """The runs that rehearse the cut job ``job``, whose run is called ``name``: the undisturbed one comes first."""

    def trial(kind: str, in_words: str, about: Settings, changes: Settings, *, resumes: bool = False) -> Trial:
        suffix = f"-rehearsal-{kind}"
        named = {"run.name": f"{name[: LONGEST_NAME - len(suffix)]}{suffix}"}
        idle = {} if "faults" in changes else {"recovery.standbys_per_node": 0}  # nobody would need them
        changes = {**named, **idle, **changes}
        return Trial(kind=kind, in_words=in_words, about=about or named, changes=changes, resumes=resumes)

    layout = job.layout.degrees
    cell = str(Random(SEED).choice(layout.cells()[1:] or layout.cells()))
    fault = {"kill": cell, "step": STRUCK, "at": "backward"}
    micro, dp = {"batch.micro": _other_micro(job.batch.micro)}, {"layout.dp": _other_dp(job)}
    width: dict[str, Any] = {
        **dp,
        "batch.virtual_ranks": _shares(job.batch, max(layout.dp, *dp.values())),
    }  # as the checkpoint has it
    if dp["layout.dp"] > layout.dp:
        width["cluster.wait_s"] = min(job.cluster.wait_s, PATIENCE_S)
    yield trial("calm", "the job, undisturbed", {}, {})
    yield trial("struck", f"the loss of {cell}", {"faults[0].kill": cell}, {"faults": [fault]})
    yield trial("micro", f"a resume with {_only(micro)}", micro, micro, resumes=True)
    yield trial("dp", f"a resume with {_only(dp)}", dp, width, resumes=True)


def _only(settings: Settings) -> str:
    ((key, value),) = settings.items()
    return f"{key}={value}"


def _model(job: Job) -> Settings:
    """As few layers as leave every stage that has some with one, but two; a factory's model stays whole."""
    if not isinstance(job.model, ModelConfig):
        return {}
    layout, layers = job.layout, job.model.layers
    fewest = min(2, layers)
    if layout.stages == "auto":
        return {"model.layers": min(layers, max(fewest, layout.pp * layout.virtual_stages))}
    whole, each = "|".join(drawn(layout.stages)), 0
    stages = ""
    while stages.count("t") < fewest:
        each += 1
        stages = re.sub(f"t{{{each},}}", "t" * each, whole)
    return {"model.layers": stages.count("t"), "layout.stages": stages}


def _schedule(job: Job) -> Settings:
    """One that runs any number of microbatches: a table has one only, and a group fits some."""
    schedule, chunks = job.schedule, job.layout.virtual_stages
    if schedule.name != TABLE:
        return {"schedule.group": None}
    name = "1f1b" if chunks == 1 else "interleaved"
    return {"schedule.name": name, "schedule.table": "", "schedule.vee": False, "schedule.group": None}


def _batch(job: Job) -> Settings:
    """The smallest global batch that gives every replica of a pipeline two microbatches, and the trials what they need.

    A ramp-up becomes one from half of the batch, which grows in the step in which the cell is lost.
    """
    batch, dp = job.batch, job.layout.degrees.dp
    shares, of_all = _shares(batch, dp), _shares(batch, max(dp, _other_dp(job)))
    pipelined = job.layout.pp > 1 and shares < 2 * dp
    times = 2 if pipelined or batch.micro == 1 else 1
    wished = [batch.micro * num for num in (of_all * times, of_all, shares)]
    start = batch.global_ if batch.rampup is None else batch.rampup.start
    size = next(size for size in wished if size <= start)
    if batch.rampup is None:
        return {"batch.global": size}
    return {
        "batch.global": 2 * size,
        "batch.rampup": {"start": size, "increment": size, "samples": (STRUCK - 1) * size},
    }


def _shares(batch: BatchConfig, dp: int) -> int:
    return max(dp, 1 if batch.virtual_ranks == "auto" else batch.virtual_ranks)


def _other_micro(micro: int) -> int:
    """The largest part of ``micro``, or twice of what has no parts: what divides the batch still does, or may."""
    return next((part for part in range(micro // 2, 0, -1) if micro % part == 0), 2)


def _other_dp(job: Job) -> int:
    """Half the replicas, which fit where all do, or a second one."""
    return job.layout.degrees.dp // 2 or 2
