"""``rayformer schedule``: a pipeline schedule drawn, and several compared, before anything runs."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rayformer.cli.columns import columns
from rayformer.errors import ConfigError, Problem
from rayformer.observe.report.bars import Pipeline
from rayformer.observe.report.page import drawings_page
from rayformer.stages.check import Costs, Report, ScheduleError, check
from rayformer.stages.draw import draw
from rayformer.stages.instructions import Program, stages_of
from rayformer.stages.lowering import lower
from rayformer.stages.schedules import chunk_problems, get_schedule
from rayformer.stages.schedules.table import KEY, from_table

TABLE = "table"
MAX_SIZE = 64 * 4 * 1024


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """A schedule that was found good, and what a step with it costs."""

    name: str
    chunks: int
    report: Report


def schedule_command(
    names: Sequence[str],
    *,
    pp: int,
    microbatches: int,
    virtual: int | None,
    costs: Sequence[str],
    table: Path | None,
    vee: bool,
    html: Path | None,
    as_json: bool,
) -> int:
    """Draw the schedules ``names`` and that of the file ``table``, and compare them in a table."""
    if not names and table is None:
        nothing = Problem(keys={"NAME": ""}, rule="there is nothing to draw", fix="name one, or give --table")
        raise ConfigError([nothing])
    drawn = [_named(name, pp, microbatches, virtual, costs) for name in names]
    if table is not None:
        drawn.append(_written(table, costs, vee))
    if html is not None:
        html.write_text(_page(drawn, pp=pp, microbatches=microbatches), encoding="utf-8")
    if as_json:
        print(json.dumps([_values(one) for one in drawn], indent=2))
        return 0
    for one in drawn:
        print(f"{one.name}\n{draw(one.report)}\n")
    print("\n".join(columns(HEAD, map(_row, drawn))))
    return 0


def _named(name: str, pp: int, microbatches: int, virtual: int | None, costs: Sequence[str]) -> Drawn:
    schedule = get_schedule(name)
    chunks = virtual or schedule.chunks or 2
    if wrong := chunk_problems(name, chunks=chunks):
        raise ConfigError(wrong)
    if pp * chunks * microbatches > MAX_SIZE:
        keys = {"--pp": pp, "--virtual": chunks, "--microbatches": microbatches}
        raise ConfigError([Problem(keys=keys, rule=f"their product is over {MAX_SIZE}", fix="use less of them")])
    return _checked(name, schedule.programs(pp, chunks, microbatches), costs, schedule.vee)


def _written(path: Path, costs: Sequence[str], vee: bool) -> Drawn:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        rule = f"it can't be read: {error.strerror if isinstance(error, OSError) else error}"
        raise ConfigError([Problem(keys={"--table": str(path)}, rule=rule, fix="name a text file")]) from None
    try:
        return _checked(TABLE, lower(from_table(text), vee=vee), costs, vee)
    except ScheduleError as error:
        fix = "mend the table: every rank does everything once, and backwards ascend"
        raise ConfigError([Problem(keys={KEY: str(path)}, rule=str(error), fix=fix)]) from None


def _checked(name: str, programs: Sequence[Program], costs: Sequence[str], vee: bool) -> Drawn:
    stages = stages_of(programs, vee=vee)
    check(programs, rendezvous=True, vee=vee)
    report = check(programs, costs=_costs(costs, stages.chunks, stages.last + 1), rendezvous=False, vee=vee)
    return Drawn(name=name, chunks=stages.chunks, report=report)


def _costs(texts: Sequence[str], chunks: int, num_stages: int) -> Sequence[Costs]:
    """The costs of every stage: given one by one, or once for what a rank holds, which is divided by its chunks."""
    given = [_one_cost(text) for text in texts]
    if len(given) == num_stages > 1:
        return [Costs(forward=f, backward=b + w, weight=w) for f, b, w in given]
    if len(given) > 1:
        keys: dict[str, object] = {"--costs": len(given)}
        rule = f"there are {num_stages} stages"
        raise ConfigError([Problem(keys=keys, rule=rule, fix="give it once, or once for every stage of the model")])
    f, b, w = given[0]
    return [Costs(forward=f / chunks, backward=(b + w) / chunks, weight=w / chunks)] * num_stages


def _one_cost(text: str) -> tuple[float, float, float]:
    """Of ``F=1,B=1,W=1``: a forward, an input gradient and a weight gradient."""
    found = dict(re.findall(r"([FBW])=([0-9.]+)(?:,|$)", text))
    try:
        f, b, w = (float(found[letter]) for letter in "FBW")
    except (KeyError, ValueError):
        f = b = w = 0.0
    if min(f, b, w) <= 0:
        fix = "write F=1,B=1,W=1: a forward, an input gradient, a weight gradient, each above 0"
        raise ConfigError([Problem(keys={"--costs": text}, rule="it does not name three costs", fix=fix)])
    return f, b, w


def _values(one: Drawn) -> dict[str, object]:
    report = one.report
    return {
        "schedule": one.name,
        "virtual_stages": one.chunks,
        "makespan": report.makespan,
        "ideal": report.ideal,
        "idle": report.idle,
        "bubble_of_total": report.bubble_of_total,
        "bubble_of_ideal": report.bubble_of_ideal,
        "peak_live": report.peak_live,
        "timeline": [[(str(slot.op), slot.start, slot.end) for slot in row] for row in report.timeline],
    }


HEAD = ("schedule", "virtual", "time", "ideal", "bubble of time", "of ideal", "microbatches held")


def _row(one: Drawn) -> tuple[object, ...]:
    report = one.report
    return (
        one.name,
        one.chunks,
        f"{report.makespan:g}",
        f"{report.ideal:g}",
        f"{100 * report.bubble_of_total:.1f} %",
        f"{100 * report.bubble_of_ideal:.1f} %",
        f"{max(report.peak_live) / one.chunks:g}",
    )


def _page(drawn: Sequence[Drawn], *, pp: int, microbatches: int) -> str:
    """The drawings, on one scale, and the table."""
    longest = max(one.report.makespan for one in drawn)
    figures = [
        Pipeline(
            title=one.name,
            note=f"{100 * one.report.bubble_of_total:.1f} % of the time is lost",
            ranks=[[(str(slot.op), slot.start, slot.end) for slot in row] for row in one.report.timeline],
            until=longest,
        )
        for one in drawn
    ]
    title = f"Pipeline schedules: {pp} ranks, {microbatches} microbatches"
    return drawings_page(title, figures, head=HEAD, rows=[_row(one) for one in drawn])
