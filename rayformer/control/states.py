"""The states of a run. Each carries what is known in it; the last two are ends.

    Starting --> Running --> Finished
        |         |   ^
        v         v   |
        Draining  |   Restoring --> Draining, if one more is lost
          |  ^----+     ^
          v             |
        Rebuilding -----+
          |   ^
          v   |
        Waiting --> Saving --> Finished

A generation is one membership. It ends with Draining, and Rebuilding prepares the next one. Failed is where errors lead
that must not or can't be repaired, from any of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from rayformer.control.policy import Budget
from rayformer.control.restore import Held, Restore
from rayformer.events import CellDone, CellError


@dataclass(frozen=True, kw_only=True)
class Member:
    """Who owns a cell: the actor, its process and node, and where its parameters lie in memory."""

    worker: str
    pid: int
    node: str
    param_addr: int


@dataclass(frozen=True, kw_only=True)
class Starting:
    """Actors are placed, groups formed and state loaded; ``members`` have come so far, of ``cells``."""

    generation: int
    cells: tuple[str, ...]
    budget: Budget
    members: Mapping[str, Member] = field(default_factory=dict)
    stop_asked: bool = False


@dataclass(frozen=True, kw_only=True)
class Running:
    """Every cell works through its grant; ``done`` have come to its end."""

    generation: int
    members: Mapping[str, Member]
    budget: Budget
    done: Mapping[str, CellDone] = field(default_factory=dict)
    stop_asked: bool = False


@dataclass(frozen=True, kw_only=True)
class Draining:
    """Something happened to cells of this generation: ``lost`` are gone, ``broke`` have lost a peer.

    ``pending`` are those that have not stopped yet. ``standing`` is after which step the state of each stopped cell is
    whole in its memory, None where it is not.
    """

    generation: int
    cells: tuple[str, ...]
    budget: Budget
    pending: frozenset[str]
    lost: Mapping[str, CellError] = field(default_factory=dict)
    broke: Mapping[str, CellError] = field(default_factory=dict)
    standing: Mapping[str, int | None] = field(default_factory=dict)
    stop_asked: bool = False


@dataclass(frozen=True, kw_only=True)
class Rebuilding:
    """Every survivor stands still; the ``lost`` cells get new owners for the next generation, which is this one.

    ``missing`` are those without one so far. ``held`` is what there is to restore from, None until survey number
    ``survey`` is answered. ``broke`` are the errors of cells that only lost a peer. ``num_again`` counts new owners
    that were lost themselves.
    """

    generation: int
    cells: tuple[str, ...]
    budget: Budget
    lost: Mapping[str, CellError]
    broke: Mapping[str, CellError]
    missing: frozenset[str]
    standing: Mapping[str, int | None]
    survey: int = 1
    held: Held | None = None
    num_again: int = 0
    stop_asked: bool = False


@dataclass(frozen=True, kw_only=True)
class Waiting:
    """There is nothing to repair with: ``why`` says what is missing. Otherwise as Rebuilding, which it goes back to.

    When it ``is_over`` only the answer to the last survey is still awaited, to save what is held.
    """

    rebuilding: Rebuilding
    why: str
    is_over: bool = False

    @property
    def generation(self) -> int:
        return self.rebuilding.generation


@dataclass(frozen=True, kw_only=True)
class Restoring:
    """All cells form the groups of this generation and take their state from where ``restore`` says."""

    generation: int
    cells: tuple[str, ...]
    budget: Budget
    lost: Mapping[str, CellError]
    restore: Restore
    members: Mapping[str, Member] = field(default_factory=dict)
    stop_asked: bool = False


@dataclass(frozen=True, kw_only=True)
class Saving:
    """The cells that are left stand still while what the holders hold is written as a checkpoint, to end with it."""

    generation: int
    restore: Restore
    errors: tuple[CellError, ...]


@dataclass(frozen=True, kw_only=True)
class Finished:
    """Every cell came to the end of its grant; ``done`` is what the first one said."""

    generation: int
    done: CellDone


@dataclass(frozen=True, kw_only=True)
class Failed:
    """The run ended with errors, in the order in which they arrived."""

    generation: int
    errors: tuple[CellError, ...]


State = Starting | Running | Draining | Rebuilding | Waiting | Restoring | Saving | Finished | Failed
END_STATES = (Finished, Failed)
