"""Causal self-attention with grouped queries and rotary positions, its heads divided over tp.

The fused projection holds, kv group after kv group, the rows [queries of the group | key | value]; tp divides whole
groups. Shapes: B batch, S sequence, H hidden, G own kv groups, Q queries per group, D head width.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from rayformer.nn.context import Context
from rayformer.nn.linear import ColumnParallelLinear, RowParallelLinear
from rayformer.ops.rotary import rotary_table, rotate


class Attention(nn.Module):
    """Self-attention over x [B, S, H]."""

    def __init__(
        self,
        hidden: int,
        *,
        heads: int,
        kv_heads: int,
        rope_theta: float,
        name: str,
        ctx: Context,
        out_std: float,
    ) -> None:
        super().__init__()
        self.head_dim = hidden // heads
        self.group_queries = heads // kv_heads
        self.rope_theta = rope_theta
        group_rows = (self.group_queries + 2) * self.head_dim
        self.qkv = ColumnParallelLinear(hidden, kv_heads * group_rows, name=f"{name}.qkv", ctx=ctx, unit=group_rows)
        self.out = RowParallelLinear(
            hidden, hidden, name=f"{name}.out", ctx=ctx, std=out_std, unit=self.group_queries * self.head_dim
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, seq, _ = x.shape
        rows = self.qkv(x).view(batch, seq, -1, self.group_queries + 2, self.head_dim)  # B S G Q+2 D
        q, k, v = rows.split([self.group_queries, 1, 1], dim=3)
        cos, sin = rotary_table(torch.arange(seq, device=x.device), self.head_dim, self.rope_theta)
        q = rotate(q.flatten(2, 3).transpose(1, 2), cos, sin)  # B G*Q S D
        k = rotate(k.flatten(2, 3).transpose(1, 2), cos, sin)  # B G S D
        v = v.flatten(2, 3).transpose(1, 2)
        k, v = (t.repeat_interleave(self.group_queries, dim=1) for t in (k, v))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, seq, -1))
