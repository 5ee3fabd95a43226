"""What a worker is told: which cell it owns in which generation, and where to find everything."""

from __future__ import annotations

from dataclasses import dataclass, field

from ray.actor import ActorHandle

from rayformer.cell.plan import RunPlan
from rayformer.ckpt.storage import Folder
from rayformer.control.restore import Source
from rayformer.events import StepReport


@dataclass(frozen=True, kw_only=True)
class Assignment:
    """One cell of one generation. The store's ``store_host:store_port`` is where the cells of it meet.

    ``accelerators`` are those of the node that the cell computes on, as CUDA_VISIBLE_DEVICES has them.

    ``holder`` keeps the memory of the worker's node; what it has ``is_copied`` by another one. ``step`` and ``source``
    are what to go on from; ``folder`` is the checkpoint if that is the source, None for the initial state, and
    ``copies`` the holder if it is a second one. ``goes_on`` is false in the first generation of an attempt.
    """

    plan: RunPlan
    generation: int
    rank: int
    device: str
    store_host: str
    store_port: int
    loopback: bool
    accelerators: str = ""
    holder: ActorHandle | None = None
    is_copied: bool = False
    step: int = 0
    source: Source = "checkpoint"
    folder: Folder | None = None
    copies: ActorHandle | None = None
    goes_on: bool = False


@dataclass(frozen=True, kw_only=True)
class Joined:
    """A cell is ready: where its parameters lie, and what its restoring took.

    ``moved_bytes`` are those of masters and moments taken from memory, ``disk_bytes`` from files, ``gather_bytes`` of
    parameters that it sent to the other replicas. ``pinned`` is the step that its slots keep for a checkpoint.
    """

    worker: str
    pid: int
    node: str
    param_addr: int
    moved_bytes: int = 0
    disk_bytes: int = 0
    gather_bytes: int = 0
    pinned: int | None = None
    seconds: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Stood:
    """A cell stands still: after which step its state is whole, None where it is not, and what it had not told yet."""

    step: int | None
    untold: tuple[StepReport, ...] = ()
