"""A parameter that the first and the last pipeline stage both compute with: tied embeddings.

The first stage owns it, state and all, and the last borrows it. Each accumulates the gradients of its own use. Once
reduced over dp, the borrowed shard goes to the owner, which adds it to its own; the updated shard comes back. Where one
rank holds both stages the same two sums are added, in the same order.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rayformer.groups import Group
from rayformer.optim.plan import BucketPlan

_GRADIENT, _PARAMETER = 2, 3  # tags, beside those of stages.channel


class TiedParameters:
    """The exchange between owner and borrower, which are ranks 0 and ``borrower`` of ``pp``.

    ``tied`` names the tied parameters that this rank owns.
    """

    def __init__(self, plan: BucketPlan, *, tied: Sequence[str], pp: Group, borrower: int) -> None:
        self._pp, self._borrower = pp, borrower
        index = {slot.name: i for i, bucket in enumerate(plan.buckets) for slot in bucket.slots if not bucket.borrowed}
        self._owned = [index[name] for name in tied]
        self._borrowed = [i for i, bucket in enumerate(plan.buckets) if bucket.borrowed]

    def add_gradients(self, shards: Sequence[torch.Tensor]) -> None:
        """Add the borrowed uses' reduced ``shards``, of which there is one per bucket, to their owners', in place."""
        if self._borrower == 0:
            for owned, borrowed in zip(self._owned, self._borrowed):
                shards[owned].add_(shards[borrowed])
            return
        for borrowed in self._borrowed:
            self._pp.send(shards[borrowed], 0, _GRADIENT).wait()
        for owned in self._owned:
            part = torch.empty_like(shards[owned])
            self._pp.recv(part, self._borrower, _GRADIENT).wait()
            shards[owned].add_(part)

    def publish(self, parameters: Sequence[torch.Tensor]) -> None:
        """Give the owner's updated ``parameters``, one range per bucket, to the borrower, in place."""
        if self._borrower == 0:
            return
        for owned in self._owned:
            self._pp.send(parameters[owned], self._borrower, _PARAMETER).wait()
        for borrowed in self._borrowed:
            self._pp.recv(parameters[borrowed], 0, _PARAMETER).wait()
