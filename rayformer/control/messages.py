"""What the machine is told (events) and what it tells others to do (commands)."""

from __future__ import annotations

from dataclasses import dataclass

from rayformer.control.restore import Held, Restore
from rayformer.control.states import Member
from rayformer.events import CellDone, CellError


@dataclass(frozen=True, kw_only=True)
class Placed:
    """Every cell has an actor that is up."""

    generation: int


@dataclass(frozen=True, kw_only=True)
class PlacementFailed:
    """Not every cell could get an actor at the start; ``missing`` says what was asked for and what there is."""

    generation: int
    missing: str


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
class CellLost:
    """The process that owns a cell now has died, or its node has; the death of a former owner is not told.

    A process lives through many generations: this one counts even if the machine has gone on to the next meanwhile.
    """

    generation: int
    error: CellError


@dataclass(frozen=True, kw_only=True)
class CellFailed:
    """The program of a cell raised; its process is still there."""

    generation: int
    error: CellError


@dataclass(frozen=True, kw_only=True)
class CellStalled:
    """A cell makes no progress, and is what others wait for."""

    generation: int
    error: CellError


@dataclass(frozen=True, kw_only=True)
class CellBroke:
    """A cell lost the connection to a peer; it waits for what comes next."""

    generation: int
    error: CellError


@dataclass(frozen=True, kw_only=True)
class CellDrained:
    """A cell stands still, its groups gone; its state is whole after step ``standing``, or not at all if None.

    Comes after whatever the cell's own call ended with: an error that is told later would be dropped as late.
    """

    generation: int
    cell: str
    standing: int | None


@dataclass(frozen=True, kw_only=True)
class CellPlaced:
    """A lost cell has a new owner that is up and owns nothing else."""

    generation: int
    cell: str
    worker: str


@dataclass(frozen=True, kw_only=True)
class Surveyed:
    """What holders and disk have, in answer to Survey ``number``."""

    generation: int
    number: int
    held: Held


@dataclass(frozen=True, kw_only=True)
class NoRoom:
    """Some lost cell finds no place; ``missing`` says what was asked for and what there is. The search goes on."""

    generation: int
    missing: str


@dataclass(frozen=True, kw_only=True)
class WaitOver:
    """The time that ``Wait`` gave is over."""

    generation: int


@dataclass(frozen=True, kw_only=True)
class HeldSaved:
    """What the holders had is now a checkpoint; ``done`` names it."""

    generation: int
    done: CellDone


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


Event = (
    Placed
    | PlacementFailed
    | CellReady
    | CellEnded
    | CellLost
    | CellFailed
    | CellStalled
    | CellBroke
    | CellDrained
    | CellPlaced
    | Surveyed
    | NoRoom
    | WaitOver
    | HeldSaved
    | StopAsked
    | DeadlinePassed
    | ControllerFailed
)


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
    """Break the groups of this generation on ``cells``, so that each can say where it stands; DeadlinePassed later."""

    generation: int
    cells: tuple[str, ...]
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Kill:
    """End the processes of ``cells``."""

    generation: int
    cells: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Replace:
    """Find a new owner for each of ``cells``; answered by CellPlaced for each, and NoRoom where it takes long.

    An owner that dies before its CellPlaced does not end the search.
    """

    generation: int
    cells: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Survey:
    """Ask the holders what they have of every cell; answered by Surveyed ``number``."""

    generation: int
    number: int


@dataclass(frozen=True, kw_only=True)
class Join:
    """After ``pause_s`` let all cells form the groups of this generation, and go on from ``restore``."""

    generation: int
    restore: Restore
    lost: tuple[str, ...]
    pause_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Wait:
    """Send WaitOver when ``cluster.wait_s`` from now is over; the time of an earlier Wait counts no more."""

    generation: int


@dataclass(frozen=True, kw_only=True)
class SaveHeld:
    """Write what is held of ``restore`` as a checkpoint, without the lost cells; answered by HeldSaved."""

    generation: int
    restore: Restore


Command = SetUp | Grant | AskStop | Abort | Kill | Replace | Survey | Join | Wait | SaveHeld
