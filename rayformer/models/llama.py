"""A decoder-only transformer in the manner of Llama: RMSNorm before each block, SwiGLU, rotary positions, untied.

Source: Touvron et al., https://arxiv.org/abs/2302.13971
"""

from __future__ import annotations

from functools import partial

import torch
from torch import nn

from rayformer.config.model import ModelConfig
from rayformer.groups import Group
from rayformer.models.block import Block, TokenLoss
from rayformer.nn.attention import Attention
from rayformer.nn.context import Context
from rayformer.nn.embedding import VocabParallelEmbedding
from rayformer.nn.linear import ColumnParallelLinear
from rayformer.nn.mlp import SwiGLU
from rayformer.nn.norm import RMSNorm
from rayformer.ops.cross_entropy import vocab_parallel_cross_entropy
from rayformer.shards import share_start


def build(section: ModelConfig) -> tuple[list[Block], TokenLoss]:
    """The blocks, in order, and the loss."""
    layers = [
        Block(name=f"layers.{i}", kind="layer", build=partial(Layer, section, f"layers.{i}"))
        for i in range(section.layers)
    ]
    first = Block(name="embedding", kind="input", build=partial(_embedding, section))
    last = Block(name="output", kind="output", build=partial(Head, section))
    return [first, *layers, last], partial(_token_loss, section.vocab)


class Layer(nn.Module):
    """Attention and feed-forward, each behind a norm and added to the residual stream x [B, S, H]."""

    def __init__(self, section: ModelConfig, name: str, ctx: Context) -> None:
        super().__init__()
        out_std = 0.02 / (2 * section.layers) ** 0.5
        self.attention_norm = RMSNorm(section.hidden, name=f"{name}.attention_norm", eps=section.norm_eps, ctx=ctx)
        self.attention = Attention(
            section.hidden,
            heads=section.heads,
            kv_heads=section.num_kv_heads,
            rope_theta=section.rope_theta,
            name=f"{name}.attention",
            ctx=ctx,
            out_std=out_std,
        )
        self.mlp_norm = RMSNorm(section.hidden, name=f"{name}.mlp_norm", eps=section.norm_eps, ctx=ctx)
        self.mlp = SwiGLU(section.hidden, section.ffn, name=f"{name}.mlp", ctx=ctx, out_std=out_std)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class Head(nn.Module):
    """The last norm and the own part of the logits [B, S, V/t]."""

    def __init__(self, section: ModelConfig, ctx: Context) -> None:
        super().__init__()
        self.norm = RMSNorm(section.hidden, name="output.norm", eps=section.norm_eps, ctx=ctx)
        self.linear = ColumnParallelLinear(section.hidden, section.vocab, name="output.linear", ctx=ctx)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(self.norm(x))


def _embedding(section: ModelConfig, ctx: Context) -> nn.Module:
    return VocabParallelEmbedding(section.vocab, section.hidden, name="embedding", ctx=ctx)


def _token_loss(vocab: int, logits: torch.Tensor, labels: torch.Tensor, tp: Group) -> torch.Tensor:
    return vocab_parallel_cross_entropy(logits, labels, share_start(vocab, tp.size, tp.rank), tp)
