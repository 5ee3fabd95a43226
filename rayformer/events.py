"""What happens in a run, as frozen records: everything that crosses a process is one of these."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Outcome = Literal["finished", "stopped"]


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """One executed step. Steps count from 1; ``loss`` is per valid token over the whole global batch.

    ``grad_norm`` is before clipping, ``lr`` the rate this update used, ``nonfinite`` the cells and parameters whose
    gradient was not finite, in which case the update was skipped. ``phase_s`` tells for the reporting cell where the
    step's seconds went, on the host's clock.
    """

    generation: int
    step: int
    loss: float
    grad_norm: float
    lr: float
    tokens: int
    valid_tokens: int
    consumed_samples: int
    step_s: float
    skipped: bool = False
    nonfinite: tuple[str, ...] = ()
    eval_loss: float | None = None
    state_hash: str | None = None
    flops_per_token: int | None = None
    phase_s: Mapping[str, float] | None = None


@dataclass(frozen=True, kw_only=True)
class Span:
    """An instruction or phase of a step: when it began, how long it took, and how long of that it waited.

    Microseconds; ``start_us`` since 1970, by the clock of the cell's machine.
    """

    name: str
    phase: str
    start_us: int
    length_us: int
    waited_us: int


@dataclass(frozen=True, kw_only=True)
class StepTrace:
    """What every cell did in one step, in order, by cell."""

    generation: int
    step: int
    spans: Mapping[str, Sequence[Span]]


@dataclass(frozen=True, kw_only=True)
class CheckpointSaved:
    """A checkpoint that exists from now on."""

    generation: int
    step: int
    path: str
    state_hash: str
    seconds: float


@dataclass(frozen=True, kw_only=True)
class SaveDue:
    """The state after ``step`` is pinned in the slots of the cell that says so, and is to be written from there.

    ``report`` is that of the step if it shall be told together with the state's hash.
    """

    generation: int
    step: int
    report: StepReport | None = None


@dataclass(frozen=True, kw_only=True)
class SaveWaits:
    """A checkpoint is due after ``step``, and training waits until the one before it is written."""

    generation: int
    step: int


@dataclass(frozen=True, kw_only=True)
class SaveSkipped:
    """A checkpoint was due after ``step``, and the one before it was still being written."""

    generation: int
    step: int


@dataclass(frozen=True, kw_only=True)
class SaveFailed:
    """A checkpoint could not be written; ``message`` says why. The ones before it are as they were."""

    generation: int
    step: int
    message: str


@dataclass(frozen=True, kw_only=True)
class CellDone:
    """A cell's program has ended as it should; ``sample`` is text that the trained model wrote, if it is finished."""

    generation: int
    outcome: Outcome
    step: int
    checkpoint: str | None = None
    sample: str | None = None


CellEvent = StepReport | StepTrace | CheckpointSaved | SaveDue | SaveWaits | SaveSkipped | SaveFailed | CellDone


@dataclass(frozen=True, kw_only=True)
class CellError:
    """Why a cell failed.

    ``kind`` ranks the causes: ``node`` (its node is gone), ``died`` (its process), ``raised`` (its own error),
    ``silent`` (it made no progress, or did not answer), ``collateral`` (it lost a peer). A ``final`` error would only
    come again: it is not repaired. ``damaged`` is the folder of the checkpoint that is not what was written, if that
    is the error.
    """

    cell: str
    worker: str
    kind: Literal["node", "died", "raised", "silent", "collateral"]
    message: str
    final: bool = False
    damaged: str = ""


@dataclass(frozen=True, kw_only=True)
class JournalEntry:
    """One line of journal.jsonl: an event or a command of the controller, written before it takes effect."""

    kind: str
    generation: int
    values: Mapping[str, Any] = field(default_factory=dict)


def plain(event: Any) -> dict[str, Any]:
    """An event as plain values."""
    return asdict(event)
