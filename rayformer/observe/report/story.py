"""What happened and when: attempts, generations, failures and recoveries, over the steps that were executed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from rayformer.observe.report.charts import axis, place, thinned
from rayformer.observe.report.record import Line, Record, number
from rayformer.observe.report.text import escaped, moment, seconds, short, table

WIDTH, LEFT, RIGHT, GAP = 1140, 58, 14, 14
CURVE_TOP, CURVE_H = 12, 130
LANE_H = 22
MIN_ATTEMPT_WIDTH = 60.0
MAX_ROWS = 300

# What a kind of journal entry is drawn as, and what it says of itself.
BAD = {"fault", "cell_failed", "controller_failed", "placement_failed", "failed", "stall", "cell_lost"}
NOTED = {*BAD, "recovered", "stop_asked", "done"}


@dataclass(frozen=True, kw_only=True)
class Span:
    """An attempt: from when to when it ran, and where that lies in the drawing, which leaves out the time between."""

    attempt: int
    start: float
    stop: float
    left: float
    width: float

    def x(self, time: float) -> float:
        inside = min(max(time, self.start), self.stop) - self.start
        return self.left + self.width * (inside / (self.stop - self.start) if self.stop > self.start else 0.0)


def timeline_figure(record: Record) -> str:
    """Steps over time, and below them a lane for attempts and generations and one for what happened."""
    spans = {span.attempt: span for span in _spans(record)}
    if not spans:
        return ""
    lanes = CURVE_TOP + CURVE_H + 10
    body = [*_progress(record, spans), *_generations(record, spans, lanes)]
    body += _events(record.journal, spans, lanes + LANE_H + 6)
    body += [
        f'<text class="unit" x="{span.left:.1f}" y="{lanes + 2 * LANE_H + 24}">'
        f"attempt {span.attempt}: {moment(span.start)}, {seconds(span.stop - span.start)}</text>"
        for span in spans.values()
        if span.width >= 250 or len(spans) == 1
    ]
    height = lanes + 2 * LANE_H + 32
    legend = (
        '<span class="key c1">step</span><span class="key saved">checkpoint</span>'
        '<span class="key bad">failure</span><span class="key good">recovery</span><span class="key end">end</span>'
    )
    note = "; the time between attempts is left out" if len(spans) > 1 else ""
    return (
        f'<figure class="wide"><figcaption><b>Timeline</b> <span class="unit">step over time, in UTC{note}</span>'
        '</figcaption><div class="scroll">'
        f'<svg class="broad" viewBox="0 0 {WIDTH} {height}" role="img" aria-label="Timeline">{"".join(body)}</svg>'
        f"</div><p class=legend>{legend}</p></figure>"
    )


def events_table(record: Record) -> str:
    """The failures, recoveries, requests and ends, in words."""
    rows = [
        (moment(line["time"]), line["attempt"], line.get("generation", ""), line["kind"], _said(line))
        for line in record.journal
        if line["kind"] in NOTED
    ]
    if not rows:
        return ""
    left_out = f"<p>The first {len(rows) - MAX_ROWS} are left out.</p>" if len(rows) > MAX_ROWS else ""
    body = table(("time (UTC)", "attempt", "generation", "kind", "what"), rows[-MAX_ROWS:], kind="told")
    return f"<section><h2>What happened</h2>{left_out}{body}</section>"


def recoveries_table(record: Record) -> str:
    """What every recovery took, by its parts."""
    found = [line for line in record.journal if line["kind"] == "recovered"]
    if not found:
        return ""
    parts = ("detect_s", "drain_s", "form_s", "restore_s", "first_step_s", "total_s")
    rows = [
        (
            line["attempt"],
            line.get("generation", ""),
            _listed(line.get("cells")),
            line.get("cause", ""),
            line.get("source", ""),
            line.get("steps_redone", ""),
            *("" if (value := number(line, part)) is None else seconds(value) for part in parts),
        )
        for line in found[-MAX_ROWS:]
    ]
    heads = (
        "attempt",
        "generation",
        "cells",
        "cause",
        "source",
        "steps redone",
        *(part[:-2].replace("_", " ") for part in parts),
    )
    return f"<section><h2>Recoveries</h2>{table(heads, rows)}</section>"


def members_table(record: Record) -> str:
    """Who owned the cells at the end."""
    memberships = [
        line for line in record.journal if line["kind"] == "membership" and isinstance(line.get("cells"), Mapping)
    ]
    if not memberships:
        return ""
    cells = memberships[-1]["cells"]
    rows = [
        (cell, *(actor.get(key, "") for key in ("worker", "pid", "node")))
        for cell, actor in list(cells.items())[:MAX_ROWS]
        if isinstance(actor, Mapping)
    ]
    more = f"<p>and {len(cells) - MAX_ROWS} more</p>" if len(cells) > MAX_ROWS else ""
    summary = f"Cells of generation {escaped(memberships[-1].get('generation', ''))}"
    body = table(("cell", "worker", "pid", "node"), rows)
    return f"<details><summary>{summary}</summary>{body}{more}</details>"


def _spans(record: Record) -> Iterator[Span]:
    """The attempts side by side, as wide as they were long, but each wide enough to be seen."""
    lines = (*record.executed, *record.journal)
    times: dict[int, tuple[float, float]] = {}
    for line in lines:
        low, high = times.get(line["attempt"], (line["time"], line["time"]))
        times[line["attempt"]] = min(low, line["time"]), max(high, line["time"])
    room = WIDTH - LEFT - RIGHT - GAP * (len(times) - 1)
    least = min(MIN_ATTEMPT_WIDTH, max(room, 1.0) / (len(times) or 1))
    total = sum(high - low for low, high in times.values()) or 1.0
    spare = max(room - least * len(times), 0.0)
    left: float = LEFT
    for attempt in sorted(times):
        low, high = times[attempt]
        width = least + spare * (high - low) / total if len(times) > 1 else room
        yield Span(attempt=attempt, start=low, stop=high, left=left, width=width)
        left += width + GAP


def _progress(record: Record, spans: Mapping[int, Span]) -> Iterator[str]:
    high = max((line["step"] for line in record.executed), default=0)
    y = place(0.0, max(high, 1), CURVE_TOP + CURVE_H, -CURVE_H)
    for tick in filter(float.is_integer, axis(0.0, max(high, 1), 4)):
        yield f'<path class="grid" d="M{LEFT} {y(tick):.1f}H{WIDTH - RIGHT}"/>'
        yield f'<text x="{LEFT - 6}" y="{y(tick) + 4:.1f}" text-anchor="end">{short(tick)}</text>'
    for span in spans.values():
        points = [(line["time"], line["step"]) for line in record.executed if line["attempt"] == span.attempt]
        drawn = [f"{span.x(t):.1f} {y(step):.1f}" for t, step in thinned(sorted(points)) if step is not None]
        if drawn:
            yield f'<path class="line c1" d="M{"L".join(drawn * (1 if len(drawn) > 1 else 2))}"/>'


def _generations(record: Record, spans: Mapping[int, Span], top: float) -> Iterator[str]:
    for span in spans.values():
        starts: dict[object, float] = {}
        for line in sorted((*record.journal, *record.executed), key=lambda line: line["time"]):
            if line["attempt"] == span.attempt:
                starts.setdefault(line.get("generation"), line["time"])
        edges = [*(span.x(time) for time in starts.values()), span.left + span.width]
        for i, (generation, (left, right)) in enumerate(zip(starts, pairwise(edges))):
            yield (
                f'<rect class="generation g{i % 2}" x="{left:.1f}" y="{top:.1f}" width="{max(right - left, 1):.1f}"'
                f' height="{LANE_H}"><title>attempt {span.attempt}, generation {escaped(generation)}</title></rect>'
            )
            label = f"attempt {span.attempt}, generation {generation}"
            if right - left < 6.5 * len(label):
                label = f"{span.attempt}.{generation}"
            if right - left >= 7 * len(label) + 4:
                yield f'<text x="{left + 5:.1f}" y="{top + 15:.1f}">{escaped(label)}</text>'


def _events(journal: Sequence[Line], spans: Mapping[int, Span], top: float) -> Iterator[str]:
    middle = top + LANE_H / 2
    yield f'<path class="grid" d="M{LEFT} {middle:.1f}H{WIDTH - RIGHT}"/>'
    drawn: set[tuple[str, float]] = set()
    for line in sorted(journal, key=lambda line: line["kind"] in BAD):
        kind, span = line["kind"], spans[line["attempt"]]
        x, style = span.x(line["time"]), _style(kind)
        place_of_it = (style, round(x, 0))
        if not style or (place_of_it in drawn):
            continue
        drawn.add(place_of_it)
        title = f"<title>{moment(line['time'])} {escaped(kind)} {escaped(_said(line), 300)}</title>"
        if style == "good":
            left = span.x(line["time"] - (number(line, "total_s") or 0.0))
            yield (
                f'<rect class="fill good" x="{left:.1f}" y="{top + 3:.1f}" width="{max(x - left, 3):.1f}"'
                f' height="{LANE_H - 6}">{title}</rect>'
            )
        elif style == "bad":
            yield f'<path class="cross" d="M{x - 5:.1f} {middle - 5:.1f}l10 10m0-10l-10 10">{title}</path>'
        else:
            yield f'<circle class="dot {style}" cx="{x:.1f}" cy="{middle:.1f}" r="4">{title}</circle>'


def _style(kind: str) -> str:
    if kind in BAD:
        return "bad"
    return {"recovered": "good", "saved": "saved", "done": "end", "stop_asked": "end"}.get(kind, "")


def _said(line: Line) -> str:
    """An entry in words: its values, the most telling first."""
    match line["kind"]:
        case "saved":
            return f"step {line.get('step')} in {seconds(number(line, 'seconds') or 0.0)}"
        case "done":
            return f"{line.get('outcome')} at step {line.get('step')}"
        case "recovered":
            total = number(line, "total_s")
            took = "" if total is None else f" after {seconds(total)}"
            return f"{_listed(line.get('cells'))} back{took}, from {line.get('source')}: {line.get('cause')}"
        case "failed":
            return "; ".join(_errors(line.get("errors")))
        case "cell_failed":
            return "; ".join(_errors([line.get("error")]))
    hidden = {"time", "attempt", "generation", "kind", "role"}
    return ", ".join(f"{key} {_listed(value)}" for key, value in line.items() if key not in hidden)


def _errors(errors: object) -> Iterator[str]:
    for error in errors if isinstance(errors, list) else ():
        if isinstance(error, Mapping):
            yield f"{error.get('cell')} ({error.get('worker')}, {error.get('kind')}): {error.get('message')}"


def _listed(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, Iterable) and not isinstance(value, str) else str(value)
