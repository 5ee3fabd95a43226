"""What fills a time: the phases of each step, and the computations of a pipeline's ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from rayformer.observe.report.charts import HEIGHT, INNER_H, INNER_W, LEFT, TOP, WIDTH, axis, place, step_axis
from rayformer.observe.report.record import Line, number
from rayformer.observe.report.text import escaped, short

PHASES = ("data", "forward", "backward", "communication", "optimizer")
NUM_COLORS = 8
NUM_BARS = INNER_W // 4
MAX_LABELLED = 3000

Slot = tuple[str, float, float]


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """A step of the pipeline: for each rank what it computes, such as ``F3``, and from when to when.

    ``title`` and ``note`` say what is drawn; ``until`` is the time at which the drawing ends, if not with the last.
    """

    ranks: Sequence[Sequence[Slot]]
    title: str = "Pipeline"
    note: str = ""
    until: float = 0.0


def phases_figure(steps: Sequence[Line]) -> str:
    """How long each phase of a step took, one on the other; means of several steps where there are many."""
    timed = [line for line in steps if isinstance(line.get("phase_s"), dict)]
    seen = {str(name) for line in timed for name in line["phase_s"]}
    names = [name for name in PHASES if name in seen] + sorted(seen - set(PHASES))
    names = names[:NUM_COLORS]
    if not names:
        return ""
    stride = -(-len(timed) // NUM_BARS)
    bars = [
        {name: fmean(number(line["phase_s"], name) or 0.0 for line in timed[i : i + stride]) for name in names}
        for i in range(0, len(timed), stride)
    ]
    high = max(sum(bar.values()) for bar in bars) or 1.0
    across = (float(timed[0]["step"]), float(timed[-1]["step"]))
    y = place(0.0, high, TOP + INNER_H, -INNER_H)
    width = INNER_W / len(bars)
    drawn = width - (0.6 if width > 5 else 0)
    body = [
        f'<path class="grid" d="M{LEFT} {y(tick):.1f}h{INNER_W}"/>'
        f'<text x="{LEFT - 6}" y="{y(tick) + 4:.1f}" text-anchor="end">{short(tick)}</text>'
        for tick in axis(0.0, high)
    ]
    for color, name in enumerate(names):
        path = []
        for i, bar in enumerate(bars):
            base = sum(bar[below] for below in names[:color])
            top, bottom = y(base + bar[name]), y(base)
            if bottom - top >= 0.05:
                path.append(f"M{LEFT + i * width:.2f} {bottom:.1f}V{top:.1f}h{drawn:.2f}V{bottom:.1f}z")
        body.append(f'<path class="fill c{color}" d="{"".join(path)}"><title>{escaped(name)}</title></path>')
    body.append(step_axis(across, place(*across, LEFT + width / 2, INNER_W - width), TOP + INNER_H))
    total = sum(sum(bar.values()) for bar in bars) or 1.0
    legend = "".join(
        f'<span class="key c{color}">{escaped(name)} {100 * sum(bar[name] for bar in bars) / total:.0f} %</span>'
        for color, name in enumerate(names)
    )
    note = f", means of {stride} steps" if stride > 1 else ""
    return (
        f'<figure class="chart"><figcaption><b>Phases of a step</b> <span class="unit">s{note}</span></figcaption>'
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="Phases of a step">{"".join(body)}'
        f"</svg><p class=legend>{legend}</p></figure>"
    )


def pipeline_figure(pipeline: Pipeline) -> str:
    """The computations of every rank over time: a row for each rank, a box for each microbatch."""
    ranks = [list(row) for row in pipeline.ranks if row]
    if not ranks:
        return ""
    end = max(pipeline.until, *(stop for row in ranks for _, _, stop in row))
    left, width, row_height = 44, 1096, 24
    x = place(0.0, end, left, width)
    labelled = sum(map(len, ranks)) <= MAX_LABELLED
    body = []
    kinds = sorted({op[:1] for row in ranks for op, _, _ in row}, key=lambda kind: ([*_OPS, kind].index(kind), kind))
    for rank, row in enumerate(ranks):
        top = 4 + rank * row_height
        body.append(f'<text x="0" y="{top + 15}">pp{rank}</text>')
        body.append(f'<rect class="idle" x="{left}" y="{top}" width="{width}" height="{row_height - 4}"/>')
        for op, start, stop in row:
            box = x(stop) - x(start)
            title = f"<title>pp{rank} {escaped(op)}</title>" if labelled else ""
            body.append(
                f'<rect class="op {_op_color(op)}" x="{x(start):.1f}" y="{top}" width="{max(box - 1, 0.4):.1f}"'
                f' height="{row_height - 4}" rx="2">{title}</rect>'
            )
            if labelled and box >= 6 * len(op) + 6:
                middle = f'x="{x(start) + box / 2:.1f}" y="{top + 14}" text-anchor="middle"'
                body.append(f'<text class="on" {middle}>{escaped(op)}</text>')
    height = 8 + len(ranks) * row_height
    legend = "".join(f'<span class="key {_op_color(kind)}">{_OPS.get(kind, escaped(kind))}</span>' for kind in kinds)
    return (
        f'<figure class="wide"><figcaption><b>{escaped(pipeline.title)}</b>'
        f' <span class="unit">{escaped(pipeline.note)}</span></figcaption><div class="scroll">'
        f'<svg class="broad" viewBox="0 0 {left + width} {height}" role="img" aria-label="{escaped(pipeline.title)}">'
        f'{"".join(body)}</svg></div><p class=legend>{legend}<span class="key idle">waits</span></p></figure>'
    )


_OPS = {"F": "forward", "B": "backward", "W": "weight gradients"}


def _op_color(op: str) -> str:
    return {"F": "c1", "B": "c2", "W": "c4"}.get(op[:1], "c5")
