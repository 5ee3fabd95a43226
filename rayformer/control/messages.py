"""What the machine is told (events) and what it tells others to do (commands)."""

from __future__ import annotations

from dataclasses import dataclass

from rayformer.control.states import Member
from rayformer.events import CellDone, CellError


@dataclass(frozen=True, kw_only=True)
class Placed:
    """Every cell has an actor that is up."""

    generation: int


@dataclass(frozen=True, kw_only=True)
class CellReady:
    """A cell has formed its groups, is built and has its state."""

    generation: int
    cell: str
    member: Member


@dataclass(frozen=True, kw_only=True)
class CellEnded:
    """A cell came to the end of its grant."""

    generation: int
    cell: str
    done: CellDone


@dataclass(frozen=True, kw_only=True)
class CellFailed:
    """A cell's process died, or its program raised."""

    generation: int
    error: CellError


@dataclass(frozen=True, kw_only=True)
class PlacementFailed:
    """Not every cell could get an actor; ``missing`` says what was asked for and what there is."""

    generation: int
    missing: str


@dataclass(frozen=True, kw_only=True)
class StopAsked:
    """Somebody wants a checkpoint and then the end; ``by`` says who."""

    generation: int
    by: str


@dataclass(frozen=True, kw_only=True)
class DeadlinePassed:
    """The time that ``Abort`` gave the cells is over."""

    generation: int


@dataclass(frozen=True, kw_only=True)
class ControllerFailed:
    """The controller itself can't go on; ``message`` says why."""

    generation: int
    message: str


Event = Placed | CellReady | CellEnded | CellFailed | PlacementFailed | StopAsked | DeadlinePassed | ControllerFailed


@dataclass(frozen=True, kw_only=True)
class SetUp:
    """Give every actor its cell: form the groups of this generation, build, load."""

    generation: int


@dataclass(frozen=True, kw_only=True)
class Grant:
    """Let every cell run all its remaining steps without asking again."""

    generation: int


@dataclass(frozen=True, kw_only=True)
class AskStop:
    """Let every cell stop after the step it is in, with a checkpoint."""

    generation: int


@dataclass(frozen=True, kw_only=True)
class Abort:
    """Break the groups of this generation so that no cell stays blocked, and send DeadlinePassed after ``seconds``."""

    generation: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Kill:
    """End the processes of ``cells``."""

    generation: int
    cells: tuple[str, ...]


Command = SetUp | Grant | AskStop | Abort | Kill
