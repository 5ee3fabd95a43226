"""The flat memory of one cell: its parameters in one buffer, and as many gradient buffers as open folds need."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from rayformer.optim.plan import BucketPlan
from rayformer.optim.tree import Fold, Node


class FlatParameters:
    """Moves the parameters into one contiguous buffer; each becomes a view of its slot."""

    def __init__(self, parameters: Sequence[tuple[str, nn.Parameter]], plan: BucketPlan) -> None:
        first = parameters[0][1]
        self.plan = plan
        self.buffer = torch.zeros(plan.numel, dtype=first.dtype, device=first.device)
        by_name = dict(parameters)
        for slot in plan.slots:
            parameter = by_name[slot.name]
            view = self.buffer[slot.start : slot.stop].view(parameter.shape)
            view.copy_(parameter.detach())
            parameter.data = view


class GradBuffers:
    """Accumulates the gradients of one step, one virtual rank after the other, and folds them along the fixed tree.

    ``leaves`` are the virtual ranks that this cell runs, of ``num_leaves``. Autograd adds straight into the open
    buffer, of which every parameter's ``.grad`` is a view; ``close_leaf`` ends a virtual rank. n virtual ranks that
    make one subtree need at most floor(log2 n) + 1 buffers at a time, and every further subtree one more.
    """

    def __init__(
        self, parameters: Sequence[tuple[str, nn.Parameter]], plan: BucketPlan, *, leaves: range, num_leaves: int
    ) -> None:
        self._by_name = dict(parameters)
        self._plan, self._leaves, self._num_leaves = plan, leaves, num_leaves
        self._device = parameters[0][1].device
        self._free: list[torch.Tensor] = []
        self._open: torch.Tensor | None = None
        self._fold: Fold[torch.Tensor] = Fold(num_leaves, self._add)
        self.num_buffers = 0

    def start_step(self) -> None:
        """Forget the last step's gradients and open the first virtual rank."""
        self._free += [buffer for _, buffer in self._fold.parts]
        if self._open is not None:
            self._free.append(self._open)
        self._fold = Fold(self._num_leaves, self._add)
        self._open_leaf()

    def close_leaf(self, leaf: int) -> None:
        """The microbatches of virtual rank ``leaf`` are all accumulated: fold it, and open a buffer for the next."""
        assert self._open is not None, "no virtual rank is open"
        closed, self._open = self._open, None
        self._fold.push(Node(leaf, leaf + 1), closed)
        if leaf + 1 < self._leaves.stop:
            self._open_leaf()

    @property
    def parts(self) -> list[tuple[Node, torch.Tensor]]:
        """The folded subtrees, in ascending order, each a whole flat buffer."""
        return self._fold.parts

    def _add(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        self._free.append(right)
        return left.add_(right)

    def _open_leaf(self) -> None:
        if self._free:
            self._open = self._free.pop().zero_()
        else:
            self.num_buffers += 1
            self._open = torch.zeros(self._plan.numel, dtype=torch.float32, device=self._device)
        for slot in self._plan.slots:
            parameter = self._by_name[slot.name]
            parameter.grad = self._open[slot.start : slot.stop].view(parameter.shape)
