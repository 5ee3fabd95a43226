"""Who is to blame when nothing goes on: the sink of the waits, and nobody as long as something still moves."""

import pytest

from rayformer.control.stall import LEAST_S, LONG_S, STEPS, Seen, StallJudge

FIRST_S = 0.3  # the first step of a generation


def seen(phase="forward", instruction="Forward", *, age_s, step=7, number=3, count=100, is_stopped=False):
    return Seen(
        step=step, phase=phase, instruction=instruction, number=number, count=count, age_s=age_s, is_stopped=is_stopped
    )


def judge(stall_s=None, steps=(0.1,)):
    found = StallJudge(stall_s)
    for step_s in (FIRST_S, *steps):
        found.note_step(step_s)
    return found


LATE = LEAST_S + 1
WAITS = seen(instruction="RecvAct", age_s=LATE)


def test_a_stopped_process_is_found_at_once_while_the_others_still_work():
    stall = judge().judge({"a": seen(age_s=0.1), "b": seen(age_s=0.5, is_stopped=True), "c": WAITS})
    assert (stall.cell, stall.waiters) == ("b", ("c",))
    assert (
        stall.message
        == "it has been in Forward of 3 in step 7 for 0.5 s, and 1 cell waits for it: its process is stopped"
    )


def test_a_process_that_is_stopped_for_a_moment_is_left_alone():
    assert judge().judge({"a": seen(age_s=0.1, is_stopped=True)}) is None


def test_nobody_is_blamed_while_one_cell_goes_on():
    assert judge().judge({"a": WAITS, "b": seen(age_s=LEAST_S / 2)}) is None


@pytest.mark.parametrize("phase", ["data", "forward", "backward", "update", "snapshot"])
def test_of_cells_that_wait_for_one_at_work_that_one_is_blamed(phase):
    cells = {"a": WAITS, "b": seen(phase, "", age_s=LATE), "c": seen("vote", "", age_s=LATE)}
    stall = judge().judge(cells)
    assert (stall.cell, stall.waiters) == ("b", ("a", "c"))


def test_one_that_does_not_answer_is_blamed_before_one_at_work():
    cells = {"a": seen(age_s=LATE), "b": WAITS}
    assert judge().judge(cells, silent=frozenset({"b"})).cell == "b"


def test_if_all_wait_the_one_that_has_come_least_far_is_blamed():
    cells = {"a": WAITS, "b": seen("vote", "", age_s=LATE, step=6), "c": seen(instruction="RecvGrad", age_s=LATE)}
    stall = judge().judge(cells)
    assert stall.cell == "b" and "all cells wait" in stall.reason


def test_the_deadline_follows_the_slowest_step_seen():
    assert judge(steps=()).deadline_s == LONG_S  # nothing is known yet
    assert judge(steps=(0.1, 0.2)).deadline_s == LEAST_S
    assert judge(steps=(3.0, 0.1)).deadline_s == 3.0 * STEPS
    assert judge(2.5, steps=(3.0,)).deadline_s == 2.5


@pytest.mark.parametrize("phase", ["save", "load", "setup", "eval", "joining"])
def test_what_follows_no_step_may_take_longer(phase):  # B87
    short = judge(5.0)
    assert short.judge({"a": seen(phase, "", age_s=15.0)}) is None
    assert short.judge({"a": seen(age_s=15.0)}).cell == "a"
    assert short.judge({"a": seen(phase, "", age_s=LONG_S + 1)}).cell == "a"


def test_the_first_step_of_a_generation_may_compile():  # B87
    first = judge(5.0)
    first.start_generation()
    assert first.judge({"a": seen(age_s=15.0)}) is None
    assert first.judge({"a": seen(age_s=LONG_S + 1)}).cell == "a"
    first.note_step(20.0)  # so the next one may be as slow
    assert first.judge({"a": seen(age_s=15.0)}).cell == "a" and first.deadline_s == 5.0
    first.start_generation()
    assert first.judge({"a": seen(age_s=LONG_S + 1)}) is None
    assert first.judge({"a": seen(age_s=20.0 * STEPS + 1)}).cell == "a"


def test_cells_are_asked_before_they_are_blamed():
    assert judge().is_suspicious({"a": seen(age_s=LEAST_S / 2 + 0.1)})
    assert not judge().is_suspicious({"a": seen(age_s=LEAST_S / 2 - 0.1)})
    assert not judge().is_suspicious({})
