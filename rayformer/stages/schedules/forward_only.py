"""Forward only: the order of an evaluation."""

from __future__ import annotations

from rayformer.stages.instructions import Forward


def forward_only(pp: int, chunks: int, microbatches: int) -> tuple[tuple[Forward, ...], ...]:
    """Every rank's forwards: microbatches ascending, each through the rank's only chunk."""
    assert chunks == 1, f"forward_only has one chunk per rank, not {chunks}"
    return (tuple(Forward(v) for v in range(microbatches)),) * pp
