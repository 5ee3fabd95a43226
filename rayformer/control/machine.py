"""The machine: ``advance(state, event)`` gives the next state and the commands to bring it about. No clock, no I/O."""

from __future__ import annotations

from collections import deque
from dataclasses import replace

from rayformer.control.messages import (
    Abort,
    AskStop,
    CellEnded,
    CellFailed,
    CellReady,
    Command,
    ControllerFailed,
    DeadlinePassed,
    Event,
    Grant,
    Kill,
    Placed,
    PlacementFailed,
    SetUp,
    StopAsked,
)
from rayformer.control.states import END_STATES, Failed, Finished, Running, Starting, State, Stopping
from rayformer.events import CellError

ABORT_S = 5.0

Step = tuple[State, tuple[Command, ...]]


class UnexpectedEvent(Exception):
    """An event that its state has no place for: a mistake in the controller."""


def advance(state: State, event: Event) -> Step:
    """The next state, and the commands that bring it about. Events of an older generation change nothing.

    Raises UnexpectedEvent for a pair that can't happen.
    """
    if event.generation < state.generation:
        return state, ()
    if isinstance(event, ControllerFailed) and not isinstance(state, END_STATES):
        return _broken(state, event.message)
    match state:
        case Starting():
            return _starting(state, event)
        case Running():
            return _running(state, event)
        case Stopping():
            return _stopping(state, event)
        case Finished() | Failed():
            return state, ()  # whatever is late is of no account


class Machine:
    """Holds the state of one run, and its recent history for the message if something unexpected comes."""

    def __init__(self, state: State) -> None:
        self.state = state
        self._history: deque[str] = deque(maxlen=20)

    def advance(self, event: Event) -> tuple[Command, ...]:
        """Take an event; the commands to carry out."""
        try:
            following, commands = advance(self.state, event)
        except UnexpectedEvent as error:
            raise UnexpectedEvent(f"{error}; before it: {' -> '.join(self._history) or 'nothing'}") from None
        self._history.append(f"{type(self.state).__name__}({type(event).__name__})")
        self.state = following
        return commands


def _starting(state: Starting, event: Event) -> Step:
    generation = state.generation
    match event:
        case Placed():
            return state, (SetUp(generation=generation),)
        case CellReady(cell=cell, member=member):
            members = {**state.members, cell: member}
            if len(members) < len(state.cells):
                return replace(state, members=members), ()
            members = {name: members[name] for name in state.cells}
            running = Running(generation=generation, members=members, stop_asked=state.stop_asked)
            stop = (AskStop(generation=generation),) if state.stop_asked else ()
            return running, (Grant(generation=generation), *stop)
        case StopAsked():
            return replace(state, stop_asked=True), ()
        case CellFailed(error=error):
            return _stop(generation, frozenset(state.cells), error)
        case PlacementFailed(missing=missing):
            return _broken(state, missing)
    raise UnexpectedEvent(f"{event} in {state}")


def _running(state: Running, event: Event) -> Step:
    generation = state.generation
    match event:
        case CellEnded(cell=cell, done=done):
            ended = {**state.done, cell: done}
            if len(ended) < len(state.members):
                return replace(state, done=ended), ()
            first = next(iter(state.members))
            return Finished(generation=generation, done=ended[first]), ()
        case StopAsked():
            if state.stop_asked:
                return state, ()
            return replace(state, stop_asked=True), (AskStop(generation=generation),)
        case CellFailed(error=error):
            return _stop(generation, frozenset(state.members) - frozenset(state.done), error)
    raise UnexpectedEvent(f"{event} in {state}")


def _broken(state: Starting | Running | Stopping, message: str) -> Step:
    """The run as a whole can't go on."""
    known: tuple[CellError, ...] = ()
    match state:
        case Starting(cells=cells):
            alive = cells
        case Running(members=members):
            alive = tuple(members)
        case Stopping(pending=pending, then=then):
            alive, known = tuple(sorted(pending)), then.errors
    error = CellError(cell="", worker="", kind="raised", message=message)
    return (
        Failed(generation=state.generation, errors=(*known, error)),
        (Kill(generation=state.generation, cells=alive),),
    )


def _stop(generation: int, alive: frozenset[str], error: CellError) -> Step:
    """One cell failed: free the others from waiting for it, and hear what they have to say."""
    pending = alive - {error.cell}
    then = Failed(generation=generation, errors=(error,))
    if not pending:
        return then, ()
    return (
        Stopping(generation=generation, pending=pending, then=then),
        (Abort(generation=generation, seconds=ABORT_S),),
    )


def _stopping(state: Stopping, event: Event) -> Step:
    then, pending = state.then, state.pending
    match event:
        case CellFailed(error=error):
            # A cell may be told of twice: its program raised, and then its process died. The first word counts.
            if error.cell in pending or not any(known.cell == error.cell for known in then.errors):
                then = replace(then, errors=(*then.errors, error))
            pending = pending - {error.cell}
        case CellEnded(cell=cell):
            pending = pending - {cell}
        case DeadlinePassed():
            cells = tuple(sorted(pending))
            message = f"it did not answer within {ABORT_S:g} s of being freed, and was killed"
            silent = [CellError(cell=cell, worker="", kind="silent", message=message) for cell in cells]
            then = replace(then, errors=(*then.errors, *silent))
            return then, (Kill(generation=state.generation, cells=cells),)
        case CellReady() | StopAsked() | Placed():
            return state, ()
        case _:
            raise UnexpectedEvent(f"{event} in {state}")
    if pending:
        return replace(state, pending=pending, then=then), ()
    return then, ()
