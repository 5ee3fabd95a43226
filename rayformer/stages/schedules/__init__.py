"""The pipeline schedules a job can name: pure functions from (pp, chunks, microbatches) to compute orders."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeAlias

from rayformer.errors import ConfigError, Problem
from rayformer.stages.check import ScheduleError, check
from rayformer.stages.instructions import Compute, Program, stages_of
from rayformer.stages.lowering import lower
from rayformer.stages.schedules.gpipe import gpipe
from rayformer.stages.schedules.interleaved import fits, interleaved
from rayformer.stages.schedules.one_f_one_b import one_f_one_b
from rayformer.stages.schedules.table import from_table
from rayformer.stages.schedules.zb_h1 import zb_h1
from rayformer.stages.schedules.zbv import zbv

Orders: TypeAlias = tuple[tuple[Compute, ...], ...]
TABLE = "table"
KEYS = {"group": "schedule.group", "table": "schedule.table", "vee": "schedule.vee"}


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


def get_schedule(name: str, *, group: int | None = None, table: str = "", vee: bool = False) -> Schedule:
    """The schedule that `schedule.name` names; raises ConfigError if there is none.

    ``group`` is that of interleaved, ``table`` and ``vee`` are those of a schedule written down.
    """
    if name == TABLE:
        return Schedule(orders=partial(_written, table), chunks=None, vee=vee)
    if name not in SCHEDULES:
        raise ConfigError([_unknown(name)])
    if group is not None and name == "interleaved":
        return replace(SCHEDULES[name], orders=partial(interleaved, group=group))
    return SCHEDULES[name]


def problems(
    name: str,
    *,
    pp: int,
    chunks: int,
    microbatches: Collection[int],
    group: int | None = None,
    table: str = "",
    vee: bool = False,
) -> Iterator[Problem]:
    """Why this schedule can't run so many chunks on so many ranks.

    ``microbatches`` are the numbers of them that the replicas have, as far as they are known.
    """
    if name != TABLE and name not in SCHEDULES:
        yield _unknown(name)
        return
    for key, value, owner in (("group", group, "interleaved"), ("table", table, TABLE), ("vee", vee, TABLE)):
        if value and name != owner:
            keys = {KEYS[key]: value, "schedule.name": name}
            rule = f"{key} has a meaning for {owner} only"
            yield Problem(keys=keys, rule=rule, fix=f"leave it out, or use schedule.name={owner}")
    yield from chunk_problems(name, chunks=chunks)
    if name == "interleaved" and group is not None:
        for m in sorted(microbatches):
            if not fits(group, pp, m):
                good = [str(size) for size in range(1, m + 1) if fits(size, pp, m)]
                yield Problem(
                    keys={KEYS["group"]: group, "layout.pp": pp},
                    rule=f"of a replica's {m} microbatches no group may be smaller than pp, and none larger than all",
                    fix=f"use one of {', '.join(good[:8])}, or leave it out",
                )
    if name == TABLE:
        yield from _table_problems(table, pp=pp, chunks=chunks, microbatches=microbatches, vee=vee)


def chunk_problems(name: str, *, chunks: int) -> list[Problem]:
    """Why the schedule ``name`` can't have so many chunks on a rank."""
    wanted = None if name == TABLE else SCHEDULES[name].chunks
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


def _written(table: str, pp: int, chunks: int, microbatches: int) -> Orders:
    if wrong := list(_table_problems(table, pp=pp, chunks=chunks, microbatches=[microbatches], vee=None)):
        raise ConfigError(wrong)
    return from_table(table)


def _table_problems(
    table: str, *, pp: int, chunks: int, microbatches: Collection[int], vee: bool | None
) -> Iterator[Problem]:
    """What is wrong with a schedule written down; whether it can be executed is looked at if ``vee`` is told."""
    try:
        orders = from_table(table)
    except ConfigError as error:
        yield from error.problems
        return
    found = stages_of(orders)
    num = len({op.microbatch for order in orders for op in order})
    fits_all = True
    for key, what, has, wanted in (
        ("layout.pp", "lines", found.pp, {pp}),
        ("layout.virtual_stages", "chunks", found.chunks, {chunks}),
        ("batch.global", "microbatches", num, set(microbatches) or {num}),
    ):
        if wanted != {has}:
            fits_all = False
            shown = " or ".join(map(str, sorted(wanted)))
            yield Problem(
                keys={KEYS["table"]: f"{has} {what}", key: shown},
                rule=f"it has {has} {what}, and there are {shown} of a replica",
                fix="write a table for this layout and batch; rayformer schedule --table draws it",
            )
    if not fits_all or vee is None:
        return
    try:
        check(lower(orders, vee=vee), rendezvous=True, vee=vee)
    except ScheduleError as error:
        fix = "mend the table: every rank does everything once, and backwards ascend"
        yield Problem(keys={KEYS["table"]: f"{len(orders)} lines"}, rule=str(error), fix=fix)


def _unknown(name: str) -> Problem:
    known = (*SCHEDULES, TABLE)
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]}?" if near else "use one of these"
    return Problem(keys={"schedule.name": name}, rule=f"the schedules are {', '.join(known)}", fix=hint)
