"""Linear maps whose weight gradient goes straight into the parameter's ``.grad``, and whose messages hide behind it.

Shapes: B batch, S sequence, I inputs, O outputs; x [B, S, I], weight [O, I], y [B, S, O].

Autograd would make the weight's gradient and then add it to ``.grad``: one pass over memory that the matrix product can
do itself. Where ``.grad`` is None the gradient is returned as usual.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from rayformer.groups import Group, single
from rayformer.ops.tensor import gather_rows, scatter_rows

_ALONE = single()


@torch.compiler.disable
def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """``x W^T + b``."""
    y: torch.Tensor = _Linear.apply(x, weight, bias, _ALONE, False)
    return y


@torch.compiler.disable
def column_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, tp: Group, *, sequence_parallel: bool
) -> torch.Tensor:
    """``x W^T + b`` with the own outputs; every member of ``tp`` holds other ones.

    ``x`` is the same on all members or, sequence-parallel, everybody's part [B, S/t, I] of the sequence, which is
    all that is kept: backward gathers the whole again. Backward sums the input's gradient over the group while the
    product for the weight runs. Source: Korthikanti et al., https://arxiv.org/abs/2205.05198
    """
    y: torch.Tensor = _Linear.apply(x, weight, bias, tp, sequence_parallel)
    return y


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, tp: Group, sequence_parallel: bool
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.tp, ctx.sequence_parallel, ctx.has_bias = tp, sequence_parallel, bias is not None
        return functional.linear(gather_rows(x, tp)() if sequence_parallel else x, weight, bias)

    @staticmethod
    def backward(
        ctx: Any, grad: torch.Tensor
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None, None, None]:
        x, weight = ctx.saved_tensors
        tp: Group = ctx.tp
        whole = gather_rows(x, tp) if ctx.sequence_parallel else lambda: x
        d_x = None
        if ctx.needs_input_grad[0]:
            d_whole = grad @ weight
            if ctx.sequence_parallel:
                arrived = scatter_rows(d_whole, tp)
            else:
                ticket = tp.all_reduce(d_whole)
                arrived = lambda: (ticket.wait(), d_whole)[1]  # noqa: E731
        d_weight = _weight_grad(weight, whole(), grad) if ctx.needs_input_grad[1] else None
        d_bias = grad.flatten(0, -2).sum(0) if ctx.has_bias else None
        if ctx.needs_input_grad[0]:
            d_x = arrived()
        return d_x, d_weight, d_bias, None, None


def _weight_grad(weight: torch.Tensor, x: torch.Tensor, grad: torch.Tensor) -> torch.Tensor | None:
    """Add ``grad^T x`` to the weight's ``.grad``, in its dtype; return it instead if there is none."""
    rows, columns = grad.flatten(0, -2).t(), x.flatten(0, -2)  # [O, B*S], [B*S, I]
    if weight.grad is None:
        return rows @ columns
    if weight.grad.dtype == columns.dtype:
        weight.grad.addmm_(rows, columns)
    else:
        weight.grad.add_(rows @ columns)
    return None
