"""Draw: a step's timeline as text, one row per rank."""

from __future__ import annotations

from math import floor

from rayformer.stages.check import Report


def draw(report: Report) -> str:
    """Rows of computations over time; the shortest one is one column wide, dashes prolong it, a dot is an idle column.

    >>> from rayformer.stages.lowering import lower
    >>> from rayformer.stages.check import check
    >>> from rayformer.stages.schedules import get_schedule
    >>> print(draw(check(lower(get_schedule("1f1b")(2, 1, 2)), rendezvous=False)))
    pp0 F0 F1 .  .  B0--- .  B1---
    pp1 .  F0 B0--- F1 B1--- .  .
    """
    slots = [slot for row in report.timeline for slot in row]
    tick = min(slot.end - slot.start for slot in slots)
    width = 1 + max(len(str(slot.op)) for slot in slots)

    def column(time: float) -> int:
        return floor(time / tick + 0.5)

    def idle(columns: int) -> str:
        return ".".ljust(width) * columns

    lines = []
    for rank, row in enumerate(report.timeline):
        line, now = f"pp{rank}".ljust(len(f"pp{len(report.timeline) - 1}") + 1), 0
        for slot in row:
            start, end = column(slot.start), column(slot.end)
            dashes = "-" * (width * (end - start - 1))
            line += idle(start - now) + f"{slot.op}{dashes}".ljust(width * (end - start))
            now = end
        lines.append((line + idle(column(report.makespan) - now)).rstrip())
    return "\n".join(lines)
