"""A line chart over the steps of a run, as SVG that a few lines of script make readable by the pointer."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

from rayformer.observe.report.text import escaped, scale_texts, short

WIDTH, HEIGHT = 560, 230
LEFT, RIGHT, TOP, BOTTOM = 58, 14, 12, 34
INNER_W, INNER_H = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM
NUM_BUCKETS = INNER_W // 2

Point = tuple[float, float | None]


@dataclass(frozen=True, kw_only=True)
class Series:
    """One curve; ``color`` is a style class. A value of None is a gap. ``dotted`` marks every point."""

    name: str
    color: str
    points: Sequence[Point]
    dotted: bool = False


@dataclass(frozen=True, kw_only=True)
class Chart:
    """Curves over the same steps. ``marks`` are steps to point out; ``scale`` is what is shown before anyone chooses.

    ``from_zero`` lets the linear axis start at 0.
    """

    title: str
    unit: str
    series: Sequence[Series]
    marks: Sequence[float] = ()
    mark_name: str = ""
    scale: str = "linear"
    from_zero: bool = False


def thinned(points: Sequence[Point], num_buckets: int = NUM_BUCKETS) -> list[Point]:
    """Few enough points to draw: of each of ``num_buckets`` equal spans the first, least, greatest and last value.

    >>> thinned([(step, step % 7) for step in range(100)], 1)
    [(0, 0), (6, 6), (99, 1)]
    """
    if len(points) <= 4 * num_buckets:
        return list(points)
    low, high = points[0][0], points[-1][0]
    kept: list[Point] = []
    for _, bucket in groupby(points, lambda point: int((point[0] - low) / (high - low) * num_buckets * (1 - 1e-12))):
        values = list(bucket)
        finite = [(y, -i) for i, (_, y) in enumerate(values) if y is not None]
        chosen = {-min(finite, key=lambda p: (p[0], -p[1]))[1], -max(finite)[1]} if finite else set()
        ends = {-finite[0][1], -finite[-1][1]} if finite else {0}
        kept += [values[i] for i in sorted(chosen | ends)]
    return kept


def figure(chart: Chart) -> str:
    """The chart as a ``<figure>``, with a choice between a linear and a logarithmic axis where that makes sense."""
    series = [(s, thinned(s.points)) for s in chart.series]
    values = [y for _, points in series for _, y in points if y is not None]
    if not values:
        return ""
    steps = [x for _, points in series for x, _ in points]
    across = (min(steps), max(steps)) if max(steps) > min(steps) else (steps[0] - 1, steps[0] + 1)
    can_log = min(values) > 0 and max(values) > 1.05 * min(values)
    scales = ["linear", "log"] if can_log else ["linear"]
    shown = chart.scale if can_log else "linear"
    key = "".join(c if c.isalnum() else "-" for c in chart.title.lower())
    drawings = "".join(_svg(chart, series, values, across, scale) for scale in scales)
    choice = ""
    if can_log:
        choice = "".join(
            f'<label><input type="radio" name="{key}" value="{scale}"{" checked" * (scale == shown)}>{scale}</label>'
            for scale in scales
        )
    legend = "".join(f'<span class="key {s.color}">{escaped(s.name)}</span>' for s in chart.series)
    if chart.marks:
        legend += f'<span class="key bad">{escaped(chart.mark_name)}</span>'
    data = [[s.name, [(x, None if y is None else float(f"{y:.6g}")) for x, y in points]] for s, points in series]
    unit = f' <span class="unit">{escaped(chart.unit)}</span>' if chart.unit else ""
    return (
        f'<figure class="chart" data-from="{across[0]}" data-to="{across[1]}" data-left="{LEFT}"'
        f' data-width="{INNER_W}">'
        f'<figcaption><b>{escaped(chart.title)}</b>{unit}<span class="choice">{choice}</span></figcaption>'
        f"{drawings}<p class=legend>{legend}<output></output></p>"
        f'<script type="application/json">{script_json(data)}</script></figure>'
    )


def script_json(data: object) -> str:
    """JSON that can stand in a ``<script>`` element."""
    return json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")


def axis(low: float, high: float, num: int = 5) -> list[float]:
    """About ``num`` round numbers from ``low`` to ``high``.

    >>> axis(0.13, 1.02)
    [0.2, 0.4, 0.6, 0.8, 1.0]
    """
    if not high > low:
        return [low]
    raw = (high - low) / num
    size = 10.0 ** math.floor(math.log10(raw))
    unit = next(m * size for m in (1, 2, 5, 10) if m * size >= raw * 0.999)
    first = math.ceil(low / unit - 1e-9)
    digits = 1 - math.floor(math.log10(size))
    return [round(i * unit, digits) for i in range(first, math.floor(high / unit + 1e-9) + 1)]


def log_axis(low: float, high: float) -> list[float]:
    """Round numbers for a logarithmic axis: powers of ten, with 2 and 5 between them if there are few.

    >>> log_axis(0.3, 12)
    [0.5, 1.0, 2.0, 5.0, 10.0]
    """
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    num_decades = math.log10(high / low)
    every = max(1, round(num_decades / 6))
    mantissas = (1, 2, 5) if num_decades <= 2.2 else (1,)
    found = [float(f"{m}e{d}") for d in decades if d % every == 0 for m in mantissas]
    inside = [tick for tick in found if low <= tick <= high]
    return inside if len(inside) >= 3 else [tick for tick in axis(low, high, 4) if tick > 0]


def place(low: float, high: float, start: float, length: float) -> Callable[[float], float]:
    """Where a value from ``low`` to ``high`` lies on a line of ``length`` from ``start``."""
    span = (high - low) or 1.0
    return lambda value: start + (value - low) / span * length


def _svg(
    chart: Chart,
    series: Sequence[tuple[Series, Sequence[Point]]],
    values: Sequence[float],
    across: tuple[float, float],
    scale: str,
) -> str:
    x = place(*across, LEFT, INNER_W)
    low, high = min(values), max(values)
    if scale == "log":
        ticks = log_axis(low, high)
        along = place(math.log(low), math.log(high), TOP + INNER_H, -INNER_H)
        y: Callable[[float], float] = lambda value: along(math.log(value))  # noqa: E731
    else:
        low = min(0.0, low) if chart.from_zero else low
        if low == high:
            low, high = low - abs(low) / 2 - 1e-12, high + abs(high) / 2 + 1e-12
        ticks = axis(low, high)
        y = place(low, high, TOP + INNER_H, -INNER_H)
    body = [
        f'<path class="grid" d="M{LEFT} {y(tick):.1f}h{INNER_W}"/>'
        f'<text x="{LEFT - 6}" y="{y(tick) + 4:.1f}" text-anchor="end">{told}</text>'
        for tick, told in zip(ticks, scale_texts(ticks))
    ]
    body += [step_axis(across, x, TOP + INNER_H)]
    marked = sorted({round(x(step), 1) for step in chart.marks})
    body += [f'<path class="mark bad" d="M{at} {TOP}v{INNER_H}"/>' for at in marked]
    for s, points in series:
        body.append(_curve(s, [(x(step), None if value is None else y(value)) for step, value in points]))
    return (
        f'<svg class="{scale}" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escaped(chart.title)}">'
        f'{"".join(body)}<path class="cursor" d="M0 {TOP}v{INNER_H}"/></svg>'
    )


def step_axis(across: tuple[float, float], x: Callable[[float], float], bottom: float) -> str:
    """The axis of steps below a drawing, with whole numbers only."""
    ticks = [tick for tick in axis(*across, 6) if tick == int(tick)]
    if not ticks or (ticks[0] > across[0] and x(ticks[0]) - x(across[0]) > 45):
        ticks = [across[0], *ticks]
    texts = "".join(f'<text x="{x(t):.1f}" y="{bottom + 16:.0f}" text-anchor="middle">{short(t)}</text>' for t in ticks)
    width = x(across[1]) - x(across[0])
    return (
        f'<path class="axis" d="M{x(across[0]):.1f} {bottom:.1f}h{width:.1f}"/>{texts}'
        f'<text class="unit" x="{x(across[1]):.1f}" y="{bottom + 30:.0f}" text-anchor="end">step</text>'
    )


def _curve(series: Series, points: Sequence[tuple[float, float | None]]) -> str:
    edges = [-1, *(i for i, (_, y) in enumerate(points) if y is None), len(points)]
    drawn, dots = [], []
    for start, stop in pairwise(edges):
        piece = [f"{x:.1f} {y:.1f}" for x, y in points[start + 1 : stop] if y is not None]
        if len(piece) > 1:
            drawn.append("M" + "L".join(piece))
        if len(piece) == 1 or (series.dotted and len(piece) <= 60):
            dots += piece
    dense = " dense" if len(points) > NUM_BUCKETS else ""
    path = f'<path class="line{dense} {series.color}" d="{"".join(drawn)}"/>' if drawn else ""
    return path + "".join(
        '<circle class="dot {}" cx="{}" cy="{}" r="2.6"/>'.format(series.color, *dot.split()) for dot in dots
    )
