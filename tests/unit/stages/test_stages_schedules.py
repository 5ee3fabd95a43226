import re

import pytest

from rayformer.errors import ConfigError
from rayformer.stages.check import check
from rayformer.stages.draw import draw
from rayformer.stages.instructions import Backward, Forward
from rayformer.stages.lowering import lower
from rayformer.stages.schedules import SCHEDULES, get_schedule, problems
from rayformer.stages.schedules.forward_only import forward_only

PP = range(1, 9)
MICROBATCHES = range(1, 33)
BOTH = pytest.mark.parametrize("name", list(SCHEDULES))


def drawing_of(schedule) -> str:
    return "\n".join(line.strip() for line in schedule.__doc__.splitlines() if re.match(r" *pp\d ", line))


@pytest.mark.parametrize(("name", "microbatches"), [("gpipe", 4), ("1f1b", 8)])
def test_the_schedule_runs_as_its_docstring_draws_it(name, microbatches):
    schedule = get_schedule(name)
    report = check(lower(schedule(4, 1, microbatches)), rendezvous=False)
    assert draw(report) == drawing_of(schedule)


def test_1f1b_has_the_known_order_on_4_ranks():
    assert [" ".join(map(str, order)) for order in get_schedule("1f1b")(4, 1, 8)] == [
        "F0 F1 F2 F3 B0 F4 B1 F5 B2 F6 B3 F7 B4 B5 B6 B7",
        "F0 F1 F2 B0 F3 B1 F4 B2 F5 B3 F6 B4 F7 B5 B6 B7",
        "F0 F1 B0 F2 B1 F3 B2 F4 B3 F5 B4 F6 B5 F7 B6 B7",
        "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 F6 B6 F7 B7",
    ]


def test_1f1b_on_4_ranks_and_8_microbatches_takes_33_of_ideally_24():
    report = check(lower(get_schedule("1f1b")(4, 1, 8)), rendezvous=False)
    assert (report.makespan, report.ideal) == (33, 24)
    assert report.idle == (9, 9, 9, 9)
    assert report.bubble_of_total == pytest.approx(9 / 33)
    assert report.bubble_of_ideal == pytest.approx(9 / 24)


@BOTH
@pytest.mark.parametrize("pp", PP)
@pytest.mark.parametrize("rendezvous", [False, True])
def test_every_size_runs_without_deadlock_and_within_its_memory(name, pp, rendezvous):
    for m in MICROBATCHES:
        programs = lower(get_schedule(name)(pp, 1, m))
        report = check(programs, rendezvous=rendezvous)
        peak = [m] * pp if name == "gpipe" else [min(pp - rank, m) for rank in range(pp)]
        assert report.peak_live == tuple(peak)
        assert report.ideal == 3 * m
        if not rendezvous:
            assert report.idle == (3 * (pp - 1),) * pp


@BOTH
@pytest.mark.parametrize("pp", PP)
def test_every_rank_does_every_microbatch_once_and_backwards_ascend(name, pp):
    for m in MICROBATCHES:
        for order in get_schedule(name)(pp, 1, m):
            assert [op for op in order if isinstance(op, Forward)] == [Forward(v) for v in range(m)]
            assert [op for op in order if isinstance(op, Backward)] == [Backward(v) for v in range(m)]


@BOTH
@pytest.mark.parametrize("microbatches", [1, 2, 3, 4, 5])
def test_fewer_microbatches_than_stages_is_an_ordinary_job(name, microbatches):
    assert problems(name, pp=4, chunks=1, microbatches=microbatches) == []
    report = check(lower(get_schedule(name)(4, 1, microbatches)), rendezvous=True)
    assert all(len(slots) == 2 * microbatches for slots in report.timeline)


@BOTH
def test_a_single_rank_sends_nothing_and_never_waits(name):
    schedule = get_schedule(name)(1, 1, 5)
    assert lower(schedule) == schedule
    assert check(schedule, rendezvous=True).idle == (0,)


def test_evaluation_only_goes_forward_and_keeps_nothing():
    for pp in PP:
        programs = lower(forward_only(pp, 1, 6))
        report = check(programs, rendezvous=True)
        assert [[slot.op for slot in slots] for slots in report.timeline] == [[Forward(v) for v in range(6)]] * pp
        assert report.peak_live == (1,) * pp
        assert check(programs, rendezvous=False).makespan == 6 + pp - 1


def test_an_unknown_schedule_is_told_the_nearest():
    [problem] = problems("1f1", pp=2, chunks=1, microbatches=4)
    assert str(problem) == "schedule.name=1f1: the schedules are gpipe, 1f1b; did you mean 1f1b?"
    with pytest.raises(ConfigError, match=r"schedule\.name=zbv: .*; use one of these"):
        get_schedule("zbv")


@BOTH
def test_virtual_stages_are_refused(name):
    [problem] = problems(name, pp=2, chunks=2, microbatches=4)
    assert problem.keys == {"layout.virtual_stages": 2, "schedule.name": name}
    assert "use layout.virtual_stages=1" in str(problem)
