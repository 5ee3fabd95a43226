"""GPipe: all forwards, then all backwards (Huang et al. 2018, https://arxiv.org/abs/1811.06965)."""

from __future__ import annotations

from rayformer.stages.instructions import Backward, Compute, Forward


def gpipe(pp: int, chunks: int, microbatches: int) -> tuple[tuple[Compute, ...], ...]:
    """The order of forwards and backwards on each rank; every rank holds all microbatches' activations at its peak.

    Backwards ascend, where the paper's descend: gradients accumulate in one order under every schedule.
    With 4 ranks, 4 microbatches, and a backward that costs two forwards:

    pp0 F0 F1 F2 F3 .  .  .  .  .  .  .  .  .  B0--- B1--- B2--- B3---
    pp1 .  F0 F1 F2 F3 .  .  .  .  .  .  B0--- B1--- B2--- B3--- .  .
    pp2 .  .  F0 F1 F2 F3 .  .  .  B0--- B1--- B2--- B3--- .  .  .  .
    pp3 .  .  .  F0 F1 F2 F3 B0--- B1--- B2--- B3--- .  .  .  .  .  .
    """
    assert chunks == 1, f"gpipe has one chunk per rank, not {chunks}"
    forwards = tuple(Forward(v) for v in range(microbatches))
    backwards = tuple(Backward(v) for v in range(microbatches))
    return (forwards + backwards,) * pp
