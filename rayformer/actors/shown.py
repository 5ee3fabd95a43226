"""What the controller tells a driver, to be shown to people; the last is RunEnded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rayformer.control.states import Member
from rayformer.events import CellDone, CellError, CheckpointSaved, StepReport


@dataclass(frozen=True, kw_only=True)
class RunEnded:
    """The end of a run: either what the first cell said, or the errors."""

    done: CellDone | None
    errors: tuple[CellError, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Membership:
    """Who owns which cell from now on."""

    generation: int
    members: dict[str, Member]


@dataclass(frozen=True, kw_only=True)
class Recovered:
    """One repair is over: the values of the journal's line."""

    values: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Noted:
    """Something that people should hear of."""

    text: str


Shown = StepReport | CheckpointSaved | Membership | Recovered | Noted | RunEnded
