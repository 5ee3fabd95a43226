"""1F1B: after a short warm-up, one forward and one backward in turn (PipeDream-Flush).

Narayanan et al. 2020, https://arxiv.org/abs/2006.09503.
"""

from __future__ import annotations

from rayformer.stages.instructions import Backward, Compute, Forward


def one_f_one_b(pp: int, chunks: int, microbatches: int) -> tuple[tuple[Compute, ...], ...]:
    """The order of forwards and backwards on each rank; rank r holds min(pp - r, microbatches) activations at its peak.

    It takes as long as GPipe. With 4 ranks, 8 microbatches, and a backward that costs two forwards:

    pp0 F0 F1 F2 F3 .  .  .  .  .  .  B0--- F4 B1--- F5 B2--- F6 B3--- F7 B4--- .  B5--- .  B6--- .  B7---
    pp1 .  F0 F1 F2 .  .  .  .  B0--- F3 B1--- F4 B2--- F5 B3--- F6 B4--- F7 B5--- .  B6--- .  B7--- .  .
    pp2 .  .  F0 F1 .  .  B0--- F2 B1--- F3 B2--- F4 B3--- F5 B4--- F6 B5--- F7 B6--- .  B7--- .  .  .  .
    pp3 .  .  .  F0 B0--- F1 B1--- F2 B2--- F3 B3--- F4 B4--- F5 B5--- F6 B6--- F7 B7--- .  .  .  .  .  .
    """
    assert chunks == 1, f"1f1b has one chunk per rank, not {chunks}"
    return tuple(_order(warmup=min(pp - rank - 1, microbatches), microbatches=microbatches) for rank in range(pp))


def _order(*, warmup: int, microbatches: int) -> tuple[Compute, ...]:
    order: list[Compute] = [Forward(v) for v in range(warmup)]
    for v in range(warmup, microbatches):
        order += [Forward(v), Backward(v - warmup)]
    order += [Backward(v) for v in range(microbatches - warmup, microbatches)]
    return tuple(order)
