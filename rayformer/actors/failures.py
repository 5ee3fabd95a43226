"""What an exception from an actor call means: a process or its node is gone, or its program raised."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from ray.exceptions import RayActorError, RayTaskError

from rayformer.actors.crew import Hand, live_nodes
from rayformer.errors import RayformerError, SnapshotError
from rayformer.events import CellError


def is_death(error: Exception) -> bool:
    """Whether the process is gone. An error that it raised may be of the same type: of another actor's death."""
    return isinstance(error, RayActorError) and not isinstance(error, RayTaskError)


def cell_error(cell: str, hand: Hand, error: Exception) -> CellError:
    """What an exception from an actor call means for its cell."""
    if is_death(error):
        assert isinstance(error, RayActorError)
        is_node = error.preempted or (hand.node != "" and hand.node not in live_nodes())
        kind: Literal["node", "died"] = "node" if is_node else "died"
        return CellError(cell=cell, worker=hand.name, kind=kind, message=death_of(error))
    cause = getattr(error, "cause", None) or error
    final = isinstance(cause, RayformerError) and not isinstance(cause, SnapshotError)  # it would only come again
    return CellError(cell=cell, worker=hand.name, kind="raised", message=in_words(cause), final=final)


def in_words(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def death_of(error: RayActorError) -> str:
    """Ray's report of a death, without its advice."""
    text = str(error)
    lines: Iterable[str] = (line.strip() for line in text.splitlines())
    told = [line for line in lines if "exit" in line.lower() or "died" in line.lower()]
    reason = (told[-1] if told else text).rpartition("Worker exit detail: ")[2]
    for advice in (" Some common causes", " If the process was killed by the kernel OOM killer"):
        reason = reason.partition(advice)[0]
    return f"its process died: {reason}"
