"""A curve of bounded size that is drawn in one line of text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import fmean

BLOCKS = "▁▂▃▄▅▆▇█"
MAX_POINTS = 512


@dataclass(frozen=True, kw_only=True)
class Curve:
    """Means of ``stride`` values each; when there are too many of them, pairs are merged and the stride doubles."""

    points: tuple[float, ...] = ()
    stride: int = 1
    pending: tuple[float, ...] = ()

    def add(self, value: float) -> Curve:
        """The curve with one more value at its end."""
        pending = (*self.pending, value)
        if len(pending) < self.stride:
            return replace(self, pending=pending)
        points = (*self.points, fmean(pending))
        if len(points) < MAX_POINTS:
            return replace(self, points=points, pending=())
        merged = tuple(fmean(points[i : i + 2]) for i in range(0, MAX_POINTS, 2))
        return Curve(points=merged, stride=2 * self.stride)

    def draw(self, width: int) -> str:
        """At most ``width`` characters, the lowest block for the least value and the highest for the greatest.

        >>> Curve(points=(8.0, 4.0, 2.0, 1.0)).draw(80)
        '█▄▂▁'
        """
        means = _shrunk(self.points, width)
        low, high = min(means, default=0.0), max(means, default=0.0)
        scale = (len(BLOCKS) - 1) / (high - low) if high > low else 0.0
        return "".join(BLOCKS[round((mean - low) * scale)] for mean in means)


def _shrunk(points: Sequence[float], width: int) -> list[float]:
    num = min(len(points), width)
    edges = [i * len(points) // num for i in range(num + 1)] if num else []
    return [fmean(points[lo:hi]) for lo, hi in pairwise(edges)]
