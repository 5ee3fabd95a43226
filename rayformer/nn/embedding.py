"""Embeddings: the token table, divided over tp by ids, and learned positions.

Shapes: B batch, S sequence, H hidden; under sequence parallelism S/t instead of S comes out.
"""

from __future__ import annotations

import torch
from torch import nn

from rayformer.nn.context import Context, make_parameter
from rayformer.ops.embedding import table_rows
from rayformer.ops.tensor import reduce_from, reduce_sequence
from rayformer.shards import Init, ParamSpec, Split


class VocabParallelEmbedding(nn.Module):
    """Token ids [B, S] to vectors [B, S, H]; ids held elsewhere give zeros, and the sum over tp is the vector.

    A vocabulary that tp does not divide is divided unevenly. ``tied`` says that the output layer is this table too: it
    borrows it (see nn.linear), on whatever stage it stands.
    """

    def __init__(
        self,
        vocab: int,
        hidden: int,
        *,
        name: str,
        ctx: Context | None = None,
        std: float = 0.02,
        tied: bool = False,
    ) -> None:
        super().__init__()
        ctx = ctx or Context()
        self.tp = ctx.tp
        self._reduce = reduce_sequence if ctx.sequence_parallel else reduce_from
        split = Split(dim=0)
        spec = ParamSpec(name=f"{name}.weight", shape=(vocab, hidden), init=Init(std=std), split=split, tied=tied)
        self.weight = make_parameter(spec, ctx)
        ((self.start, self.stop),) = split.bounds(vocab, self.tp.size, self.tp.rank)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self._reduce(table_rows(tokens - self.start, self.weight, complete=self.tp.size == 1), self.tp)


class PositionEmbedding(nn.Module):
    """A learned vector for each of ``length`` positions, added to x [B, S, H]."""

    def __init__(self, length: int, hidden: int, *, name: str, ctx: Context | None = None, std: float = 0.02) -> None:
        super().__init__()
        self._ctx = ctx or Context()
        spec = ParamSpec(
            name=f"{name}.weight",
            shape=(length, hidden),
            init=Init(std=std),
            partial=self._ctx.sequence_parallel,
        )
        self.weight = make_parameter(spec, self._ctx)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self._ctx.tp.size if self._ctx.sequence_parallel else 1
        return x + self.weight[self._ctx.own_sequence(x.shape[1] * parts)]
