"""Dropout of activations: the same elements are dropped in every layout, and again when a forward is repeated."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from rayformer.nn.context import Context
from rayformer.ops.compiler import not_compiled
from rayformer.ops.dropout import dropped, keep_masks


def make_dropout(p: float, *, name: str, ctx: Context) -> Callable[[torch.Tensor], torch.Tensor]:
    """A Dropout, or a function that changes nothing where nothing is dropped."""
    return Dropout(p, name=name, ctx=ctx) if p else _unchanged


def _unchanged(x: torch.Tensor) -> torch.Tensor:
    return x


class Dropout(nn.Module):
    """Drops a share ``p`` of x [B, S, H], or of the own part [B, S/t, H] of the sequence.

    ``name`` is the site in the model: two sites of one name would drop the same elements.
    """

    def __init__(self, p: float, *, name: str, ctx: Context) -> None:
        super().__init__()
        self.p, self.name = p, name
        self._ctx = ctx
        self._generator = torch.Generator(ctx.device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return not_compiled(self._drop, x)

    def _drop(self, x: torch.Tensor) -> torch.Tensor:
        ctx, moment = self._ctx, self._ctx.moment
        if moment.step is None:
            return x
        parts, part = (ctx.tp.size, ctx.tp.rank) if ctx.sequence_parallel else (1, 0)
        own, hidden = x.shape[1:]
        keep = keep_masks(
            (own * parts, hidden),
            self.p,
            moment=moment,
            site=self.name,
            device=x.device,
            generator=self._generator,
            rows=slice(part * own, (part + 1) * own),
        )
        return dropped(x, keep, self.p)
