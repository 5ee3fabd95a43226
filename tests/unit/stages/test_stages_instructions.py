import dataclasses
import doctest

import pytest

from rayformer.stages import instructions
from rayformer.stages.instructions import (
    Backward,
    FoldGrads,
    Forward,
    InputGrad,
    RecvAct,
    RecvGrad,
    ReduceGrads,
    SendAct,
    SendGrad,
    StageMap,
    WeightGrad,
)


@pytest.mark.parametrize(
    ("instruction", "text"),
    [
        (Forward(3), "F3"),
        (Backward(3), "B3"),
        (Forward(3, 1), "F3c1"),
        (Backward(12, 2), "B12c2"),
        (InputGrad(3), "B3"),
        (WeightGrad(3, 1), "W3c1"),
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
    kinds = {Forward(1), Backward(1), InputGrad(1), WeightGrad(1), SendAct(1, peer=0), SendGrad(1, peer=0)}
    assert len(kinds | {FoldGrads(1), ReduceGrads(1)}) == 8
    with pytest.raises(dataclasses.FrozenInstanceError):
        Forward(1).microbatch = 2


@pytest.mark.parametrize(("pp", "chunks"), [(1, 1), (4, 1), (2, 3), (4, 2)])
def test_every_stage_lies_on_one_rank_and_chunk(pp, chunks):
    stages = StageMap(pp=pp, chunks=chunks)
    places = [(chunk, rank) for chunk in range(chunks) for rank in range(pp)]
    assert [stages.stage(rank, chunk) for chunk, rank in places] == list(range(pp * chunks))
    assert [(stages.chunk(s), stages.rank(s)) for s in range(stages.first, stages.last + 1)] == places


@pytest.mark.parametrize(("pp", "chunks"), [(1, 2), (2, 2), (4, 2), (3, 3)])
def test_stages_that_turn_back_at_the_ends_each_lie_somewhere(pp, chunks):
    stages = StageMap(pp=pp, chunks=chunks, vee=True)
    numbers = range(stages.last + 1)
    assert [stages.stage(stages.rank(s), stages.chunk(s)) for s in numbers] == list(numbers)
    assert all(abs(stages.rank(s) - stages.rank(s + 1)) <= 1 for s in numbers[:-1])
    assert stages.rank(pp - 1) == stages.rank(pp) == pp - 1


def test_the_examples_in_the_docstrings_hold():
    result = doctest.testmod(instructions)
    assert result.attempted and not result.failed
