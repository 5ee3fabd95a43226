"""Plain text in columns, as the commands print it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence


def columns(head: Sequence[object], rows: Iterable[Sequence[object]]) -> Iterator[str]:
    """The lines of a table, each indented by two; "none" if there are no rows."""
    lines = [list(map(str, row)) for row in (head, *rows)]
    if len(lines) == 1:
        yield "  none"
        return
    widths = [max(map(len, column)) for column in zip(*lines)]
    for line in lines:
        yield "  " + "  ".join(f"{text:{width}}" for text, width in zip(line, widths)).rstrip()
