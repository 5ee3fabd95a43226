"""What may change between the run that wrote a checkpoint and the one that goes on from it."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from rayformer.errors import Problem

# Where something runs and how it is shown may change; what decides the curve may not.
_FREE_SECTIONS = {"layout", "schedule", "recovery", "checkpoint", "observe", "cluster", "faults", "recompute"}
_FREE_KEYS = {
    "optim.zero",
    "optim.overlap",
    "batch.micro",
    "run.stop_at",
    "run.name",
    "run.dir",
}  # a run may be moved, or branch off


def resume_problems(
    recorded: Mapping[str, Any], asked: Mapping[str, Any], *, allowed: Collection[str], checkpoint: str
) -> list[Problem]:
    """A problem for every value of the resolved job ``asked`` that differs from ``recorded`` and may not.

    ``allowed`` are keys that the user permits to change with ``--allow-change``. Virtual ranks may change in one way:
    a larger dp raises them.
    """
    old_ranks, new_ranks = (job["batch"]["virtual_ranks"] for job in (recorded, asked))
    raised = {"batch.virtual_ranks"} if asked["layout"]["dp"] == new_ranks > old_ranks else set()
    return [
        Problem(
            keys={key: new},
            rule=f"the run in {checkpoint} was started with {old!r}, and this may not change on resume",
            fix=f"set it back, or --allow-change {key}, or --fresh to start anew",
        )
        for key, old, new in _changes(recorded, asked, "")
        if key.split(".")[0] not in _FREE_SECTIONS and key not in {*_FREE_KEYS, *raised, *allowed}
    ]


def _changes(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any, Any]]:
    for name in {**old, **new}:
        key, a, b = prefix + name, old.get(name), new.get(name)
        if isinstance(a, Mapping) and isinstance(b, Mapping):
            yield from _changes(a, b, f"{key}.")
        elif a != b:
            yield key, a, b
