"""The token table, divided over tp by ids; a vocabulary that tp does not divide is divided unevenly."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from rayformer.nn.context import Context, make_parameter
from rayformer.ops.tensor import reduce_from
from rayformer.shards import Init, ParamSpec, Split


class VocabParallelEmbedding(nn.Module):
    """Token ids [B, S] to vectors [B, S, H]; ids held elsewhere give zeros, and the sum over tp is the vector."""

    def __init__(self, vocab: int, hidden: int, *, name: str, ctx: Context | None = None, std: float = 0.02) -> None:
        super().__init__()
        ctx = ctx or Context()
        self.tp = ctx.tp
        split = Split(dim=0)
        spec = ParamSpec(name=f"{name}.weight", shape=(vocab, hidden), init=Init(std=std), split=split)
        self.weight = make_parameter(spec, ctx)
        ((self.start, self.stop),) = split.bounds(vocab, self.tp.size, self.tp.rank)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        owned = (tokens >= self.start) & (tokens < self.stop)
        vectors = functional.embedding(torch.where(owned, tokens - self.start, 0), self.weight)
        return reduce_from(vectors * owned.unsqueeze(-1).to(vectors.dtype), self.tp)
