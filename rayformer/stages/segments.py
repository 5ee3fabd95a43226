"""How a stage's blocks are grouped into segments, the pieces that forward and backward run at a time.

A segment is one block, or the blocks whose activations are forgotten together and computed again from the segment's
input.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rayformer.config.recompute import RecomputeConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class Segment:
    """The blocks [start, stop) of a stage, counted within it."""

    start: int
    stop: int
    recomputed: bool = False


def plan_segments(kinds: Sequence[str], recompute: RecomputeConfig) -> tuple[Segment, ...]:
    """The segments of a stage whose blocks are of ``kinds``; only layers are ever recomputed as a whole.

    >>> full = RecomputeConfig(mode="full", layers=2)
    >>> [(s.start, s.stop, s.recomputed) for s in plan_segments(["input", "layer", "layer", "layer"], full)]
    [(0, 1, False), (1, 3, True), (3, 4, True)]
    """
    segments: list[Segment] = []
    at, num_layers = 0, 0
    while at < len(kinds):
        recomputed, stop = False, at + 1
        if kinds[at] == "layer" and recompute.mode == "full":
            if recompute.method == "uniform":
                recomputed = True
                while stop < len(kinds) and kinds[stop] == "layer" and stop - at < recompute.layers:
                    stop += 1
            else:
                recomputed = num_layers < recompute.layers
        num_layers += kinds[at] == "layer"
        segments.append(Segment(start=at, stop=stop, recomputed=recomputed))
        at = stop
    return tuple(segments)
