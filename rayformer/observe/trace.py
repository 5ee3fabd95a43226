"""trace.json: where each cell was when, as a file that Perfetto and chrome://tracing open.

The format is Chrome's trace events, an array of them, one event on a line; times are in microseconds. Every replica is
a process of it and every cell a thread. The array is closed after each step, and opened again for the next one.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rayformer.events import Span, StepTrace
from rayformer.layout import Cell

_END = b"\n]\n"
_LAST_BYTES = 8 * 2**20


class TraceFile:
    """Appends the steps of a run to ``path``, which is made with the first."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._named: set[str] = set()

    def write(self, trace: StepTrace) -> None:
        """All cells' spans of one step; the file is a whole one when this returns."""
        events = [event for cell in trace.spans if cell not in self._named for event in _names(Cell.parse(cell))]
        self._named |= trace.spans.keys()
        for name, spans in trace.spans.items():
            place = _place(Cell.parse(name))
            common = {"step": trace.step, "generation": trace.generation, "cell": name}
            events += [
                {
                    "name": span.name,
                    "cat": span.phase,
                    "ph": "X",
                    "ts": span.start_us,
                    "dur": span.length_us,
                    **place,
                    "args": {**common, "waited_us": span.waited_us},
                }
                for span in spans
            ]
        text = ",\n".join(json.dumps(event, separators=(",", ":")) for event in events).encode()
        with open(self._path, "r+b" if self._path.exists() else "w+b") as file:
            size = file.seek(0, os.SEEK_END)
            if size < len(_END):
                file.write(b"[\n" + text + _END)
            else:
                file.seek(size - len(_END))
                file.write(b",\n" + text + _END)


def last_step(path: Path) -> StepTrace | None:
    """The last step in the file, None if there is no such file or nothing in it."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _LAST_BYTES))
            lines = file.read().splitlines()
    except FileNotFoundError:
        return None
    found: dict[str, list[Span]] = {}
    last: tuple[int, int] | None = None
    for event in _events_backwards(lines):
        at = event["args"]["generation"], event["args"]["step"]
        if last not in (None, at):
            break
        last = at
        span = Span(
            name=event["name"],
            phase=event["cat"],
            start_us=event["ts"],
            length_us=event["dur"],
            waited_us=event["args"]["waited_us"],
        )
        found.setdefault(event["args"]["cell"], []).insert(0, span)
    return None if last is None else StepTrace(generation=last[0], step=last[1], spans=found)


def _events_backwards(lines: Sequence[bytes]) -> Iterator[dict[str, Any]]:
    for line in reversed(lines):
        try:
            event = json.loads(line.rstrip(b","))
        except ValueError:  # a bracket, or the line that reading began in
            continue
        if isinstance(event, dict) and event.get("ph") == "X":
            yield event


def _place(cell: Cell) -> Mapping[str, int]:
    """The process and the thread of a cell: unique, and in the order of the pipeline."""
    return {"pid": cell.dp, "tid": (cell.pp * 1000 + cell.cp) * 1000 + cell.tp}


def _names(cell: Cell) -> Iterator[dict[str, Any]]:
    place = _place(cell)
    yield {"name": "process_name", "ph": "M", **place, "args": {"name": f"replica dp{cell.dp}"}}
    yield {"name": "thread_name", "ph": "M", **place, "args": {"name": str(cell)}}
    yield {"name": "thread_sort_index", "ph": "M", **place, "args": {"sort_index": place["tid"]}}
