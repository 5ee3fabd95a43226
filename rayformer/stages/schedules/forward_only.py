"""Forward only: the order of an evaluation."""

from __future__ import annotations

from rayformer.stages.instructions import Forward


def forward_only(pp: int, chunks: int, microbatches: int) -> tuple[tuple[Forward, ...], ...]:
    """Every rank's forwards: groups of pp microbatches, each through one chunk after the other."""
    order = tuple(
        Forward(v, chunk)
        for start in range(0, microbatches, pp)
        for chunk in range(chunks)
        for v in range(start, min(start + pp, microbatches))
    )
    return (order,) * pp
