"""The machine: ``advance(state, event)`` gives the next state and the commands to bring it about. No clock, no I/O."""

from __future__ import annotations

from collections import deque
from collections.abc import Container
from dataclasses import replace

from rayformer.control.failure import first_cause
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
    Command,
    ControllerFailed,
    DeadlinePassed,
    Event,
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
from rayformer.control.restore import Held, Holdings, Restore, choose_restore
from rayformer.control.states import (
    END_STATES,
    Draining,
    Failed,
    Finished,
    Rebuilding,
    Restoring,
    Running,
    Saving,
    Starting,
    State,
    Waiting,
)
from rayformer.events import CellError

ABORT_S = 10.0

Step = tuple[State, tuple[Command, ...]]


class UnexpectedEvent(Exception):
    """An event that its state has no place for: a mistake in the controller."""


def advance(state: State, event: Event) -> Step:
    """The next state, and the commands that bring it about.

    News of an older generation change nothing. The end of a process, a stop and the controller's own failure are of no
    generation, and count whenever they come. Raises UnexpectedEvent for a pair that can't happen.
    """
    is_late = event.generation < state.generation and not isinstance(event, CellLost | StopAsked | ControllerFailed)
    if is_late or isinstance(state, END_STATES):
        return state, ()
    if isinstance(event, ControllerFailed):
        error = CellError(cell="", worker="", kind="raised", message=event.message)
        return Failed(generation=state.generation, errors=(*_errors(state), error)), ()
    match state:
        case Starting():
            return _starting(state, event)
        case Running():
            return _running(state, event)
        case Draining():
            return _draining(state, event)
        case Rebuilding():
            return _rebuilding(state, event)
        case Waiting():
            return _waiting(state, event)
        case Restoring():
            return _restoring(state, event)
        case Saving():
            return _saving(state, event)


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
    match event:
        case Placed():
            return state, (SetUp(generation=state.generation),)
        case PlacementFailed(missing=missing):
            error = CellError(cell="", worker="", kind="raised", message=missing)
            return Failed(generation=state.generation, errors=(error,)), ()
        case CellReady(cell=cell, member=member):
            return _joined(replace(state, members={**state.members, cell: member}))
        case StopAsked():
            return replace(state, stop_asked=True), ()
        case CellLost() | CellFailed() | CellStalled() | CellBroke():
            return _drain(state, state.cells, event)
    raise UnexpectedEvent(f"{event} in {state}")


def _restoring(state: Restoring, event: Event) -> Step:
    match event:
        case CellReady(cell=cell, member=member):
            return _joined(replace(state, members={**state.members, cell: member}))
        case StopAsked():
            return replace(state, stop_asked=True), ()
        case CellLost() | CellFailed() | CellStalled() | CellBroke():
            return _drain(state, state.cells, event)
        case CellPlaced() | Surveyed() | NoRoom() | WaitOver():
            return state, ()  # of the search that has ended
    raise UnexpectedEvent(f"{event} in {state}")


def _joined(state: Starting | Restoring) -> Step:
    """One more cell is ready; if it was the last one, the steps begin."""
    if len(state.members) < len(state.cells):
        return state, ()
    members = {name: state.members[name] for name in state.cells}
    running = Running(generation=state.generation, members=members, budget=state.budget, stop_asked=state.stop_asked)
    stop = (AskStop(generation=state.generation),) if state.stop_asked else ()
    return running, (Grant(generation=state.generation), *stop)


def _running(state: Running, event: Event) -> Step:
    match event:
        case CellEnded(cell=cell, done=done):
            ended = {**state.done, cell: done}
            if len(ended) < len(state.members):
                return replace(state, done=ended), ()
            first = next(iter(state.members))
            return Finished(generation=state.generation, done=ended[first]), ()
        case StopAsked():
            if state.stop_asked:
                return state, ()
            return replace(state, stop_asked=True), (AskStop(generation=state.generation),)
        case CellLost() | CellFailed() | CellStalled() | CellBroke():
            return _drain(state, tuple(state.members), event)
        case CellPlaced() | Surveyed() | NoRoom() | WaitOver():
            return state, ()
    raise UnexpectedEvent(f"{event} in {state}")


def _drain(
    state: Starting | Running | Restoring,
    cells: tuple[str, ...],
    event: CellLost | CellFailed | CellStalled | CellBroke,
) -> Step:
    """Free all cells from waiting for the one that something happened to, and let them say where they stand."""
    draining = Draining(
        generation=state.generation,
        cells=cells,
        budget=state.budget,
        pending=frozenset(cells),
        stop_asked=state.stop_asked,
    )
    following, commands = _draining(draining, event)
    others = tuple(cell for cell in cells if cell != event.error.cell or isinstance(event, CellBroke))
    abort = (Abort(generation=state.generation, cells=others, seconds=ABORT_S),) if others else ()
    return following, (*abort, *commands)


def _draining(state: Draining, event: Event) -> Step:
    match event:
        case CellLost(error=error) | CellFailed(error=error) | CellStalled(error=error):
            known = error.cell in state.lost
            lost = state.lost if known else {**state.lost, error.cell: error}
            standing = {cell: step for cell, step in state.standing.items() if cell != error.cell}
            following = replace(state, lost=lost, standing=standing, pending=state.pending - {error.cell})
            alive = not isinstance(event, CellLost) and not known
            kill = (Kill(generation=state.generation, cells=(error.cell,)),) if alive else ()
            return _after_draining(following, kill)
        case CellBroke(error=error):
            return replace(state, broke={**state.broke, error.cell: error}), ()
        case CellDrained(cell=cell, standing=step):
            if cell in state.lost:
                return state, ()
            following = replace(state, standing={**state.standing, cell: step}, pending=state.pending - {cell})
            return _after_draining(following, ())
        case DeadlinePassed():
            cells = _in_order(state.cells, state.pending)
            message = f"it did not answer within {ABORT_S:g} s of being freed, and was killed"
            silent = {cell: CellError(cell=cell, worker="", kind="silent", message=message) for cell in cells}
            following = replace(state, lost={**state.lost, **silent}, pending=frozenset())
            return _after_draining(following, (Kill(generation=state.generation, cells=cells),))
        case StopAsked():
            return replace(state, stop_asked=True), ()
        case CellReady() | CellEnded() | Placed() | CellPlaced() | Surveyed() | NoRoom() | WaitOver():
            return state, ()  # an ended cell still says where it stands
    raise UnexpectedEvent(f"{event} in {state}")


def _after_draining(state: Draining, commands: tuple[Command, ...]) -> Step:
    """If every cell stands still or is gone, prepare the next generation, unless the error must not be repaired."""
    if state.pending:
        return state, commands
    errors = _errors(state)
    if any(error.final for error in errors) or state.budget.max_failures == 0:
        return Failed(generation=state.generation, errors=errors), commands
    following = Rebuilding(
        generation=state.generation + 1,
        cells=state.cells,
        budget=state.budget,
        lost=state.lost,
        broke=state.broke,
        missing=frozenset(state.lost),
        standing=state.standing,
        stop_asked=state.stop_asked,
    )
    return following, (*commands, *_search(following, _in_order(state.cells, state.lost)))


def _search(state: Rebuilding, cells: tuple[str, ...]) -> tuple[Command, ...]:
    survey = Survey(generation=state.generation, number=state.survey)
    return (Replace(generation=state.generation, cells=cells), survey) if cells else (survey,)


def _rebuilding(state: Rebuilding, event: Event) -> Step:
    match event:
        case CellPlaced(cell=cell):
            return _restore_if_complete(replace(state, missing=state.missing - {cell}))
        case Surveyed(number=number, held=held):
            return _restore_if_complete(replace(state, held=held)) if number == state.survey else (state, ())
        case CellLost(error=error):
            cell = error.cell
            if cell in state.missing:
                return state, ()
            again = cell in state.lost and error.kind != "node"
            following = replace(
                state,
                lost=state.lost if cell in state.lost else {**state.lost, cell: error},
                missing=state.missing | {cell},
                standing={name: step for name, step in state.standing.items() if name != cell},
                num_again=state.num_again + again,
            )
            if state.budget.bears(following.num_again):
                return _survey_anew(following, (cell,))
            message = (
                f"{following.num_again} new owners were lost before they could join, the last {cell}: {error.message}"
            )
            giving_up = CellError(cell="", worker="", kind="raised", message=message)
            return Failed(generation=state.generation, errors=(*_errors(state), giving_up)), ()
        case NoRoom(missing=missing):
            if not state.missing:
                return state, ()
            if state.stop_asked:  # who wants to stop does not wait for room
                rebuilding, survey = _survey_anew(state)
                return Waiting(rebuilding=rebuilding, why=missing, is_over=True), survey
            return Waiting(rebuilding=state, why=missing), (Wait(generation=state.generation),)
        case StopAsked():
            return replace(state, stop_asked=True), ()
        case WaitOver():
            return state, ()
    raise UnexpectedEvent(f"{event} in {state}")


def _survey_anew(state: Rebuilding, cells: tuple[str, ...] = ()) -> tuple[Rebuilding, tuple[Command, ...]]:
    """What is held may have changed: ask again, and look for owners of ``cells``, which were lost just now."""
    following = replace(state, survey=state.survey + 1, held=None)
    return following, _search(following, cells)


def _restore_if_complete(state: Rebuilding) -> Step:
    """Choose where to go on once it is known what is held, if the budget allows it; go once every cell has an owner."""
    if state.held is None:
        return state, ()
    restore = _choice(state, state.held)
    errors = _errors(state)
    budget = state.budget.after(first_cause(errors), step=restore.step)
    if budget.is_exceeded:
        giving_up = CellError(cell="", worker="", kind="raised", message=budget.in_words)
        return Failed(generation=state.generation, errors=(*errors, giving_up)), ()
    if state.missing:
        return state, ()
    following = Restoring(
        generation=state.generation,
        cells=state.cells,
        budget=budget,
        lost=state.lost,
        restore=restore,
        stop_asked=state.stop_asked,
    )
    join = Join(
        generation=state.generation,
        restore=restore,
        lost=_in_order(state.cells, state.lost),
        pause_s=budget.pause_s,
    )
    return following, (join,)


def _choice(state: Rebuilding, held: Held) -> Restore:
    cells = {cell: replace(held.cells.get(cell, Holdings()), live=state.standing.get(cell)) for cell in state.cells}
    return choose_restore(replace(held, cells=cells))


def _waiting(state: Waiting, event: Event) -> Step:
    """What was surveyed before a long wait may be gone after it, so that the wait ends with a new survey."""
    match event:
        case NoRoom(missing=missing):
            return replace(state, why=missing), ()
        case WaitOver() | StopAsked():
            asked = state.rebuilding.stop_asked or isinstance(event, StopAsked)
            rebuilding, survey = _survey_anew(replace(state.rebuilding, stop_asked=asked))
            return replace(state, rebuilding=rebuilding, is_over=True), survey
        case CellPlaced(cell=cell) if state.rebuilding.missing <= {cell}:
            return _survey_anew(replace(state.rebuilding, missing=frozenset()))
        case CellPlaced() | CellLost() | Surveyed():
            following, commands = _rebuilding(state.rebuilding, event)
            if not isinstance(following, Rebuilding):
                return following, commands
            if state.is_over and following.held is not None:
                return _save(replace(state, rebuilding=following), following.held)
            return replace(state, rebuilding=following), commands
    raise UnexpectedEvent(f"{event} in {state}")


def _save(state: Waiting, held: Held) -> Step:
    restore = _choice(state.rebuilding, held)
    error = CellError(cell="", worker="", kind="raised", message=f"{state.why}; waited in vain")
    saving = Saving(generation=state.generation, restore=restore, errors=(*_errors(state), error))
    return saving, (SaveHeld(generation=state.generation, restore=restore),)


def _saving(state: Saving, event: Event) -> Step:
    match event:
        case HeldSaved(done=done):
            return Finished(generation=state.generation, done=done), ()
        case CellLost() | CellPlaced() | NoRoom() | StopAsked() | Surveyed() | WaitOver():
            return state, ()
    raise UnexpectedEvent(f"{event} in {state}")


def _errors(state: State) -> tuple[CellError, ...]:
    """Everything that is known to have gone wrong in a state."""
    match state:
        case Draining() | Rebuilding():
            others = tuple(error for cell, error in state.broke.items() if cell not in state.lost)
            return (*state.lost.values(), *others)
        case Waiting(rebuilding=rebuilding):
            return _errors(rebuilding)
        case Restoring():
            return tuple(state.lost.values())
        case Saving() | Failed():
            return state.errors
    return ()


def _in_order(cells: tuple[str, ...], chosen: Container[str]) -> tuple[str, ...]:
    return tuple(cell for cell in cells if cell in chosen)
