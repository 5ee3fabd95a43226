"""A step of the pipeline as it was measured, beside what its schedule allows with the same computing times."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from statistics import fmean

from rayformer.config.job import Job
from rayformer.events import Span, StepTrace
from rayformer.layout import Cell
from rayformer.observe.report.bars import Pipeline, Slot
from rayformer.stages.check import Costs, check
from rayformer.stages.instructions import StageMap
from rayformer.stages.schedules import get_schedule

_COMPUTES = re.compile(r"([FBW])(\d+)(?:c(\d+))?(?:\[\d+:\d+\])?")


def measured_pipeline(job: Job, trace: StepTrace | None) -> Pipeline | None:
    """What the first replica's first tp ranks computed in a traced step; None if there is nothing to draw.

    What a computation waited at its start, for its input, is left out of it.
    """
    if trace is None:
        return None
    rows: dict[int, list[Slot]] = {}
    for name, spans in trace.spans.items():
        cell = Cell.parse(name)
        if (cell.dp, cell.cp, cell.tp) == (0, 0, 0):
            rows[cell.pp] = _slots(spans)
    ranks = [rows[pp] for pp in sorted(rows)]
    if not any(ranks):
        return None
    began = min(start for row in ranks for _, start, _ in row)
    ranks = [[(op, start - began, stop - began) for op, start, stop in row] for row in ranks]
    took = max(stop for row in ranks for _, _, stop in row)
    busy = max(sum(stop - start for _, start, stop in row) for row in ranks)
    note = f"step {trace.step}, {1e3 * took:.1f} ms, of which {_percent(1 - busy / took)} are lost to waiting"
    allowed = _allowed(job, ranks)
    if allowed is not None:
        makespan, bubble = allowed
        note += f"; the schedule loses {_percent(bubble)} of {1e3 * makespan:.1f} ms where computing takes as long"
    return Pipeline(ranks=ranks, title="Pipeline, measured", note=note)


def _slots(spans: Sequence[Span]) -> list[Slot]:
    """The computations, in seconds; those that are cut in parts have several."""
    slots: list[Slot] = []
    for span in spans:
        found = _COMPUTES.fullmatch(span.name)
        if found is None:
            continue
        name = span.name.partition("[")[0]
        start, stop = 1e-6 * (span.start_us + span.waited_us), 1e-6 * (span.start_us + span.length_us)
        slots.append((name, start, stop))
    return slots


def _allowed(job: Job, ranks: Sequence[Sequence[Slot]]) -> tuple[float, float] | None:
    """The time that the job's schedule takes with the mean computing times of every stage, and the share it loses."""
    schedule = get_schedule(job.schedule.name, **job.schedule.options)
    stage_map = StageMap(pp=len(ranks), chunks=job.layout.virtual_stages, vee=schedule.vee)
    seconds: defaultdict[tuple[int, str], defaultdict[int, float]] = defaultdict(lambda: defaultdict(float))
    for rank, row in enumerate(ranks):
        for op, start, stop in row:
            letter, microbatch, chunk = _COMPUTES.fullmatch(op).groups()  # type: ignore[union-attr]
            seconds[stage_map.stage(rank, int(chunk or 0)), letter][int(microbatch)] += stop - start
    num_microbatches = len(seconds[0, "F"])
    mean = {key: fmean(by_microbatch.values()) for key, by_microbatch in seconds.items()}
    costs = []
    for stage in range(stage_map.last + 1):
        if (stage, "F") not in mean or (stage, "B") not in mean:
            return None
        weight = mean.get((stage, "W"), 0.0)
        costs.append(Costs(forward=mean[stage, "F"], backward=mean[stage, "B"] + weight, weight=weight))
    programs = schedule.programs(stage_map.pp, stage_map.chunks, num_microbatches)
    report = check(programs, costs=costs, rendezvous=False, vee=schedule.vee)
    return report.makespan, report.bubble_of_total


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"
