"""The pipeline schedules a job can name: pure functions from (pp, chunks, microbatches) to compute orders."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from rayformer.errors import ConfigError, Problem
from rayformer.stages.instructions import Compute, Program
from rayformer.stages.lowering import lower
from rayformer.stages.schedules.gpipe import gpipe
from rayformer.stages.schedules.interleaved import interleaved
from rayformer.stages.schedules.one_f_one_b import one_f_one_b
from rayformer.stages.schedules.zb_h1 import zb_h1
from rayformer.stages.schedules.zbv import zbv

Orders: TypeAlias = tuple[tuple[Compute, ...], ...]


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """A schedule and where it wants the stages: ``chunks`` on each rank, None for any number of them.

    Called with (pp, chunks, microbatches) it gives the orders in which the ranks compute.
    """

    orders: Callable[[int, int, int], Orders]
    chunks: int | None = 1
    vee: bool = False

    def __call__(self, pp: int, chunks: int, microbatches: int) -> Orders:
        return self.orders(pp, chunks, microbatches)

    def programs(self, pp: int, chunks: int, microbatches: int) -> tuple[Program, ...]:
        """The orders with their sends and receives."""
        return lower(self(pp, chunks, microbatches), vee=self.vee)


SCHEDULES: dict[str, Schedule] = {
    "gpipe": Schedule(orders=gpipe),
    "1f1b": Schedule(orders=one_f_one_b),
    "interleaved": Schedule(orders=interleaved, chunks=None),
    "zb_h1": Schedule(orders=zb_h1),
    "zbv": Schedule(orders=zbv, chunks=2, vee=True),
}

RUNNABLE = ("gpipe", "1f1b")
"""Those that cells can run so far; the others are drawn and checked."""


def get_schedule(name: str) -> Schedule:
    """The schedule that `schedule.name` names; raises ConfigError if there is none."""
    if name not in SCHEDULES:
        raise ConfigError([_unknown(name, tuple(SCHEDULES))])
    return SCHEDULES[name]


def problems(name: str, *, pp: int, chunks: int, microbatches: int) -> list[Problem]:
    """Why this schedule can't run so many chunks and microbatches on so many ranks; empty if it can."""
    if name not in SCHEDULES:
        return [_unknown(name, RUNNABLE)]
    if name not in RUNNABLE:
        rule = f"so far {name} is only drawn, by rayformer schedule"
        return [Problem(keys={"schedule.name": name}, rule=rule, fix=f"use {' or '.join(RUNNABLE)}")]
    return chunk_problems(name, chunks=chunks)


def chunk_problems(name: str, *, chunks: int) -> list[Problem]:
    """Why the schedule ``name`` can't have so many chunks on a rank."""
    wanted = SCHEDULES[name].chunks
    if wanted in (None, chunks):
        return []
    held = "one chunk" if wanted == 1 else f"{wanted} chunks"
    return [
        Problem(
            keys={"layout.virtual_stages": chunks, "schedule.name": name},
            rule=f"{name} holds {held} of the model on each rank",
            fix=f"use layout.virtual_stages={wanted}",
        )
    ]


def _unknown(name: str, known: tuple[str, ...]) -> Problem:
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]}?" if near else "use one of these"
    return Problem(keys={"schedule.name": name}, rule=f"the schedules are {', '.join(known)}", fix=hint)
