"""ZB-H1: 1F1B whose weight gradients fill a part of the bubble, with the memory of 1F1B.

Qi et al. 2023, https://arxiv.org/abs/2401.10241, section 2.
"""

from __future__ import annotations

from rayformer.stages.instructions import Compute, Forward, InputGrad, WeightGrad


def zb_h1(pp: int, chunks: int, microbatches: int) -> tuple[tuple[Compute, ...], ...]:
    """The order on each rank: 1F1B, with the weight part of each backward put off by as many as the rank's number.

    A rank holds no more than pp microbatches at its peak. With pp microbatches or more it idles for
    (pp - 1)(F + B - W), of a forward F, an input gradient B and a weight gradient W. With 4 ranks, 8 microbatches, and
    all three of the same length:

    pp0 F0 F1 F2 F3 .  .  .  B0 W0 F4 B1 W1 F5 B2 W2 F6 B3 W3 F7 B4 W4 B5 W5 B6 W6 B7 W7
    pp1 .  F0 F1 F2 .  .  B0 F3 B1 W0 F4 B2 W1 F5 B3 W2 F6 B4 W3 F7 B5 W4 B6 W5 B7 W6 W7
    pp2 .  .  F0 F1 .  B0 F2 B1 F3 B2 W0 F4 B3 W1 F5 B4 W2 F6 B5 W3 F7 B6 W4 B7 W5 W6 W7
    pp3 .  .  .  F0 B0 F1 B1 F2 B2 F3 B3 W0 F4 B4 W1 F5 B5 W2 F6 B6 W3 F7 B7 W4 W5 W6 W7
    """
    assert chunks == 1, f"zb_h1 has one chunk per rank, not {chunks}"
    return tuple(_order(rank, warmup=min(pp - rank - 1, microbatches), microbatches=microbatches) for rank in range(pp))


def _order(rank: int, *, warmup: int, microbatches: int) -> tuple[Compute, ...]:
    order: list[Compute] = [Forward(v) for v in range(warmup)]
    done = 0  # weight gradients
    for v in range(microbatches):
        if v + warmup < microbatches:
            order.append(Forward(v + warmup))
        order.append(InputGrad(v))
        if v + warmup >= microbatches or v + 1 - done > rank:
            order.append(WeightGrad(done))
            done += 1
    order += [WeightGrad(v) for v in range(done, microbatches)]
    return tuple(order)
