"""Linear maps over tp, whose messages hide behind their products.

Shapes: B batch, S sequence, I inputs, O own outputs; x [B, S, I], weight [O, I], y [B, S, O].
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

from rayformer.groups import Group
from rayformer.ops.compiler import not_compiled
from rayformer.ops.later import Grads, is_left, now_or_later
from rayformer.ops.tensor import gather_rows, scatter_rows


def column_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, tp: Group, *, sequence_parallel: bool
) -> torch.Tensor:
    """``x W^T + b`` with the own outputs; every member of ``tp`` holds other ones.

    ``x`` is the same on all members or, sequence-parallel, everybody's part [B, S/t, I] of the sequence, which is
    all that is kept: backward gathers the whole again. Backward sums the input's gradient over the group while the
    product for the weight runs. Source: Korthikanti et al., https://arxiv.org/abs/2205.05198
    """
    y: torch.Tensor = not_compiled(_ColumnLinear.apply, x, weight, bias, tp, sequence_parallel)
    return y


class _ColumnLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, tp: Group, sequence_parallel: bool
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight, bias)
        ctx.tp, ctx.sequence_parallel = tp, sequence_parallel
        return functional.linear(gather_rows(x, tp)() if sequence_parallel else x, weight, bias)

    @staticmethod
    def backward(
        ctx: Any, grad: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None, None, None]:
        x, weight, bias = ctx.saved_tensors
        tp: Group = ctx.tp
        started = None if is_left((weight, bias)) else _whole(x, tp, ctx.sequence_parallel)
        d_x = grad @ weight
        if ctx.sequence_parallel:
            arrived = scatter_rows(d_x, tp)
        else:
            ticket = tp.all_reduce(d_x)
            arrived = lambda: (ticket.wait(), d_x)[1]  # noqa: E731

        def weight_grads() -> Grads:
            whole = started or _whole(x, tp, ctx.sequence_parallel)
            rows = grad.flatten(0, -2)
            return rows.t() @ whole().flatten(0, -2), None if bias is None else rows.sum(0)

        d_weight, d_bias = now_or_later((weight, bias), weight_grads)
        return arrived(), d_weight, d_bias, None, None


def _whole(x: torch.Tensor, tp: Group, sequence_parallel: bool) -> Callable[[], torch.Tensor]:
    """Start to bring the whole sequence here, if it is not; the call gives it."""
    return gather_rows(x, tp) if sequence_parallel else lambda: x
