"""The machine of a run: what it makes of every event in every state, and the stories of what may befall a run."""

from dataclasses import replace

import pytest

from rayformer.control.failure import explain
from rayformer.control.machine import ABORT_S, Machine, UnexpectedEvent, advance
from rayformer.control.messages import (
    Abort,
    AskStop,
    CellBroke,
    CellDrained,
    CellEnded,
    CellFailed,
    CellLost,
    CellPlaced,
    CellReady,
    CellStalled,
    ControllerFailed,
    DeadlinePassed,
    Grant,
    HeldSaved,
    Join,
    Kill,
    NoRoom,
    Placed,
    PlacementFailed,
    Replace,
    SaveHeld,
    SetUp,
    StopAsked,
    Survey,
    Surveyed,
    Wait,
    WaitOver,
)
from rayformer.control.policy import Budget
from rayformer.control.restore import Held, Holdings, Restore
from rayformer.control.states import (
    Draining,
    Failed,
    Finished,
    Member,
    Rebuilding,
    Restoring,
    Running,
    Saving,
    Starting,
    Waiting,
)
from rayformer.events import CellDone, CellError

A, B, C = CELLS = ("pp0", "pp1", "pp2")
G = 3
STEP = 4  # after which the survivors stand
BUDGET = Budget(max_failures=2)
DONE = CellDone(generation=G, outcome="finished", step=10)
SAVED = CellDone(generation=G, outcome="stopped", step=STEP, checkpoint="step-000000004")
HELD = Held(cells=dict.fromkeys(CELLS, Holdings(holder=(STEP - 1, STEP), second_holder=(STEP - 1,))))
RESTORE = Restore(step=STEP, sources={A: "live", B: "live", C: "holder"})


def member(cell):
    return Member(worker=f"worker-of-{cell}", pid=CELLS.index(cell) + 1, node="n", param_addr=0)


def failure(cell, kind="died", *, final=False):
    return CellError(cell=cell, worker=f"worker-of-{cell}", kind=kind, message=f"{kind.title()}: {cell}", final=final)


MEMBERS = {cell: member(cell) for cell in CELLS}
STARTING = Starting(generation=G, cells=CELLS, budget=BUDGET, members={A: member(A), B: member(B)})
RUNNING = Running(generation=G, members=MEMBERS, budget=BUDGET, done={A: DONE, B: DONE})
DRAINING = Draining(
    generation=G,
    cells=CELLS,
    budget=BUDGET,
    pending=frozenset({C}),
    lost={A: failure(A)},
    standing={B: STEP},
)
REBUILDING = Rebuilding(
    generation=G,
    cells=CELLS,
    budget=BUDGET,
    lost={C: failure(C)},
    broke={A: failure(A, "collateral")},
    missing=frozenset({C}),
    standing={A: STEP, B: STEP},
    held=HELD,
)
WAITING = Waiting(rebuilding=REBUILDING, why="a node")
RESTORING = Restoring(
    generation=G,
    cells=CELLS,
    budget=BUDGET,
    lost={C: failure(C)},
    restore=RESTORE,
    members={A: member(A), B: member(B)},
)
SAVING = Saving(generation=G, restore=RESTORE, errors=(failure(C),))
FINISHED = Finished(generation=G, done=DONE)
FAILED = Failed(generation=G, errors=(failure(A),))

PLACED = Placed(generation=G)
NOT_PLACED = PlacementFailed(generation=G, missing="a node")
READY = CellReady(generation=G, cell=C, member=member(C))
ENDED = CellEnded(generation=G, cell=C, done=DONE)
LOST = CellLost(generation=G, error=failure(C))
RAISED = CellFailed(generation=G, error=failure(C, "raised"))
STALLED = CellStalled(generation=G, error=failure(C, "silent"))
BROKE = CellBroke(generation=G, error=failure(C, "collateral"))
DRAINED = CellDrained(generation=G, cell=C, standing=STEP)
REPLACED = CellPlaced(generation=G, cell=C, worker="standby")
SURVEYED = Surveyed(generation=G, number=1, held=HELD)
NO_ROOM = NoRoom(generation=G, missing="a node")
WAIT_OVER = WaitOver(generation=G)
HELD_SAVED = HeldSaved(generation=G, done=SAVED)
STOP = StopAsked(generation=G, by="signal")
DEADLINE = DeadlinePassed(generation=G)
BROKEN = ControllerFailed(generation=G, message="disk full")
EVENTS = (
    PLACED, NOT_PLACED, READY, ENDED, LOST, RAISED, STALLED, BROKE, DRAINED, REPLACED, SURVEYED, NO_ROOM, WAIT_OVER,
    HELD_SAVED, STOP, DEADLINE, BROKEN,
)  # fmt: skip
OF_THE_SEARCH = [REPLACED, SURVEYED, NO_ROOM, WAIT_OVER]

# In each state, the name of the next one and of the commands, and the events they follow on; the others raise.
ROWS = [
    (
        STARTING,
        {
            "Starting SetUp": [PLACED],
            "Starting": [STOP],
            "Running Grant": [READY],
            "Draining Abort": [LOST, BROKE],
            "Draining Abort Kill": [RAISED, STALLED],
            "Failed": [NOT_PLACED, BROKEN],
        },
    ),
    (
        RUNNING,
        {
            "Running AskStop": [STOP],
            "Running": OF_THE_SEARCH,
            "Finished": [ENDED],
            "Draining Abort": [LOST, BROKE],
            "Draining Abort Kill": [RAISED, STALLED],
            "Failed": [BROKEN],
        },
    ),
    (
        DRAINING,
        {
            "Draining": [PLACED, READY, ENDED, BROKE, STOP, *OF_THE_SEARCH],
            "Rebuilding Replace Survey": [LOST, DRAINED],
            "Rebuilding Kill Replace Survey": [RAISED, STALLED, DEADLINE],
            "Failed": [BROKEN],
        },
    ),
    (
        REBUILDING,
        {
            "Rebuilding": [LOST, SURVEYED, WAIT_OVER, STOP],
            "Restoring Join": [REPLACED],
            "Waiting Wait": [NO_ROOM],
            "Failed": [BROKEN],
        },
    ),
    (
        WAITING,
        {
            "Waiting": [LOST, SURVEYED, NO_ROOM],
            "Waiting Survey": [WAIT_OVER, STOP],
            "Rebuilding Survey": [REPLACED],
            "Failed": [BROKEN],
        },
    ),
    (
        RESTORING,
        {
            "Restoring": [STOP, *OF_THE_SEARCH],
            "Running Grant": [READY],
            "Draining Abort": [LOST, BROKE],
            "Draining Abort Kill": [RAISED, STALLED],
            "Failed": [BROKEN],
        },
    ),
    (SAVING, {"Saving": [LOST, STOP, *OF_THE_SEARCH], "Finished": [HELD_SAVED], "Failed": [BROKEN]}),
    (FINISHED, {"Finished": EVENTS}),
    (FAILED, {"Failed": EVENTS}),
]
PAIRS = [
    (state, event, next((result for result, events in row.items() if event in events), None))
    for state, row in ROWS
    for event in EVENTS
]


def named(value):
    return type(value).__name__


@pytest.mark.parametrize(
    ("state", "event", "result"), PAIRS, ids=[f"{named(state)}-{named(event)}" for state, event, _ in PAIRS]
)
def test_every_state_has_an_answer_to_every_event(state, event, result):
    if result is None:
        with pytest.raises(UnexpectedEvent, match=f"{named(event)}.* in {named(state)}"):
            advance(state, event)
        return
    following, commands = advance(state, event)
    assert " ".join(map(named, (following, *commands))) == result
    assert following.generation == G + (isinstance(state, Draining) and isinstance(following, Rebuilding))
    for command in commands:
        assert command.generation == (G if isinstance(command, Abort | Kill) else following.generation)


@pytest.mark.parametrize("state", [state for state, _ in ROWS], ids=named)
def test_news_of_an_older_generation_change_nothing_unless_they_are_of_a_process_or_the_run(state):
    for event in EVENTS:
        old = replace(event, generation=G - 1)
        if event not in (LOST, STOP, BROKEN):
            assert advance(state, old) == (state, ())
        else:
            assert advance(state, old) == advance(state, event)


def follow(state, *events):
    """The state after ``events``, and the commands of all of them."""
    machine = Machine(state)
    commands = [command for event in events for command in machine.advance(event)]
    return machine.state, commands


def ready(cell, g=G):
    return CellReady(generation=g, cell=cell, member=member(cell))


def ended(cell, g=G):
    return CellEnded(generation=g, cell=cell, done=DONE)


def lost(cell, kind="died", g=G):
    return CellLost(generation=g, error=failure(cell, kind))


def raised(cell, g=G, *, final=False):
    return CellFailed(generation=g, error=failure(cell, "raised", final=final))


def broke(cell, g=G):
    return CellBroke(generation=g, error=failure(cell, "collateral"))


def drained(cell, g=G, standing=STEP):
    return CellDrained(generation=g, cell=cell, standing=standing)


def placed(cell, g=G + 1):
    return CellPlaced(generation=g, cell=cell, worker=f"worker-of-{cell}")


def surveyed(g=G + 1, number=1, held=HELD):
    return Surveyed(generation=g, number=number, held=held)


def abort(*cells, g=G):
    return Abort(generation=g, cells=cells, seconds=ABORT_S)


def kill(*cells, g=G):
    return Kill(generation=g, cells=cells)


def search(*cells, g=G + 1, number=1):
    return [Replace(generation=g, cells=cells), Survey(generation=g, number=number)]


AT_WORK = Running(generation=G, members=MEMBERS, budget=BUDGET)
B_LOST = (lost(B), drained(A), drained(C))
B_BACK = (*B_LOST, placed(B), surveyed())


# Start and end.


def test_cells_may_come_in_any_order_and_stand_in_the_order_of_the_layout():
    start = Starting(generation=G, cells=CELLS, budget=BUDGET)
    running, commands = follow(start, PLACED, ready(C), ready(A), ready(B))
    assert list(running.members) == list(CELLS) and running.members[C] == member(C)
    assert commands == [SetUp(generation=G), Grant(generation=G)]


def test_the_result_is_what_the_first_cell_said_whoever_ends_last():
    first = replace(DONE, sample="text")
    ends = [CellEnded(generation=G, cell=cell, done=first if cell == A else DONE) for cell in (A, C, B)]
    finished, commands = follow(AT_WORK, *ends)
    assert finished == Finished(generation=G, done=first) and not commands


def test_an_unexpected_event_is_told_with_what_came_before():
    machine = Machine(Starting(generation=G, cells=(A,), budget=BUDGET))
    with pytest.raises(UnexpectedEvent, match="before it: nothing"):
        machine.advance(DEADLINE)
    for event in (PLACED, ready(A), STOP):
        machine.advance(event)
    before = machine.state
    with pytest.raises(UnexpectedEvent) as surprise:
        machine.advance(PLACED)
    assert "before it: Starting(Placed) -> Starting(CellReady) -> Running(StopAsked)" in str(surprise.value)
    assert "Placed(generation=3) in Running" in str(surprise.value)
    assert machine.state is before


# One cell is lost.


def test_one_lost_cell_is_replaced_alone_and_the_others_keep_what_they_have():
    draining, commands = follow(AT_WORK, lost(B))
    assert draining.pending == {A, C} and commands == [abort(A, C)]

    rebuilding, commands = follow(draining, drained(C), drained(A))
    assert rebuilding.generation == G + 1 and rebuilding.missing == {B}
    assert commands == search(B)

    restore = Restore(step=STEP, sources={A: "live", B: "holder", C: "live"})
    restoring, commands = follow(rebuilding, placed(B), surveyed())
    assert commands == [Join(generation=G + 1, restore=restore, lost=(B,))]
    assert follow(rebuilding, surveyed(), placed(B)) == (restoring, commands)

    running, commands = follow(restoring, *(ready(cell, G + 1) for cell in (B, C, A)))
    assert list(running.members) == list(CELLS) and commands == [Grant(generation=G + 1)]


def test_a_run_of_one_cell_is_repaired_too():
    alone = Running(generation=G, members={A: member(A)}, budget=BUDGET)
    assert follow(alone, lost(A))[1] == search(A)
    assert follow(alone, raised(A))[1] == [kill(A), *search(A)]


def test_a_cell_that_raised_is_killed_and_its_death_then_is_no_news():
    draining, commands = follow(AT_WORK, raised(B))
    assert commands == [abort(A, C), kill(B)]
    assert follow(draining, lost(B), drained(B)) == (draining, [])
    rebuilding, _ = follow(draining, drained(A), drained(C))
    assert rebuilding.lost == {B: failure(B, "raised")}
    assert follow(rebuilding, lost(B, g=G + 1)) == (rebuilding, [])


def test_a_cell_that_stalls_is_killed():
    stalled = CellStalled(generation=G, error=failure(B, "silent"))
    assert follow(AT_WORK, stalled)[1] == [abort(A, C), kill(B)]
    assert follow(AT_WORK, lost(C), stalled, drained(A))[1] == [abort(A, B), kill(B), *search(B, C)]


def test_a_cell_that_raises_while_the_others_stand_already_is_lost_nevertheless():
    rebuilding, commands = follow(AT_WORK, broke(A), drained(A), drained(B), raised(B), drained(C))
    assert rebuilding.missing == {B} and B not in rebuilding.standing
    assert commands == [abort(A, B, C), kill(B), *search(B)]


def test_a_broken_connection_alone_forms_everything_anew_with_the_same_owners():
    rebuilding, commands = follow(AT_WORK, broke(B), *map(drained, CELLS))
    assert commands == [abort(A, B, C), Survey(generation=G + 1, number=1)]
    restoring, (join,) = follow(rebuilding, surveyed())
    assert join.lost == () and set(join.restore.sources.values()) == {"live"}
    assert restoring.budget.used == {"collateral": 1}


def test_the_deadline_kills_the_silent_and_nobody_else():
    rebuilding, commands = follow(AT_WORK, lost(B), drained(A), DEADLINE)
    assert commands == [abort(A, C), kill(C), *search(B, C)]
    assert rebuilding.lost[B] == failure(B) and rebuilding.lost[C].kind == "silent"
    assert explain(tuple(rebuilding.lost.values())).startswith(f"cell {B}")


def test_an_ended_cell_still_says_where_it_stands():
    stood = [drained(cell, standing=10) for cell in (A, C)]
    rebuilding, commands = follow(AT_WORK, ended(A), lost(B), ended(C), *stood)
    assert commands == [abort(A, C), *search(B)] and rebuilding.standing == {A: 10, C: 10}


def test_a_cell_that_was_stopped_halfway_takes_its_state_from_its_slot():
    _, (*_, join) = follow(AT_WORK, lost(B), drained(A), drained(C, standing=None), placed(B), surveyed())
    assert join.restore == Restore(step=STEP, sources={A: "live", B: "holder", C: "holder"})


# More is lost meanwhile.


def test_cells_lost_at_once_are_replaced_together():
    rebuilding, commands = follow(AT_WORK, lost(C, "node"), lost(B, "node"), drained(A))
    assert commands == [abort(A, B), *search(B, C)] and rebuilding.missing == {B, C}
    rebuilding, _ = follow(rebuilding, placed(C), surveyed())
    assert rebuilding.missing == {B}
    assert isinstance(follow(rebuilding, placed(B))[0], Restoring)


def test_all_cells_may_be_lost():
    rebuilding, commands = follow(AT_WORK, *map(lost, CELLS))
    assert rebuilding.missing == set(CELLS) and commands == [abort(B, C), *search(A, B, C)]


def test_a_cell_that_stood_still_and_died_while_the_others_drained_is_lost_too():
    rebuilding, commands = follow(AT_WORK, lost(B), drained(A), lost(A), drained(C))
    assert commands == [abort(A, C), *search(A, B)] and rebuilding.standing == {C: STEP}


@pytest.mark.parametrize("generation", [G, G + 1], ids=["told before", "told now"])
def test_a_survivor_lost_while_rebuilding_is_replaced_and_what_is_held_is_asked_again(generation):
    rebuilding, commands = follow(AT_WORK, *B_LOST, placed(B), lost(A, g=generation), surveyed(number=1))
    assert commands[3:] == search(A, number=2)
    assert rebuilding.missing == {A} and rebuilding.held is None and A not in rebuilding.standing
    assert follow(AT_WORK, *B_LOST, surveyed(), lost(A, g=generation), placed(B))[0] == rebuilding
    _, (join,) = follow(rebuilding, placed(A), surveyed(number=2))
    assert join.lost == (A, B) and join.restore.sources == {A: "holder", B: "holder", C: "live"}


def test_a_replacement_lost_before_the_others_are_there_is_replaced_and_the_first_cause_kept():
    rebuilding, commands = follow(AT_WORK, raised(B), lost(C), drained(A), placed(B), lost(B, g=G + 1))
    assert commands[-2:] == search(B, number=2) and rebuilding.missing == {B, C}
    assert rebuilding.lost[B] == failure(B, "raised")


def test_replacements_that_die_one_after_the_other_end_the_run():
    once_more = [placed(B), lost(B, g=G + 1)]
    rebuilding, _ = follow(AT_WORK, *B_LOST, *once_more, *once_more)
    assert isinstance(rebuilding, Rebuilding) and rebuilding.num_again == BUDGET.max_failures == 2
    failed, _ = follow(rebuilding, *once_more)
    assert failed.errors[-1].message == "3 new owners were lost before they could join, the last pp1: Died: pp1"
    nodes = [placed(B), replace(lost(B, g=G + 1), error=failure(B, "node"))]
    assert isinstance(follow(rebuilding, *nodes)[0], Rebuilding)  # which are nobody's fault


@pytest.mark.parametrize("cell", [A, B], ids=["a survivor", "the spare"])
def test_a_cell_lost_while_restoring_leads_to_one_more_generation(cell):
    others = tuple(other for other in CELLS if other != cell)
    draining, commands = follow(AT_WORK, *B_BACK, ready(C, G + 1), lost(cell, g=G + 1))
    assert isinstance(draining, Draining) and commands[-1] == abort(*others, g=G + 1)

    standing = {A: STEP, B: None, C: STEP}
    ready_late = ready(others[0], G + 1)
    events = [drained(other, G + 1, standing[other]) for other in others]
    rebuilding, commands = follow(draining, ready_late, *events)
    assert rebuilding.generation == G + 2 and rebuilding.missing == {cell}
    assert commands == search(cell, g=G + 2)

    _, (join,) = follow(rebuilding, placed(cell, G + 2), surveyed(G + 2))
    assert join.restore.step == STEP
    assert join.restore.sources == {A: "holder" if cell == A else "live", B: "holder", C: "live"}


def test_late_news_of_earlier_searches_and_generations_are_ignored():
    late = [drained(C), DEADLINE, ended(A), broke(A), raised(C), ready(A), placed(A, G), surveyed(G)]
    for state in (follow(AT_WORK, *B_LOST)[0], follow(AT_WORK, *B_BACK)[0]):
        assert follow(state, *late) == (state, [])
    restoring, _ = follow(AT_WORK, *B_BACK)
    assert follow(restoring, surveyed(), surveyed(number=2), placed(B)) == (restoring, [])


def test_no_room_told_after_all_room_was_found_is_no_reason_to_wait():
    rebuilding, _ = follow(AT_WORK, *B_LOST, placed(B))
    assert follow(rebuilding, replace(NO_ROOM, generation=G + 1)) == (rebuilding, [])


# What is not repaired.


def test_an_error_that_would_come_again_ends_the_run_and_is_told_first():
    draining, _ = follow(AT_WORK, broke(A), raised(B, final=True))
    failed, commands = follow(draining, drained(A), drained(C))
    assert isinstance(failed, Failed) and not commands
    assert explain(failed.errors).splitlines() == [
        "cell pp1 (worker-of-pp1): Raised: pp1",
        "  cells that only lost their connection to it: pp0",
    ]


@pytest.mark.parametrize("news", [lost(B, "node"), raised(B)], ids=["a node lost", "raised"])
def test_without_failures_allowed_a_single_one_ends_the_run_whoever_tells_first(news):
    strict = replace(AT_WORK, budget=Budget(max_failures=0))
    failed, commands = follow(strict, broke(C), drained(C), news, drained(A))
    assert isinstance(failed, Failed) and failed.errors == (news.error, failure(C, "collateral"))
    assert not any(isinstance(command, Replace | Survey) for command in commands)


def test_a_controller_that_cannot_go_on_ends_the_run_with_what_led_there():
    states = [STARTING, RUNNING, DRAINING, REBUILDING, WAITING, RESTORING, SAVING]
    cells = {named(state): [error.cell for error in advance(state, BROKEN)[0].errors] for state in states}
    assert cells == {
        "Starting": [""],
        "Running": [""],
        "Draining": [A, ""],
        "Rebuilding": [C, A, ""],
        "Waiting": [C, A, ""],
        "Restoring": [C, ""],
        "Saving": [C, ""],
    }


def fail_and_repair(machine, error, step):
    """One failure, after which the run stands at ``step``; the pause before it goes on, None if it does not."""
    g, cell = machine.state.generation, error.cell
    machine.advance((CellFailed if error.kind == "raised" else CellLost)(generation=g, error=error))
    for other in CELLS:
        machine.advance(drained(other, g, step))
    held = Held(cells=dict.fromkeys(CELLS, Holdings(holder=(step,))))
    machine.advance(placed(cell, g + 1))
    commands = machine.advance(surveyed(g + 1, held=held))
    for other in CELLS:
        machine.advance(ready(other, g + 1))
    return commands[0].pause_s if commands else None


def test_an_error_that_repeats_is_tried_as_often_as_allowed_with_longer_pauses():
    machine = Machine(AT_WORK)
    assert [fail_and_repair(machine, failure(B, "raised"), STEP) for _ in range(3)] == [0.0, 1.0, None]
    assert machine.state.errors[0] == failure(B, "raised") and machine.state.generation == G + 3
    assert "failure 3 of its kind in a row" in machine.state.errors[1].message


def test_different_causes_have_a_budget_each():
    machine = Machine(AT_WORK)
    for _ in range(2):
        assert fail_and_repair(machine, failure(B, "raised"), STEP) is not None
        assert fail_and_repair(machine, failure(C, "died"), STEP) is not None
    assert fail_and_repair(machine, failure(B, "died"), STEP) is None


def test_progress_fills_the_budget_up_and_a_step_back_does_not():
    machine = Machine(AT_WORK)
    for step in range(1, 9):
        assert fail_and_repair(machine, failure(B, "raised"), step) == 0.0
    assert [fail_and_repair(machine, failure(B, "raised"), step) for step in (3, 2)] == [1.0, None]


def test_lost_nodes_use_nothing_up():
    machine = Machine(AT_WORK)
    assert [fail_and_repair(machine, failure(B, "node"), STEP) for _ in range(9)] == [0.0] * 9


def test_a_budget_that_is_used_up_ends_the_run_even_if_there_is_no_room():
    used = replace(AT_WORK, budget=Budget(max_failures=1, used={"died": 1}, reached=STEP))
    for events in ((surveyed(), NO_ROOM), (replace(NO_ROOM, generation=G + 1), surveyed())):
        assert isinstance(follow(used, *B_LOST, *events)[0], Failed)


# A stop is asked.


def test_cells_are_asked_to_stop_once():
    _, commands = follow(AT_WORK, STOP, STOP)
    assert commands == [AskStop(generation=G)]


@pytest.mark.parametrize("when", range(len(B_BACK) + 4))
def test_a_stop_asked_at_any_moment_of_a_repair_is_honoured_when_it_runs(when):
    story = [*B_BACK, *(ready(cell, G + 1) for cell in CELLS)]
    running, commands = follow(AT_WORK, *story[:when], STOP, *story[when:])
    assert running.stop_asked
    if when < len(story):
        assert commands[-2:] == [Grant(generation=G + 1), AskStop(generation=G + 1)]
    else:
        assert commands[-1] == AskStop(generation=G + 1)


def test_a_stop_asked_while_starting_is_honoured_when_it_runs():
    start = Starting(generation=G, cells=CELLS, budget=BUDGET)
    running, commands = follow(start, STOP, PLACED, ready(C), STOP, ready(A), ready(B))
    assert running.stop_asked
    assert commands == [SetUp(generation=G), Grant(generation=G), AskStop(generation=G)]


# There is no room.

NO_ROOM_NOW = NoRoom(generation=G + 1, missing="1 bundle of 1 CPU")
WAIT_OVER_NOW = WaitOver(generation=G + 1)


def test_without_room_the_run_waits_and_goes_on_when_there_is_some():
    waiting, commands = follow(AT_WORK, *B_LOST, surveyed(), NO_ROOM_NOW, NO_ROOM_NOW)
    assert waiting.why == "1 bundle of 1 CPU" and commands[-1] == Wait(generation=G + 1)
    rebuilding, commands = follow(waiting, placed(B))
    assert commands == [Survey(generation=G + 1, number=2)]  # what was held may be gone by now
    restoring, (join,) = follow(rebuilding, surveyed(number=1), WAIT_OVER_NOW, surveyed(number=2))
    assert not restoring.stop_asked and join.lost == (B,)


@pytest.mark.parametrize("stop", [STOP, replace(STOP, generation=G + 1)], ids=["of the last generation", "of this one"])
def test_a_stop_asked_while_waiting_ends_the_wait_as_its_time_would(stop):
    waiting, _ = follow(AT_WORK, *B_LOST, surveyed(), NO_ROOM_NOW)
    stopping, commands = follow(waiting, stop)
    assert isinstance(stopping, Waiting) and commands == [Survey(generation=G + 1, number=2)]
    still, commands = follow(stopping, surveyed(number=1))
    assert still == stopping and commands == []  # what was surveyed before the wait may be gone
    saving, commands = follow(stopping, surveyed(number=2))
    restore = Restore(step=STEP, sources={A: "live", B: "holder", C: "live"})
    assert isinstance(saving, Saving) and commands == [SaveHeld(generation=G + 1, restore=restore)]


def test_who_wants_to_stop_does_not_wait_for_room():
    waiting, commands = follow(AT_WORK, *B_LOST, surveyed(), STOP, NO_ROOM_NOW)
    assert isinstance(waiting, Waiting) and commands[-1] == Survey(generation=G + 1, number=2)
    saving, _ = follow(waiting, surveyed(number=2))
    assert isinstance(saving, Saving)


def test_a_stop_asked_while_waiting_is_honoured_when_room_comes_before_the_checkpoint():
    waiting, _ = follow(AT_WORK, *B_LOST, surveyed(), NO_ROOM_NOW, STOP)
    restoring, commands = follow(waiting, placed(B), surveyed(number=2), WAIT_OVER_NOW, surveyed(number=3))
    assert isinstance(restoring, Restoring) and restoring.stop_asked and commands[-1].lost == (B,)
    _, commands = follow(restoring, *(ready(cell, G + 1) for cell in CELLS))
    assert commands == [Grant(generation=G + 1), AskStop(generation=G + 1)]


def test_without_room_for_long_what_is_held_becomes_a_checkpoint_and_the_end():
    waiting, _ = follow(AT_WORK, *B_LOST, NO_ROOM_NOW)
    waiting, commands = follow(waiting, WAIT_OVER_NOW, surveyed(number=1))
    assert isinstance(waiting, Waiting) and commands == [Survey(generation=G + 1, number=2)]
    saving, commands = follow(waiting, surveyed(number=2))
    restore = Restore(step=STEP, sources={A: "live", B: "holder", C: "live"})
    assert commands == [SaveHeld(generation=G + 1, restore=restore)]
    finished, _ = follow(saving, lost(A, g=G + 1), placed(B), HeldSaved(generation=G + 1, done=SAVED))
    assert finished == Finished(generation=G + 1, done=SAVED)


def test_room_that_comes_at_the_last_moment_is_taken():
    waiting, _ = follow(AT_WORK, *B_LOST, NO_ROOM_NOW, WAIT_OVER_NOW)
    restoring, _ = follow(waiting, placed(B), surveyed(number=2), surveyed(number=3))
    assert isinstance(restoring, Restoring)


def test_a_survivor_lost_while_waiting_is_looked_for_too_and_its_state_comes_from_its_slot():
    waiting, commands = follow(AT_WORK, *B_LOST, surveyed(), NO_ROOM_NOW, lost(A, g=G + 1))
    assert commands[-2:] == search(A, number=2) and waiting.rebuilding.missing == {A, B}
    still, commands = follow(waiting, placed(A), WAIT_OVER_NOW)
    assert isinstance(still, Waiting) and commands == [Survey(generation=G + 1, number=3)]
    _, (save,) = follow(still, surveyed(number=3))
    assert save.restore.sources == {A: "holder", B: "holder", C: "live"}


def test_a_checkpoint_that_cannot_be_written_is_told_after_the_loss_and_the_lack_of_room():
    waiting, _ = follow(AT_WORK, *B_LOST, NO_ROOM_NOW, WAIT_OVER_NOW, surveyed(number=2))
    failed, _ = follow(waiting, ControllerFailed(generation=G + 1, message="disk full"))
    assert explain(failed.errors).splitlines() == [
        "cell pp1 (worker-of-pp1): Died: pp1",
        "  then the controller: 1 bundle of 1 CPU; waited in vain",
        "  then the controller: disk full",
    ]
