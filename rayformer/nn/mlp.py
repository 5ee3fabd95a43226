"""The feed-forward block, gated or not."""

from __future__ import annotations

import torch
from torch import nn

from rayformer.config.model import Activation
from rayformer.nn.context import Context
from rayformer.nn.linear import ColumnParallelLinear, RowParallelLinear
from rayformer.ops.activation import ACTIVATIONS, GATED


class FeedForward(nn.Module):
    """``down(activation(up(x)))``; of a gated one, the gate and the up part are the two halves of one matrix.

    Kinds for recomputation: ``act``.
    """

    def __init__(
        self,
        hidden: int,
        ffn: int,
        *,
        activation: Activation,
        name: str,
        ctx: Context,
        out_std: float,
        bias: bool = False,
    ) -> None:
        super().__init__()
        if activation in GATED:
            self.up = ColumnParallelLinear(hidden, 2 * ffn, name=f"{name}.gate_up", ctx=ctx, parts=2, bias=bias)
        else:
            self.up = ColumnParallelLinear(hidden, ffn, name=f"{name}.up", ctx=ctx, bias=bias)
        self.down = RowParallelLinear(ffn, hidden, name=f"{name}.down", ctx=ctx, std=out_std, bias=bias)
        self._activation = ctx.selective("act", ACTIVATIONS[activation])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self._activation(self.up(x)))
