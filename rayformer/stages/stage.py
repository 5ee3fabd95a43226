"""What one pipeline rank computes: its blocks in order, and at the end of the model the loss.

Shapes: B samples of a microbatch, S sequence, H hidden.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from rayformer.groups import Group
from rayformer.models.block import Block, TokenLoss
from rayformer.nn.context import Context
from rayformer.stages.split import stage_blocks


class Stage(nn.Module):
    """The blocks of pipeline rank ``rank`` of ``pp``, built here and nowhere else."""

    def __init__(self, blocks: Sequence[Block], loss: TokenLoss, *, pp: int, rank: int, ctx: Context) -> None:
        super().__init__()
        num_layers = sum(block.kind == "layer" for block in blocks)
        self.is_first, self.is_last = rank == 0, rank == pp - 1
        self.blocks = nn.ModuleList(blocks[i].build(ctx) for i in stage_blocks(num_layers, pp, rank))
        self._loss = loss
        self._tp: Group = ctx.tp

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Token ids [B, S] on the first stage, else activations [B, S, H], to activations or logits."""
        for block in self.blocks:
            x = block(x)
        return x

    def token_losses(self, output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """The loss of every token [B, S], on the last stage."""
        return self._loss(output, labels, self._tp)
