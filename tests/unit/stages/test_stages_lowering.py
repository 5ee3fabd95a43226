import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayformer.stages.check import ScheduleError, check
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
from rayformer.stages.lowering import BucketPlace, lower, with_awaited_params, with_reductions
from rayformer.stages.schedules import SCHEDULES, get_schedule

COMPUTE = Forward | Backward | InputGrad | WeightGrad


def text(program) -> str:
    return " ".join(map(str, program))


def gaps(program):
    """The transfers between two computations, each with the computation before and after it."""
    computations = [None, *(op for op in program if isinstance(op, COMPUTE)), None]
    passed = 0
    for op in program:
        if isinstance(op, COMPUTE):
            passed += 1
        else:
            yield computations[passed], op, computations[passed + 1]


def test_1f1b_on_2_ranks_is_lowered_to_this():
    assert [text(program) for program in lower(get_schedule("1f1b")(2, 1, 2))] == [
        "F0 SendAct0>1 F1 SendAct1>1 RecvGrad0<1 B0 RecvGrad1<1 B1",
        "RecvAct0<0 F0 B0 RecvAct1<0 SendGrad0>0 F1 B1 SendGrad1>0",
    ]


def test_an_output_is_sent_before_the_next_input_is_awaited_where_no_ranks_cross():
    assert [text(program) for program in lower(get_schedule("gpipe")(3, 1, 2))] == [
        "F0 SendAct0>1 F1 SendAct1>1 RecvGrad0<1 B0 RecvGrad1<1 B1",
        "RecvAct0<0 F0 SendAct0>2 RecvAct1<0 F1 SendAct1>2 RecvGrad0<2 B0 SendGrad0>0 RecvGrad1<2 B1 SendGrad1>0",
        "RecvAct0<1 F0 RecvAct1<1 F1 B0 SendGrad0>1 B1 SendGrad1>1",
    ]


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.parametrize("pp", [2, 3, 4, 8])
@pytest.mark.parametrize("microbatches", [1, 3, 8, 17])
def test_outputs_leave_at_once_and_inputs_arrive_just_in_time(name, pp, microbatches):
    compute = get_schedule(name)(pp, 1, microbatches)
    for order, program in zip(compute, lower(compute), strict=True):
        assert tuple(op for op in program if isinstance(op, COMPUTE)) == order
        for before, op, after in gaps(program):
            v = op.microbatch
            match op:
                case SendAct():
                    assert before == Forward(v)
                case SendGrad():
                    assert before == Backward(v)
                case RecvAct():
                    assert after == Forward(v)
                case RecvGrad():
                    assert after == Backward(v)


@st.composite
def possible_orders(draw):
    """Any orders in which ranks can compute: one random walk through what depends on what, cut by rank.

    A stage goes back through its microbatches in ascending order, in one piece or in two.
    """
    stages = StageMap(pp=draw(st.integers(1, 4)), chunks=draw(st.integers(1, 3)), vee=draw(st.booleans()))
    microbatches = draw(st.integers(1, 5))
    split = [draw(st.booleans()) for _ in range(stages.last + 1)]
    compute = [[] for _ in range(stages.pp)]
    ready = [(Forward, v, stages.first) for v in range(microbatches)]
    accumulated = [0] * (stages.last + 1)
    while ready:
        possible = [one for one in ready if one[0] in (Forward, InputGrad) or one[1] == accumulated[one[2]]]
        kind, v, stage = possible[draw(st.integers(0, len(possible) - 1))]
        ready.remove((kind, v, stage))
        compute[stages.rank(stage)].append(kind(v, stages.chunk(stage)))
        accumulated[stage] += kind in (Backward, WeightGrad)
        if kind is Forward and stage < stages.last:
            ready.append((Forward, v, stage + 1))
        elif kind is not WeightGrad:
            before = stage if kind is Forward else stage - 1
            if before >= stages.first:
                ready.append((InputGrad if split[before] else Backward, v, before))
        if kind is InputGrad:
            ready.append((WeightGrad, v, stage))
    return compute, stages.vee


@given(possible_orders())
def test_whatever_can_be_computed_is_lowered_without_deadlock(case):
    compute, vee = case
    programs = lower(compute, vee=vee)
    for rendezvous in (False, True):
        report = check(programs, rendezvous=rendezvous, vee=vee)
        assert [[slot.op for slot in slots] for slots in report.timeline] == compute


def test_interleaved_chunks_hand_over_from_the_last_rank_to_the_first():
    order = [Forward(0), Forward(0, 1), Backward(0, 1), Backward(0)]
    assert [text(program) for program in lower([order, order])] == [
        "F0 SendAct0>1 RecvAct0c1<1 F0c1 SendAct0c1>1 RecvGrad0c1<1 B0c1 SendGrad0c1>1 RecvGrad0<1 B0",
        "RecvAct0<0 F0 SendAct0>0 RecvAct0c1<0 F0c1 B0c1 SendGrad0c1>0 RecvGrad0<0 B0 SendGrad0>0",
    ]


def test_between_two_chunks_of_one_rank_nothing_is_sent():
    order = [Forward(0), Forward(0, 1), InputGrad(0, 1), InputGrad(0), WeightGrad(0), WeightGrad(0, 1)]
    assert [text(program) for program in lower([order, order], vee=True)] == [
        "F0 SendAct0>1 RecvAct0c1<1 F0c1 B0c1 SendGrad0c1>1 RecvGrad0<1 B0 W0 W0c1",
        "RecvAct0<0 F0 F0c1 SendAct0c1>0 RecvGrad0c1<0 B0c1 B0 SendGrad0>0 W0 W0c1",
    ]
    assert lower([order], vee=True) == (tuple(order),)


def test_with_two_ranks_both_directions_go_between_the_same_pair_and_keep_apart():
    programs = SCHEDULES["interleaved"].programs(2, 2, 4)
    for rank, program in enumerate(programs):
        transfers = [op for op in program if not isinstance(op, COMPUTE)]
        assert {op.peer for op in transfers} == {1 - rank}
        assert {type(op) for op in transfers} == {SendAct, SendGrad, RecvAct, RecvGrad}


def test_orders_that_wait_for_each_other_are_refused():
    ahead, behind = (
        [Forward(0), Backward(0), Forward(1), Backward(1)],
        [Forward(1), Forward(0), Backward(0), Backward(1)],
    )
    with pytest.raises(ScheduleError, match="never computed: pp0 at B0, pp1 at F1"):
        lower([ahead, behind])


def places(*where):
    """Buckets in these segments, or (chunk, segment)s."""
    return [BucketPlace(*place) if isinstance(place, tuple) else BucketPlace(segment=place) for place in where]


def reduced(program, leaf_of, where, *, num_segments=(3,), overlap=True):
    return with_reductions(
        program, leaf_of_microbatch=leaf_of, buckets=places(*where), num_segments=num_segments, overlap=overlap
    )


def test_a_bucket_is_reduced_as_soon_as_the_last_backward_has_passed_it():
    first, last = lower(get_schedule("1f1b")(2, 1, 3))
    assert text(reduced(first, [0, 0, 1], [2, 2, 0])) == (
        "F0 SendAct0>1 F1 SendAct1>1 RecvGrad0<1 B0 F2[0:2] F2[2:3] SendAct2>1 RecvGrad1<1 B1 Fold0 "
        "RecvGrad2<1 B2[2:3] Reduce0 Reduce1 B2[0:2] Reduce2"
    )
    assert text(reduced(last, [0, 1, 1], [1])) == (
        "RecvAct0<0 F0 B0 Fold0 RecvAct1<0 SendGrad0>0 F1 B1 RecvAct2<0 SendGrad1>0 F2[0:1] F2[1:3] B2[1:3] "
        "Reduce0 B2[0:1] "
        "SendGrad2>0"
    )


def test_without_overlap_all_buckets_are_reduced_after_the_last_backward():
    first, _ = lower(get_schedule("1f1b")(2, 1, 2))
    assert text(reduced(first, [0, 1], [0, 2], overlap=False)).endswith("B0 Fold0 RecvGrad1<1 B1[0:3] Reduce1 Reduce0")


def test_chunks_fold_and_reduce_each_for_itself_and_the_last_one_first():
    program = (Forward(0), Forward(0, 1), Forward(1), Forward(1, 1), *(Backward(v, c) for v in (0, 1) for c in (1, 0)))
    assert text(reduced(program, [3, 4], [(0, 0), (1, 1)], num_segments=(1, 2))) == (
        "F0 F0c1 F1[0:1] F1c1[0:1] F1c1[1:2] B0c1 Fold3c1 B0 Fold3 B1c1[1:2] Reduce1 B1c1[0:1] B1[0:1] Reduce0"
    )
    early = (*program[:4], *(Backward(v, c) for c in (0, 1) for v in (0, 1)))
    assert text(reduced(early, [3, 3], [(0, 0), (1, 1)], num_segments=(1, 2), overlap=False)).endswith(
        "B0 B1[0:1] B0c1 B1c1[0:2] Reduce1 Reduce0"
    )


def test_gradients_that_are_put_off_are_folded_and_reduced_after_their_weight_part():
    orders = get_schedule("zb_h1")(2, 1, 3)
    assert text(reduced(orders[1], [0, 1, 1], [2, 0])) == (
        "F0 B0 F1 B1 W0 Fold0 F2[0:2] F2[2:3] B2 W1 W2[2:3] Reduce0 W2[0:2] Reduce1"
    )


def test_folds_reductions_and_waits_take_no_part_in_the_pipeline():
    programs = lower(get_schedule("1f1b")(4, 1, 8))
    complete = [
        with_awaited_params(reduced(p, [v // 2 for v in range(8)], [1, 0]), buckets=places(1, 0), num_segments=[3])
        for p in programs
    ]
    whole = [tuple(op for op in program if getattr(op, "part", None) is None) for program in complete]
    assert [op for op in whole[0] if isinstance(op, FoldGrads)] == [FoldGrads(0), FoldGrads(1), FoldGrads(2)]
    for program, plain in zip(complete, programs):
        assert [op for op in program if isinstance(op, ReduceGrads)] == [ReduceGrads(0), ReduceGrads(1)]
        transfers = (SendAct, SendGrad, RecvAct, RecvGrad)
        assert [op for op in program if isinstance(op, transfers)] == [op for op in plain if isinstance(op, transfers)]


def test_the_first_forward_waits_for_each_bucket_where_it_is_needed():
    program = with_awaited_params(
        (RecvAct(0, peer=0), Forward(0), Forward(1)), buckets=places(2, 0, 0), num_segments=[3]
    )
    assert text(program) == "RecvAct0<0 Await1 Await2 F0[0:2] Await0 F0[2:3] F1"


def test_each_chunk_waits_for_its_own_buckets():
    program = (Forward(0), Forward(0, 1), Forward(1, 1))
    program = with_awaited_params(program, buckets=places((1, 0), (0, 1), (0, 0)), num_segments=[2, 3])
    assert text(program) == "Await2 F0[0:1] Await1 F0[1:2] Await0 F0c1[0:3] F1c1"


def test_a_single_microbatch_is_cut_for_both():
    program = reduced((Forward(0), Backward(0)), [0], [2, 0])
    program = with_awaited_params(program, buckets=places(2, 1), num_segments=[3])
    assert text(program) == "F0[0:1] Await1 F0[1:2] Await0 F0[2:3] B0[2:3] Reduce0 B0[0:2] Reduce1"
