"""The journal of the machine: its events and commands as entries, and the machine run again over what was written.

An attempt begins with an entry ``attempt {cells, max_failures}``. After each event come the commands that it led to, so
that a journal whose commands are not those of the machine of now is found out at the first difference.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, get_args

from pydantic import TypeAdapter, ValidationError

from rayformer.control.machine import Machine, UnexpectedEvent
from rayformer.control.messages import (
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
    HeldSaved,
    NoRoom,
    Placed,
    PlacementFailed,
    StopAsked,
    Surveyed,
    WaitOver,
)
from rayformer.control.policy import Budget
from rayformer.control.states import Starting
from rayformer.errors import RayformerError
from rayformer.events import JournalEntry, plain

_EVENTS, _COMMANDS = get_args(Event), get_args(Command)

Line = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Told:
    """One event of an attempt: seconds after its start, the machine's generation after it, its states, and in words."""

    line: int
    since_s: float
    generation: int
    before: str
    after: str
    words: str


class ReplayError(RayformerError):
    """A journal does not replay: the message names the ``line``, from 1, what was found and what was expected.

    ``told`` is the story up to there.
    """

    def __init__(self, line: int, found: object, expected: object, told: Sequence[Told] = ()) -> None:
        self.line, self.told = line, list(told)
        super().__init__(f"line {line}: found {found}, expected {expected}")


def attempt_entry(state: Starting) -> JournalEntry:
    """The entry that every attempt begins with."""
    values = {"cells": state.cells, "max_failures": state.budget.max_failures}
    return JournalEntry(kind="attempt", generation=state.generation, values=values)


def entry_of(message: Event | Command) -> JournalEntry:
    """An event or a command as an entry of the journal."""
    values = plain(message)
    generation = values.pop("generation")
    role = "event" if isinstance(message, _EVENTS) else "command"
    return JournalEntry(kind=_kind(type(message)), generation=generation, values={"role": role, **values})


def replay(lines: Sequence[Line], attempt: int | None = None) -> list[Told]:
    """The story of one attempt, the last one if not said, from all lines of a journal.

    The commands of the last event may be incomplete: the controller ended over them. Raises ReplayError.
    """
    (first, head), *following = _lines_of(lines, attempt)
    begun = _validated(_Attempt, first, head, ())
    budget = Budget(max_failures=begun.max_failures)
    machine = Machine(Starting(generation=begun.generation, cells=begun.cells, budget=budget))
    due: deque[Command] = deque()
    told: list[Told] = []
    for number, line in following:
        if "role" not in line:
            continue  # what happened besides
        message = _message(number, line, told)
        expected = due.popleft() if due else None
        if line["role"] == "command":
            if message != expected:
                raise ReplayError(number, message, expected or "the next event", told)
            continue
        if expected is not None:
            raise ReplayError(number, message, expected, told)
        before = machine.state
        try:
            due.extend(machine.advance(message))
        except UnexpectedEvent as error:
            raise ReplayError(number, error, f"an event that {type(before).__name__} has a place for", told) from None
        late = f" (told in generation {message.generation})" if message.generation < before.generation else ""
        told.append(
            Told(
                line=number,
                since_s=line["time"] - begun.time,
                generation=machine.state.generation,
                before=type(before).__name__,
                after=type(machine.state).__name__,
                words=in_words(message) + late,
            )
        )
    return told


def in_words(event: Event) -> str:
    """What an event says, for people."""
    match event:
        case Placed():
            return "every cell has an actor"
        case PlacementFailed(missing=missing):
            return f"not every cell found a place: {missing}"
        case CellReady(cell=cell, member=member):
            return f"{cell} is ready on {member.worker}"
        case CellEnded(cell=cell, done=done):
            return f"{cell} has ended, {done.outcome} after step {done.step}"
        case CellLost(error=error):
            return f"{error.cell} is lost: {error.message}"
        case CellFailed(error=error):
            return f"{error.cell} failed: {error.message}"
        case CellStalled(error=error):
            return f"{error.cell} stalls: {error.message}"
        case CellBroke(error=error):
            return f"{error.cell} lost a peer: {error.message}"
        case CellDrained(cell=cell, standing=None):
            return f"{cell} stands still, its state in pieces"
        case CellDrained(cell=cell, standing=step):
            return f"{cell} stands still after step {step}"
        case CellPlaced(cell=cell, worker=worker):
            return f"{cell} has a new owner, {worker}"
        case Surveyed(number=number, held=held):
            return f"it is known what is held of {len(held.cells)} cells (survey {number})"
        case NoRoom(missing=missing):
            return f"no room: {missing}"
        case WaitOver():
            return "the time to wait for room is over"
        case HeldSaved(done=done):
            return f"what was held of step {done.step} is saved as {done.checkpoint}"
        case StopAsked(by=by):
            return f"asked to stop by {by}"
        case DeadlinePassed():
            return "the time to stand still is over"
        case ControllerFailed(message=message):
            return f"the controller failed: {message}"


def _lines_of(lines: Sequence[Line], attempt: int | None) -> list[tuple[int, Line]]:
    """The numbered lines of one attempt, from the one that says what it begins with."""
    attempts = sorted({line["attempt"] for line in lines if "attempt" in line})
    chosen = attempt if attempt is not None or not attempts else attempts[-1]
    if chosen not in attempts:
        there = f"one of attempts {', '.join(map(str, attempts))}" if attempts else "the lines of an attempt"
        raise ReplayError(len(lines), "the end" if chosen is None else f"no line of attempt {chosen}", there)
    own = [(number, line) for number, line in enumerate(lines, start=1) if line.get("attempt") == chosen]
    number, first = own[0]
    if first["kind"] != "attempt":
        raise ReplayError(number, first["kind"], f"the line 'attempt' that attempt {chosen} begins with")
    return own


@dataclass(frozen=True, kw_only=True)
class _Attempt:
    time: float
    generation: int
    cells: tuple[str, ...]
    max_failures: int


def _message(number: int, line: Line, told: Sequence[Told]) -> Any:
    """The event or command that a line was written from."""
    kinds = {_kind(message): message for message in (_EVENTS if line["role"] == "event" else _COMMANDS)}
    if line["kind"] not in kinds:
        raise ReplayError(number, f"the {line['role']} {line['kind']}", f"one of {', '.join(kinds)}", told)
    return _validated(kinds[line["kind"]], number, line, told)


def _validated(record: type, number: int, line: Line, told: Sequence[Told]) -> Any:
    try:
        return _adapter(record).validate_python(line)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise ReplayError(number, f"{line['kind']} with a wrong {where}", first["msg"], told) from None


@cache
def _adapter(record: type) -> TypeAdapter[Any]:
    return TypeAdapter(record)


def _kind(message: type) -> str:
    """The name of a class in snake_case."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", message.__name__).lower()
