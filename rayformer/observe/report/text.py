"""Text for a page: escaped, and numbers, times and tables as people read them."""

from __future__ import annotations

import html
import time
from collections.abc import Iterable, Sequence


def escaped(value: object, limit: int = 2000) -> str:
    """Any value as text that is safe between tags and in quotes, without characters that can't be seen."""
    text = "".join(c if c.isprintable() or c == "\n" else "·" for c in str(value))
    return html.escape(text if len(text) <= limit else text[:limit] + "…")


def short(value: float) -> str:
    """A number in few characters.

    >>> [short(value) for value in (0, 0.25, 3e-4, 60, 12500, 3_000_000, 2.50)]
    ['0', '0.25', '3e-4', '60', '12.5k', '3M', '2.5']
    """
    size = abs(value)
    if size >= 1e15 or 0 < size < 1e-3:
        return _scientific(value)
    for unit, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if size >= unit:
            return f"{value / (1e3 if letter == 'k' else unit):.4g}{letter}"
    return f"{value:.6g}"


def scale_texts(ticks: Sequence[float]) -> list[str]:
    """The numbers along an axis, all written in one way.

    >>> scale_texts([0, 5e-4, 1e-3]), scale_texts([0, 0.5])
    (['0', '5e-4', '1e-3'], ['0', '0.5'])
    """
    small = max(map(abs, ticks)) < 0.005
    return [_scientific(tick) if small and tick else short(tick) for tick in ticks]


def _scientific(value: float) -> str:
    mantissa, _, exponent = f"{value:.2e}".partition("e")
    return f"{float(mantissa):g}e{int(exponent)}"


def seconds(value: float) -> str:
    """A length of time.

    >>> [seconds(value) for value in (0.0123, 4.2, 75, 3725, 200_000)]
    ['12 ms', '4.20 s', '1 min 15 s', '1 h 2 min', '2 d 7 h']
    """
    if value < 1:
        return f"{1000 * value:.0f} ms"
    if value < 60:
        return f"{value:.2f} s"
    for size, name, below, small in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if value >= size:
            return f"{int(value // size)} {name} {int(value % size // below)} {small}"
    raise AssertionError("unreachable")


def moment(unix: float) -> str:
    """A time of day, in UTC."""
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(unix))
    except (OverflowError, ValueError, OSError):
        return "?"


def table(heads: Sequence[str], rows: Iterable[Sequence[object]], kind: str = "") -> str:
    """A table of texts."""
    head = "".join(f"<th>{escaped(name)}</th>" for name in heads)
    body = "".join("<tr>" + "".join(f"<td>{escaped(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return (
        f'<div class="scroll"><table class="{kind}"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
    )
