"""The decoder-only transformer of the GPT-2, Llama, Mistral and Qwen families: one model whose options make each.

Sources: Radford et al. 2019 (GPT-2); Touvron et al., https://arxiv.org/abs/2302.13971 (Llama); Jiang et al.,
https://arxiv.org/abs/2310.06825 (Mistral); Yang et al., https://arxiv.org/abs/2505.09388 (Qwen 3)
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
from rayformer.nn.dropout import make_dropout
from rayformer.nn.embedding import PositionEmbedding, VocabParallelEmbedding
from rayformer.nn.linear import ColumnParallelLinear
from rayformer.nn.mlp import FeedForward
from rayformer.nn.norm import NORMS
from rayformer.ops.cross_entropy import vocab_parallel_cross_entropy
from rayformer.ops.rotary import Rotary
from rayformer.shards import share_start


def build(section: ModelConfig) -> tuple[list[Block], TokenLoss]:
    """The blocks, in order, and the loss."""
    rotary = None
    if section.position == "rope":
        rotary = Rotary(section.width, theta=section.rope_theta, scaling=section.rope_scaling)
    layers = [
        Block(
            name=f"layers.{i}",
            kind="layer",
            build=partial(Layer, section, f"layers.{i}", rotary),
            cost=section.layer_matrices,
        )
        for i in range(section.layers)
    ]
    first = Block(name="embedding", kind="input", build=partial(Embedding, section), cost=0)
    last = Block(name="output", kind="output", build=partial(Head, section), cost=section.output_matrix)
    return [first, *layers, last], partial(_token_loss, section.vocab)


class Embedding(nn.Module):
    """Token ids [B, S] to the residual stream [B, S, H]."""

    def __init__(self, section: ModelConfig, ctx: Context) -> None:
        super().__init__()
        self.tokens = VocabParallelEmbedding(
            section.vocab, section.hidden, name="embedding", ctx=ctx, tied=section.tie_embeddings
        )
        self.positions = nn.Identity()
        if section.position == "learned":
            self.positions = PositionEmbedding(section.max_positions, section.hidden, name="position", ctx=ctx)
        self.dropout = make_dropout(section.dropout, name="embedding", ctx=ctx)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.dropout(self.positions(self.tokens(ids)))


class Layer(nn.Module):
    """Attention and feed-forward, each behind a norm and added to the residual stream x [B, S, H].

    Kinds for recomputation: ``norm``, ``mlp`` (all of it), and those of the two.
    """

    def __init__(self, section: ModelConfig, name: str, rotary: Rotary | None, ctx: Context) -> None:
        super().__init__()
        hidden, out_std = section.hidden, 0.02 / (2 * section.layers) ** 0.5
        norm = partial(NORMS[section.norm], hidden, eps=section.norm_eps, ctx=ctx)
        self.attention_norm = norm(name=f"{name}.attention_norm")
        self.attention = Attention(
            hidden,
            heads=section.heads,
            kv_heads=section.num_kv_heads,
            head_dim=section.width,
            rotary=rotary,
            impl=section.attention_impl,
            qkv_bias=section.bias or section.qkv_bias,
            bias=section.bias,
            qk_norm_eps=section.norm_eps if section.qk_norm else None,
            dropout=section.attention_dropout,
            name=f"{name}.attention",
            ctx=ctx,
            out_std=out_std,
        )
        self.attention_dropout = make_dropout(section.dropout, name=f"{name}.attention", ctx=ctx)
        self.mlp_norm = norm(name=f"{name}.mlp_norm")
        self.mlp = FeedForward(
            hidden,
            section.ffn,
            activation=section.activation,
            bias=section.bias,
            name=f"{name}.mlp",
            ctx=ctx,
            out_std=out_std,
        )
        self.mlp_dropout = make_dropout(section.dropout, name=f"{name}.mlp", ctx=ctx)
        self._attention_norm = ctx.selective("norm", self.attention_norm)
        self._mlp_norm = ctx.selective("norm", self.mlp_norm)
        self._mlp = ctx.selective("mlp", self.mlp)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention_dropout(self.attention(self._attention_norm(x)))
        return x + self.mlp_dropout(self._mlp(self._mlp_norm(x)))


class Head(nn.Module):
    """The last norm and the own part of the logits [B, S, V/t]."""

    def __init__(self, section: ModelConfig, ctx: Context) -> None:
        super().__init__()
        self.norm = NORMS[section.norm](section.hidden, name="output.norm", eps=section.norm_eps, ctx=ctx)
        self.linear = ColumnParallelLinear(
            section.hidden,
            section.vocab,
            name="output.linear",
            ctx=ctx,
            borrow="embedding" if section.tie_embeddings else None,
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(self.norm(x))


def _token_loss(vocab: int, logits: torch.Tensor, labels: torch.Tensor, tp: Group) -> torch.Tensor:
    return vocab_parallel_cross_entropy(logits, labels, share_start(vocab, tp.size, tp.rank), tp)
