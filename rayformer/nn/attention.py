"""Causal self-attention with grouped queries, its heads divided over tp.

The fused projection holds, kv group after kv group, the rows [queries of the group | key | value]; tp divides whole
groups. Shapes: B batch, S sequence, H hidden, G own kv groups, Q queries per group, D head width.
"""

from __future__ import annotations

import torch
from torch import nn

from rayformer.config.model import AttentionImpl
from rayformer.nn.context import Context
from rayformer.nn.linear import ColumnParallelLinear, RowParallelLinear
from rayformer.nn.norm import RMSNorm
from rayformer.ops.attention import attention_kernel, explicit
from rayformer.ops.compiler import not_compiled
from rayformer.ops.dropout import keep_masks
from rayformer.ops.rotary import Rotary


class Attention(nn.Module):
    """Self-attention over x [B, S, H], or over the own part of the sequence under sequence parallelism.

    ``rotary`` turns queries and keys, None leaves them; ``qk_norm_eps`` normalises each head of both first. ``dropout``
    is that of the probabilities and takes the explicit kernel. Kinds for recomputation: ``core_attn``.
    """

    def __init__(
        self,
        hidden: int,
        *,
        heads: int,
        kv_heads: int,
        head_dim: int,
        name: str,
        ctx: Context,
        out_std: float,
        rotary: Rotary | None,
        impl: AttentionImpl = "auto",
        qkv_bias: bool = False,
        bias: bool = False,
        qk_norm_eps: float | None = None,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.group_queries = heads // kv_heads
        self._rotary = rotary
        group_rows = (self.group_queries + 2) * head_dim
        self.qkv = ColumnParallelLinear(
            hidden, kv_heads * group_rows, name=f"{name}.qkv", ctx=ctx, unit=group_rows, bias=qkv_bias
        )
        self.q_norm = self.k_norm = None
        if qk_norm_eps is not None:
            self.q_norm, self.k_norm = (
                RMSNorm(head_dim, name=f"{name}.{which}_norm", eps=qk_norm_eps, ctx=ctx, partial=True)
                for which in ("q", "k")
            )
        self.out = RowParallelLinear(
            heads * head_dim,
            hidden,
            name=f"{name}.out",
            ctx=ctx,
            std=out_std,
            bias=bias,
            unit=self.group_queries * head_dim,
        )
        if dropout:
            kernel = _DroppingCore(dropout, name=name, ctx=ctx, heads=heads)
        else:
            kernel = attention_kernel(impl, device=ctx.device, dtype=ctx.dtype, head_dim=head_dim)
        self._core = ctx.selective("core_attn", kernel)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = self.qkv(x)
        batch, seq, _ = rows.shape
        # B G Q+2 S D: the memory stays as it is, and so does that of everything elementwise made of it
        rows = rows.view(batch, seq, -1, self.group_queries + 2, self.head_dim).permute(0, 2, 3, 1, 4)
        qk, v = rows.split([self.group_queries + 1, 1], dim=2)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = qk.split([self.group_queries, 1], dim=2)
            qk = torch.cat([self.q_norm(q), self.k_norm(k)], dim=2)
        if self._rotary is not None:
            qk = self._rotary.turn(qk)
        q, k = qk.split([self.group_queries, 1], dim=2)
        q = q.permute(0, 3, 1, 2, 4).flatten(2, 3).transpose(1, 2)  # B G*Q S D, heads next to each other in memory
        k, v = k.flatten(1, 2), v.flatten(1, 2)  # B G S D
        y = self._core(q, k, v)
        return self.out(y.transpose(1, 2).reshape(batch, seq, -1))


class _DroppingCore:
    """The explicit kernel with the dropout of its probabilities; masks are keyed by head."""

    def __init__(self, p: float, *, name: str, ctx: Context, heads: int) -> None:
        self._p, self._name, self._ctx = p, name, ctx
        own = heads // ctx.tp.size
        self._heads = range(ctx.tp.rank * own, (ctx.tp.rank + 1) * own)
        self._generator = torch.Generator(ctx.device)

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return not_compiled(self._attend, q, k, v)

    def _attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        moment, seq = self._ctx.moment, q.shape[2]
        if moment.step is None:
            return explicit(q, k, v)
        masks = [
            keep_masks(
                (seq, seq),
                self._p,
                moment=moment,
                site=f"{self._name}.{head}",
                device=q.device,
                generator=self._generator,
            )
            for head in self._heads
        ]
        return explicit(q, k, v, torch.stack(masks, dim=1), self._p)
