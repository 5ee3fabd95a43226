"""The machine of a run: what it makes of every event in every state, and that it never waits for what can't come."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rayformer.control.failure import first_cause
from rayformer.control.machine import ABORT_S, Machine, UnexpectedEvent, advance
from rayformer.control.messages import (
    Abort,
    AskStop,
    CellEnded,
    CellFailed,
    CellReady,
    ControllerFailed,
    DeadlinePassed,
    Grant,
    Kill,
    Placed,
    PlacementFailed,
    SetUp,
    StopAsked,
)
from rayformer.control.states import END_STATES, Failed, Finished, Member, Running, Starting, Stopping
from rayformer.events import CellDone, CellError

A, B, C = CELLS = ("pp0", "pp1", "pp2")
G = 3
DONE = CellDone(generation=G, outcome="finished", step=10)


def member(cell):
    return Member(worker=f"worker-of-{cell}", pid=CELLS.index(cell) + 1, node="n", param_addr=0)


def failure(cell, kind="died"):
    return CellError(cell=cell, worker=f"worker-of-{cell}", kind=kind, message=f"{cell} {kind}")


MEMBERS = {cell: member(cell) for cell in CELLS}
STARTING = Starting(generation=G, cells=CELLS, members={A: member(A), B: member(B)})
RUNNING = Running(generation=G, members=MEMBERS, done={A: DONE, B: DONE})
STOPPING = Stopping(generation=G, pending=frozenset({C}), then=Failed(generation=G, errors=(failure(A, "collateral"),)))
FINISHED = Finished(generation=G, done=DONE)
FAILED = Failed(generation=G, errors=(failure(A),))

PLACED = Placed(generation=G)
READY = CellReady(generation=G, cell=C, member=member(C))
ENDED = CellEnded(generation=G, cell=C, done=DONE)
LOST = CellFailed(generation=G, error=failure(C))
NO_ROOM = PlacementFailed(generation=G, missing="a node")
STOP = StopAsked(generation=G, by="signal")
DEADLINE = DeadlinePassed(generation=G)
BROKEN = ControllerFailed(generation=G, message="disk full")
EVENTS = (PLACED, READY, ENDED, LOST, NO_ROOM, STOP, DEADLINE, BROKEN)

# What follows on each of EVENTS, in their order: the name of the next state and of the commands; None raises.
ROWS = [
    (
        STARTING,
        ["Starting SetUp", "Running Grant", None, "Stopping Abort", "Failed Kill", "Starting", None, "Failed Kill"],
    ),
    (RUNNING, [None, None, "Finished", "Failed", None, "Running AskStop", None, "Failed Kill"]),
    (STOPPING, ["Stopping", "Stopping", "Failed", "Failed", None, "Stopping", "Failed Kill", "Failed Kill"]),
    (FINISHED, ["Finished"] * 8),
    (FAILED, ["Failed"] * 8),
]
PAIRS = [(state, event, result) for state, row in ROWS for event, result in zip(EVENTS, row, strict=True)]


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
    assert all(command.generation == G for command in commands)


@pytest.mark.parametrize("state", [state for state, _ in ROWS], ids=named)
def test_news_of_an_older_generation_changes_nothing(state):
    for event in EVENTS:
        old = type(event)(**{**vars(event), "generation": G - 1})
        assert advance(state, old) == (state, ())


@pytest.mark.parametrize("state", [STARTING, RUNNING, STOPPING], ids=named)
def test_a_controller_that_cannot_go_on_ends_the_run_and_every_cell_in_it(state):
    failed, (kill,) = advance(state, BROKEN)
    assert failed.errors[-1].message == "disk full" and not failed.errors[-1].cell
    assert set(kill.cells) == ({C} if state is STOPPING else set(CELLS))
    assert failed.errors[:-1] == (STOPPING.then.errors if state is STOPPING else ())


def follow(state, *events):
    """The state after ``events``, and the commands of all of them."""
    machine = Machine(state)
    commands = [command for event in events for command in machine.advance(event)]
    return machine.state, commands


def ready(cell):
    return CellReady(generation=G, cell=cell, member=member(cell))


def test_cells_may_come_in_any_order_and_stand_in_the_order_of_the_layout():
    running, commands = follow(Starting(generation=G, cells=CELLS), PLACED, ready(C), ready(A), ready(B))
    assert list(running.members) == list(CELLS) and running.members[C] == member(C)
    assert commands == [SetUp(generation=G), Grant(generation=G)]


def test_a_stop_asked_while_starting_is_honoured_when_it_runs():
    running, commands = follow(Starting(generation=G, cells=CELLS), STOP, PLACED, ready(C), STOP, ready(A), ready(B))
    assert running.stop_asked
    assert commands == [SetUp(generation=G), Grant(generation=G), AskStop(generation=G)]
    assert advance(running, STOP) == (running, ())  # and not twice


def test_cells_are_asked_to_stop_once():
    _, commands = follow(Running(generation=G, members=MEMBERS), STOP, STOP)
    assert commands == [AskStop(generation=G)]


def test_the_result_is_what_the_first_cell_said_whoever_ends_last():
    first = CellDone(generation=G, outcome="finished", step=10, sample="text")
    ends = [CellEnded(generation=G, cell=cell, done=first if cell == A else DONE) for cell in (A, C, B)]
    finished, commands = follow(Running(generation=G, members=MEMBERS), *ends)
    assert finished == Finished(generation=G, done=first) and not commands


@pytest.mark.parametrize("order", [(0, 1, 2), (0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1), (2, 1, 0)])
def test_a_death_is_the_cause_before_an_exception_before_a_broken_connection(order):
    errors = (failure(A, "died"), failure(B, "raised"), failure(C, "collateral"))
    arriving = [errors[i] for i in order]
    failed, commands = follow(RUNNING_ALL, *(CellFailed(generation=G, error=error) for error in arriving))
    assert failed.errors == tuple(arriving)
    assert first_cause(failed.errors) == errors[0]
    assert first_cause([error for error in arriving if error.kind != "died"]) == errors[1]
    assert commands == [Abort(generation=G, seconds=ABORT_S)]


RUNNING_ALL = Running(generation=G, members=MEMBERS)


def test_of_two_news_of_one_cell_the_first_counts():
    news = [failure(A, "raised"), failure(A, "died"), failure(B, "collateral"), failure(A, "died"), failure(C, "died")]
    failed, _ = follow(RUNNING_ALL, *(CellFailed(generation=G, error=error) for error in news))
    assert failed.errors == (news[0], news[2], news[4])


def test_a_cell_that_had_ended_may_still_die_while_the_others_stop():
    stopping, _ = follow(RUNNING_ALL, CellEnded(generation=G, cell=A, done=DONE), LOST)
    assert stopping.pending == {B}
    later, _ = advance(stopping, CellFailed(generation=G, error=failure(A)))
    assert later.pending == {B} and [error.cell for error in later.then.errors] == [C, A]


def test_a_deadline_kills_who_has_not_answered_and_nobody_else():
    failed, commands = follow(RUNNING_ALL, LOST, DEADLINE)
    assert commands == [Abort(generation=G, seconds=ABORT_S), Kill(generation=G, cells=(A, B))]
    assert failed.errors[0] == failure(C)
    assert [(error.cell, error.kind) for error in failed.errors[1:]] == [(A, "silent"), (B, "silent")]


def test_an_unexpected_event_is_told_with_what_came_before():
    machine = Machine(Starting(generation=G, cells=(A,)))
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


class World:
    """What can still happen around a machine: the answers that are due to its commands, and what may come unasked."""

    def __init__(self):
        self.due = [("place", None)]
        self.unasked = [("stop", None), ("stop", None), ("break", None)]

    def obey(self, command):
        match command:
            case SetUp():
                self.due += [("set up", cell) for cell in CELLS]
            case Grant():
                self.due += [("run", cell) for cell in CELLS]
            case Abort():
                self.due.append(("deadline", None))

    def let_happen(self, draw, what, cell):
        """The events that the machine hears of it."""
        (self.due if (what, cell) in self.due else self.unasked).remove((what, cell))
        match what:
            case "place":
                self.unasked += [("die", cell) for cell in CELLS]
                return [PLACED] if draw(st.booleans()) else [NO_ROOM]
            case "stop":
                return [STOP]
            case "break":
                return [BROKEN]
            case "deadline":
                return [DEADLINE]
            case "die":  # its tether breaks, and so does the call that it was in
                calls = [happening for happening in self.due if happening[1] == cell]
                self.due = [happening for happening in self.due if happening not in calls]
                return [CellFailed(generation=G, error=failure(cell))] * (1 + len(calls))
        how = draw(st.sampled_from(["well", "well", "well", "raised", "collateral"]))
        if how != "well":
            return [CellFailed(generation=G, error=failure(cell, how))]
        return [ready(cell) if what == "set up" else CellEnded(generation=G, cell=cell, done=DONE)]


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_whatever_happens_in_whatever_order_the_run_ends_and_never_waits_for_nothing(data):
    machine, world, heard = Machine(Starting(generation=G, cells=CELLS)), World(), []
    while not isinstance(machine.state, END_STATES):
        assert world.due, f"nothing is due, but {machine.state} has not ended"
        rare = data.draw(st.integers(0, 7)) == 0 and world.unasked
        for event in world.let_happen(data.draw, *data.draw(st.sampled_from(world.unasked if rare else world.due))):
            if not isinstance(machine.state, END_STATES):
                heard.append(event)
            for command in machine.advance(event):
                world.obey(command)
    end = machine.state
    for what in world.due + world.unasked:  # what is late changes nothing
        assert [machine.advance(event) for event in world.let_happen(data.draw, *what)] and machine.state is end

    first_words = {}
    for event in heard:
        if isinstance(event, CellFailed):
            first_words.setdefault(event.error.cell, event.error)
    if isinstance(end, Finished):
        assert not first_words
    else:
        told = [error for error in end.errors if error.cell and error.kind != "silent"]
        assert told == list(first_words.values())
        kinds = {error.kind for error in end.errors}
        assert first_cause(end.errors).kind == min(kinds, key=["died", "raised", "silent", "collateral"].index)
