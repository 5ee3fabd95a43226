import re

import pytest

from rayformer.errors import RayformerError
from rayformer.stages.check import Costs, ScheduleError, check
from rayformer.stages.instructions import (
    Backward,
    Forward,
    InputGrad,
    RecvAct,
    RecvGrad,
    SendAct,
    SendGrad,
    WeightGrad,
)
from rayformer.stages.lowering import lower
from rayformer.stages.schedules import get_schedule


@pytest.fixture
def programs():
    """A good step, as lists that a test may spoil."""
    good = lower(get_schedule("1f1b")(3, 1, 4))
    check(good, rendezvous=False)
    check(good, rendezvous=True)
    return [list(program) for program in good]


def swap(program, a, b):
    i, j = program.index(a), program.index(b)
    program[i], program[j] = b, a


def assert_refused(programs, message, *, rendezvous=False):
    with pytest.raises(ScheduleError, match=re.escape(message)):
        check([tuple(program) for program in programs], rendezvous=rendezvous)


def test_a_schedule_error_is_one_of_ours():
    assert issubclass(ScheduleError, RayformerError)


@pytest.mark.parametrize("rank", [0, 1, 2])
@pytest.mark.parametrize("op", [Forward(3), Backward(2)])
def test_a_dropped_computation_is_refused(programs, rank, op):
    programs[rank].remove(op)
    assert_refused(programs, f"pp{rank} has {op} 0 times, not once")


def test_a_microbatch_that_no_rank_takes_backward_is_refused(programs):
    for program in programs:
        program[:] = [op for op in program if op.microbatch != 3 or not isinstance(op, Backward | SendGrad | RecvGrad)]
    assert_refused(programs, "pp0 has B3 0 times, not once")


def test_a_repeated_computation_is_refused(programs):
    programs[1].append(Backward(3))
    assert_refused(programs, "pp1 has B3 2 times, not once")


def test_a_backward_before_its_forward_is_refused(programs):
    swap(programs[2], Forward(1), Backward(1))
    assert_refused(programs, "pp2 has B1 without F1 before it")


def test_an_input_that_is_not_received_is_refused(programs):
    programs[1].remove(RecvGrad(2, peer=2))
    assert_refused(programs, "pp1 has B2 without RecvGrad2<2 before it")


def test_an_input_received_from_the_wrong_rank_is_refused(programs):
    programs[1][programs[1].index(RecvAct(2, peer=0))] = RecvAct(2, peer=2)
    assert_refused(programs, "pp1 has F2 without RecvAct2<0 before it")


def test_an_output_sent_before_it_exists_is_refused(programs):
    swap(programs[2], Backward(1), SendGrad(1, peer=1))
    assert_refused(programs, "pp2 has SendGrad1>1 without B1 before it")


def test_a_receive_without_a_send_is_refused(programs):
    programs[0].remove(SendAct(2, peer=1))
    assert_refused(programs, "pp1 has RecvAct2<0, but pp0 has no send for it")


def test_a_send_without_a_receive_is_refused(programs):
    programs[2].append(SendAct(3, peer=0))
    assert_refused(programs, "pp2 sends to pp0, but pp0 has no RecvAct3c1<2")


def test_swapped_sends_are_refused(programs):
    programs[0].remove(SendAct(1, peer=1))
    programs[0].insert(programs[0].index(SendAct(2, peer=1)) + 1, SendAct(1, peer=1))
    assert_refused(programs, "pp1 has RecvAct1<0 where pp0 sends for RecvAct2<0: activation 1 between them")


def test_ranks_that_send_to_each_other_first_hang_only_if_sends_wait(programs):
    swap(programs[2], RecvAct(1, peer=1), SendGrad(0, peer=1))
    check([tuple(program) for program in programs], rendezvous=False)
    assert_refused(
        programs,
        "deadlock with rendezvous sends: pp0 at SendAct2>1 waits for pp1; pp1 at SendAct1>2 waits for pp2; "
        "pp2 at SendGrad0>1 waits for pp1",
        rendezvous=True,
    )


def test_ranks_that_receive_from_each_other_first_hang_if_receives_block():
    ahead = [Forward(0), RecvGrad(0, peer=1), SendAct(0, peer=1), Backward(0)]
    behind = [RecvAct(0, peer=0), Forward(0), Backward(0), SendGrad(0, peer=0)]
    check([tuple(ahead), tuple(behind)], rendezvous=False)
    assert_refused(
        [ahead, behind],
        "deadlock with rendezvous sends: pp0 at RecvGrad0<1 waits for pp1; pp1 at RecvAct0<0 waits for pp0",
        rendezvous=True,
    )


def test_ranks_that_use_what_the_other_sends_only_later_hang():
    ahead = [Forward(0), RecvGrad(0, peer=1), Backward(0), SendAct(0, peer=1)]
    behind = [RecvAct(0, peer=0), Forward(0), Backward(0), SendGrad(0, peer=0)]
    assert_refused([ahead, behind], "deadlock with buffered sends: pp0 at B0 waits for pp1; pp1 at F0 waits for pp0")


def test_a_receive_posted_early_costs_nothing_until_it_is_used():
    ahead = [Forward(0), SendAct(0, peer=1), RecvGrad(0, peer=1), Forward(1), SendAct(1, peer=1), Backward(0)]
    ahead += [RecvGrad(1, peer=1), Backward(1)]
    behind = lower(get_schedule("1f1b")(2, 1, 2))[1]
    report = check([tuple(ahead), behind], rendezvous=False)
    assert [(str(slot.op), slot.start) for slot in report.timeline[0]] == [("F0", 0), ("F1", 1), ("B0", 4), ("B1", 7)]


@pytest.mark.parametrize("kind", [Backward, WeightGrad])
def test_weight_gradients_out_of_order_are_refused(kind):
    first = [Forward(0), Forward(1)] + ([InputGrad(0), InputGrad(1)] if kind is WeightGrad else [])
    letter = kind.letter
    assert_refused(
        [[*first, kind(1), kind(0)]],
        f"pp0 has {letter}0 after {letter}1: weight gradients are added in ascending order",
    )


def test_a_weight_gradient_needs_its_input_gradient():
    assert_refused([[Forward(0), WeightGrad(0), InputGrad(0)]], "pp0 has W0 without B0 before it")
    assert_refused([[Forward(0), InputGrad(0)], [Forward(0), Backward(0)]], "pp0 has W0 0 times, not once")


def test_an_activation_is_held_until_its_weight_gradient():
    program = [Forward(0), Forward(1), InputGrad(0), Forward(2), InputGrad(1), InputGrad(2)]
    program += [WeightGrad(v) for v in range(3)]
    assert check([tuple(program)], rendezvous=False).peak_live == (3,)


def test_each_stage_can_have_costs_of_its_own():
    costs = [Costs(forward=1, backward=2, weight=0.5), Costs(forward=2, backward=5)]
    programs = [(*program,) for program in lower([[Forward(0), InputGrad(0), WeightGrad(0)]] * 2)]
    report = check(programs, costs=costs, rendezvous=False)
    assert [[(slot.start, slot.end) for slot in row] for row in report.timeline] == [
        [(0, 1), (5.5, 7), (7, 7.5)],
        [(1, 3), (3, 5.5), (5.5, 8)],
    ]


def test_a_waiting_send_costs_the_sender_its_time():
    eager = [Forward(0), Forward(1), Forward(2), Backward(0), Backward(1), Backward(2)]
    steady = [Forward(0), Backward(0), Forward(1), Backward(1), Forward(2), Backward(2)]
    programs = lower([eager, steady])
    buffered, waiting = (check(programs, rendezvous=rendezvous).timeline[0] for rendezvous in (False, True))
    assert [slot.start for slot in buffered][:3] == [0, 1, 2]
    assert [slot.start for slot in waiting][:3] == [0, 1, 4]


def test_times_follow_the_costs():
    report = check(lower(get_schedule("1f1b")(4, 1, 8)), costs=Costs(forward=0.5, backward=0.75), rendezvous=False)
    assert report.ideal == 8 * 1.25
    assert report.idle == (3 * 1.25,) * 4
    assert report.timeline[3][0].start == 1.5
