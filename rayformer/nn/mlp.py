"""The gated feed-forward block. Source: Shazeer, https://arxiv.org/abs/2002.05202"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from rayformer.nn.context import Context
from rayformer.nn.linear import ColumnParallelLinear, RowParallelLinear


class SwiGLU(nn.Module):
    """``down(silu(gate(x)) * up(x))``; gate and up are the two halves of one matrix."""

    def __init__(self, hidden: int, ffn: int, *, name: str, ctx: Context, out_std: float) -> None:
        super().__init__()
        self.gate_up = ColumnParallelLinear(hidden, 2 * ffn, name=f"{name}.gate_up", ctx=ctx, parts=2)
        self.down = RowParallelLinear(ffn, hidden, name=f"{name}.down", ctx=ctx, std=out_std)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(functional.silu(gate) * up)
