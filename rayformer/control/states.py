"""The states of a run. Each carries what is known in it; the last two are ends.

    Starting ---> Running ---> Finished
        |            |
        +------> Stopping ---> Failed

Repair adds Draining, Rebuilding, Restoring and Waiting between Running and itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

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
    members: Mapping[str, Member] = field(default_factory=dict)
    stop_asked: bool = False


@dataclass(frozen=True, kw_only=True)
class Running:
    """Every cell works through its grant; ``done`` have come to its end."""

    generation: int
    members: Mapping[str, Member]
    done: Mapping[str, CellDone] = field(default_factory=dict)
    stop_asked: bool = False


@dataclass(frozen=True, kw_only=True)
class Stopping:
    """The run can't go on: ``pending`` cells have not ended yet, and ``then`` is where it goes when they have."""

    generation: int
    pending: frozenset[str]
    then: Failed


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


State = Starting | Running | Stopping | Finished | Failed
END_STATES = (Finished, Failed)
