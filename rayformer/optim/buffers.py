"""The flat memory of one cell: its parameters in one buffer, and as many gradient buffers as open folds need."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from rayformer.optim.plan import Bucket, BucketPlan, Slot
from rayformer.optim.tree import Fold, Node


class FlatParameters:
    """Moves the parameters, made in float32, into one contiguous buffer of ``dtype``; each becomes a view of its slot.

    A borrowed parameter becomes a view of its owner's slot where the stage holds both. ``take_initial`` gives the
    float32 values once; after that they are gone.
    """

    def __init__(
        self,
        parameters: Sequence[tuple[str, nn.Parameter]],
        plan: BucketPlan,
        *,
        borrowed: Sequence[tuple[str, nn.Parameter]] = (),
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.plan = plan
        places = {slot.name: slot for slot in plan.slots}
        numel = plan.owned[-1].stop if plan.owned else 0
        for bucket, (name, _) in zip(plan.borrowed, borrowed):
            if name not in places:
                places[name] = bucket.slots[0]
                numel = bucket.stop
        device = next((p.device for _, p in (*parameters, *borrowed)), torch.device("cpu"))
        full = torch.zeros(numel, dtype=torch.float32, device=device)
        for name, parameter in (*parameters, *borrowed):
            slot = places[name]
            full[slot.start : slot.stop].view(parameter.shape).copy_(parameter.detach())
        self.buffer = full.to(dtype)  # the same memory in float32
        for name, parameter in (*parameters, *borrowed):
            slot = places[name]
            parameter.data = self.buffer[slot.start : slot.stop].view(parameter.shape)
            parameter.grad_dtype = torch.float32
        self._initial: torch.Tensor | None = full

    def take_initial(self, ranges: Sequence[tuple[int, int]]) -> list[torch.Tensor]:
        """The float32 values of ``ranges``: in float32 views of the parameters, else copies."""
        assert self._initial is not None, "the initial values are gone"
        full, self._initial = self._initial, None
        if full is self.buffer:
            return [full[start:stop] for start, stop in ranges]
        return [full[start:stop].clone() for start, stop in ranges]


class GradBuffers:
    """Accumulates the gradients of one step, one virtual rank after the other, and folds them along the fixed tree.

    ``leaves`` are the virtual ranks that this cell runs, of ``num_leaves``. The chunks of a rank go through them each
    for itself. Autograd adds straight into the open buffer of a chunk, in float32, of which every parameter's ``.grad``
    is a view; ``close_leaf`` ends a virtual rank, and ``close_bucket`` the last one, bucket by bucket. n virtual ranks
    that make one subtree need at most floor(log2 n) + 1 buffers at a time, and every further subtree one more.
    """

    def __init__(
        self,
        parameters: Sequence[tuple[str, nn.Parameter]],
        plan: BucketPlan,
        *,
        leaves: range,
        num_leaves: int,
        borrowed: Sequence[tuple[str, nn.Parameter]] = (),
    ) -> None:
        by_name = dict(parameters)
        views = [(bucket, slot, by_name[slot.name]) for bucket in plan.owned for slot in bucket.slots]
        views += [(bucket, bucket.slots[0], parameter) for bucket, (_, parameter) in zip(plan.borrowed, borrowed)]
        device = next((p.device for *_, p in views), torch.device("cpu"))
        self._chunks = {
            chunk: _ChunkBuffers(
                [view for view in views if view[0].chunk == chunk], leaves=leaves, num_leaves=num_leaves, device=device
            )
            for chunk in sorted({bucket.chunk for bucket in plan.buckets})
        }

    @property
    def num_buffers(self) -> int:
        """The most buffers that a chunk has needed."""
        return max((chunk.num_buffers for chunk in self._chunks.values()), default=0)

    def start_step(self) -> None:
        """Forget the last step's gradients and open the first virtual rank."""
        for chunk in self._chunks.values():
            chunk.start_step()

    def close_leaf(self, leaf: int, chunk: int = 0) -> None:
        """The microbatches of virtual rank ``leaf``, not the last, are all accumulated: fold it and open the next."""
        if chunk in self._chunks:  # else it has no parameters
            self._chunks[chunk].close_leaf(leaf)

    def close_bucket(self, bucket: Bucket) -> list[tuple[Node, torch.Tensor]]:
        """The last virtual rank is complete in ``bucket``: the folded subtrees, ascending, each [bucket]."""
        return self._chunks[bucket.chunk].close_bucket(bucket)


class _ChunkBuffers:
    """The gradients of one chunk: its buckets one after the other, in each of as many buffers as open folds need."""

    def __init__(
        self,
        views: Sequence[tuple[Bucket, Slot, nn.Parameter]],
        *,
        leaves: range,
        num_leaves: int,
        device: torch.device,
    ) -> None:
        self._starts: dict[int, int] = {}  # of each bucket in a buffer, by its start in the flat memory
        numel = 0
        for bucket, *_ in views:
            if bucket.start not in self._starts:
                self._starts[bucket.start] = numel
                numel += bucket.stop - bucket.start
        self._views = [(self._starts[bucket.start] + slot.start - bucket.start, p) for bucket, slot, p in views]
        self._numel, self._leaves, self._num_leaves, self._device = numel, leaves, num_leaves, device
        self._free: list[torch.Tensor] = []
        self._open: torch.Tensor | None = None
        self._viewed: torch.Tensor | None = None
        self._fold: Fold[torch.Tensor] = Fold(num_leaves, self._add)
        self.num_buffers = 0

    def start_step(self) -> None:
        self._free += [buffer for _, buffer in self._fold.parts]
        if self._open is not None:
            self._free.append(self._open)
        self._fold = Fold(self._num_leaves, self._add)
        self._open_leaf()

    def close_leaf(self, leaf: int) -> None:
        assert self._open is not None, "no virtual rank is open"
        closed, self._open = self._open, None
        self._fold.push(Node(leaf, leaf + 1), closed)
        self._open_leaf()

    def close_bucket(self, bucket: Bucket) -> list[tuple[Node, torch.Tensor]]:
        assert self._open is not None, "no virtual rank is open"
        start = self._starts[bucket.start]
        fold: Fold[torch.Tensor] = Fold(self._num_leaves, lambda left, right: left.add_(right))
        last = self._leaves.stop - 1
        for node, buffer in (*self._fold.parts, (Node(last, last + 1), self._open)):
            fold.push(node, buffer[start : start + bucket.stop - bucket.start])
        return fold.parts

    def _add(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        self._free.append(right)
        return left.add_(right)

    def _open_leaf(self) -> None:
        if self._free:
            self._open = self._free.pop().zero_()
        else:
            self.num_buffers += 1
            self._open = torch.zeros(self._numel, dtype=torch.float32, device=self._device)
        if self._open is not self._viewed:
            self._viewed = self._open
            for start, parameter in self._views:
                parameter.grad = self._open[start : start + parameter.numel()].view(parameter.shape)
