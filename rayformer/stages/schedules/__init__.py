"""The pipeline schedules a job can name: pure functions from (pp, chunks, microbatches) to compute orders."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from typing import TypeAlias

from rayformer.errors import ConfigError, Problem
from rayformer.stages.instructions import Compute
from rayformer.stages.schedules.gpipe import gpipe
from rayformer.stages.schedules.one_f_one_b import one_f_one_b

Schedule: TypeAlias = Callable[[int, int, int], tuple[tuple[Compute, ...], ...]]

SCHEDULES: dict[str, Schedule] = {"gpipe": gpipe, "1f1b": one_f_one_b}


def get_schedule(name: str) -> Schedule:
    """The schedule that `schedule.name` names; raises ConfigError if there is none."""
    if name not in SCHEDULES:
        raise ConfigError([_unknown(name)])
    return SCHEDULES[name]


def problems(name: str, *, pp: int, chunks: int, microbatches: int) -> list[Problem]:
    """Why this schedule can't run so many chunks and microbatches on so many ranks; empty if it can."""
    if name not in SCHEDULES:
        return [_unknown(name)]
    if chunks != 1:
        return [
            Problem(
                keys={"layout.virtual_stages": chunks, "schedule.name": name},
                rule=f"{name} holds one chunk of the model on each rank",
                fix="use layout.virtual_stages=1",
            )
        ]
    return []


def _unknown(name: str) -> Problem:
    near = difflib.get_close_matches(name, SCHEDULES, n=1)
    hint = f"did you mean {near[0]}?" if near else "use one of these"
    return Problem(keys={"schedule.name": name}, rule=f"the schedules are {', '.join(SCHEDULES)}", fix=hint)
