"""ZB-V: two chunks per rank, the model's way down the ranks and back up again, and next to no bubble.

Qi et al. 2024, https://arxiv.org/abs/2405.15362.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TypeAlias

from rayformer.stages.instructions import Compute, Forward, InputGrad, StageMap, WeightGrad

STAGES_PER_RANK = 2

_Done: TypeAlias = Counter[tuple[type[Compute], int]]
"""How many microbatches each stage has done of each kind of computation: all go in ascending order."""


def zbv(pp: int, chunks: int, microbatches: int) -> tuple[tuple[Compute, ...], ...]:
    """The order on each rank, found by a greedy walk in which all computations take one unit of time.

    In every unit each rank takes the first of these that its inputs allow: an input gradient, of the first chunk before
    the second; a forward, of the second chunk before the first, if it holds less than 2 pp half microbatches; a weight
    gradient. So it holds as much as 1F1B. With pp microbatches or more, up to 4 ranks lose only the ramp of pp - 1
    units where all three take as long, more ranks sometimes a few units besides. With 4 ranks and 4 microbatches:

    pp0 F0   F1   F2   F3   .    .    .    F0c1 B0c1 F1c1 B1c1 F2c1 B2c1 F3c1 B3c1 B0   W0   B1   W1   B2   W2   B3   W3   W0c1 W1c1 W2c1 W3c1
    pp1 .    F0   F1   F2   F3   .    F0c1 .    F1c1 B0c1 F2c1 B1c1 F3c1 B2c1 B0   B3c1 B1   W0   B2   W1   B3   W2   W3   W0c1 W1c1 W2c1 W3c1
    pp2 .    .    F0   F1   F2   F0c1 F3   F1c1 .    F2c1 B0c1 F3c1 B1c1 B0   B2c1 B1   B3c1 B2   W0   B3   W1   W2   W3   W0c1 W1c1 W2c1 W3c1
    pp3 .    .    .    F0   F0c1 F1   F1c1 F2   F2c1 F3   F3c1 B0c1 B0   B1c1 B1   B2c1 B2   B3c1 B3   W0   W1   W2   W3   W0c1 W1c1 W2c1 W3c1
    """
    assert chunks == STAGES_PER_RANK, f"zbv has two chunks per rank, not {chunks}"
    stages = StageMap(pp=pp, chunks=chunks, vee=True)
    orders: list[list[Compute]] = [[] for _ in range(pp)]
    done: _Done = Counter()
    num_ops = 3 * chunks * microbatches
    while any(len(order) < num_ops for order in orders):
        chosen = [next(_choices(rank, done, stages, microbatches), None) for rank in range(pp)]
        assert any(chosen), "a rank can always go on"
        for rank, op in enumerate(chosen):
            if op is not None:
                orders[rank].append(op)
                done[type(op), stages.stage(rank, op.chunk)] += 1
    return tuple(map(tuple, orders))


def _choices(rank: int, done: _Done, stages: StageMap, microbatches: int) -> Iterator[Compute]:
    """What ``rank`` could compute next, the best first."""
    first, second = (stages.stage(rank, chunk) for chunk in (0, 1))
    for stage in (first, second):
        v = done[InputGrad, stage]
        if v < done[Forward, stage] and (stage == stages.last or v < done[InputGrad, stage + 1]):
            yield InputGrad(v, stages.chunk(stage))
    live = sum(done[Forward, stage] - done[WeightGrad, stage] for stage in (first, second))
    for stage in (second, first):
        v = done[Forward, stage]
        arrived = microbatches if stage == stages.first else done[Forward, stage - 1]
        if v < arrived and live < 2 * stages.pp:
            yield Forward(v, stages.chunk(stage))
    for stage in (first, second):
        if (v := done[WeightGrad, stage]) < done[InputGrad, stage]:
            yield WeightGrad(v, stages.chunk(stage))
