import dataclasses
import doctest

import pytest

from rayformer.stages import instructions
from rayformer.stages.instructions import (
    Backward,
    FoldGrads,
    Forward,
    RecvAct,
    RecvGrad,
    ReduceGrads,
    SendAct,
    SendGrad,
    StageMap,
)


@pytest.mark.parametrize(
    ("instruction", "text"),
    [
        (Forward(3), "F3"),
        (Backward(3), "B3"),
        (Forward(3, 1), "F3c1"),
        (Backward(12, 2), "B12c2"),
        (SendAct(3, peer=1), "SendAct3>1"),
        (RecvAct(3, peer=0), "RecvAct3<0"),
        (SendGrad(3, 1, peer=0), "SendGrad3c1>0"),
        (RecvGrad(3, peer=1), "RecvGrad3<1"),
        (FoldGrads(0), "Fold0"),
        (ReduceGrads(2), "Reduce2"),
    ],
)
def test_an_instruction_prints_short(instruction, text):
    assert str(instruction) == text


def test_instructions_are_values_that_differ_by_kind():
    assert Forward(1) == Forward(1, 0)
    assert len({Forward(1), Backward(1), SendAct(1, peer=0), SendGrad(1, peer=0), FoldGrads(1), ReduceGrads(1)}) == 6
    with pytest.raises(dataclasses.FrozenInstanceError):
        Forward(1).microbatch = 2


@pytest.mark.parametrize(("pp", "chunks"), [(1, 1), (4, 1), (2, 3), (4, 2)])
def test_every_stage_lies_on_one_rank_and_chunk(pp, chunks):
    stages = StageMap(pp=pp, chunks=chunks)
    places = [(chunk, rank) for chunk in range(chunks) for rank in range(pp)]
    assert [stages.stage(rank, chunk) for chunk, rank in places] == list(range(pp * chunks))
    assert [(stages.chunk(s), stages.rank(s)) for s in range(stages.first, stages.last + 1)] == places


def test_the_examples_in_the_docstrings_hold():
    result = doctest.testmod(instructions)
    assert result.attempted and not result.failed
