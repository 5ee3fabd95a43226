"""Where a gradient that is not finite came from: which cells had it, in which parameters, before the reduction."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

import torch

from rayformer.groups import Group
from rayformer.optim.plan import Bucket

MOST_NAMED = 100  # where everything is NaN, every cell has it in every parameter


class Origins:
    """The sum of each parameter's own gradient in one step, looked at only when something is wrong.

    A sum is not finite if one of its elements is not, and takes an eighth of the time of the largest element.
    """

    def __init__(self) -> None:
        self._sums: list[tuple[str, torch.Tensor]] = []

    def start_step(self) -> None:
        self._sums.clear()

    def watch(self, bucket: Bucket, parts: Sequence[torch.Tensor]) -> None:
        """Note the gradients in ``parts`` [bucket], one for each subtree that this cell folded."""
        for part in parts:
            for slot in bucket.slots:
                self._sums.append((slot.name, part[slot.start - bucket.start : slot.stop - bucket.start].sum()))

    def find(self, cell: str, names: Collection[str], world: Group) -> tuple[str, ...]:
        """``CELL PARAMETER`` for every cell that had a gradient of ``names`` not finite; all cells must call it."""
        bad = {name: None for name, total in self._sums if name in names and not math.isfinite(float(total))}
        found = [f"{at} {name}" for at, theirs in world.gather_values([cell, list(bad)]) for name in theirs]
        return tuple(found[:MOST_NAMED]) or tuple(names)  # finite parts may still add up to what is not
