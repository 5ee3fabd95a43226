"""What one pipeline rank computes: its blocks in order, and at the end of the model the loss.

Shapes: B samples of a microbatch, S sequence, H hidden.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from rayformer.config.recompute import RecomputeConfig
from rayformer.models.block import Block, TokenLoss, build_block
from rayformer.nn.context import Context
from rayformer.stages.segments import plan_segments


class Stage(nn.Module):
    """The blocks ``numbers`` of a model, built here and nowhere else, in segments between which a pass can stop."""

    def __init__(
        self, blocks: Sequence[Block], loss: TokenLoss, *, numbers: range, ctx: Context, recompute: RecomputeConfig
    ) -> None:
        super().__init__()
        self.is_first, self.is_last = numbers.start == 0, numbers.stop == len(blocks)
        self.blocks = nn.ModuleList(build_block(blocks[i], ctx) for i in numbers)
        self.segments = plan_segments([blocks[i].kind for i in numbers], recompute)
        built = list(self.blocks)
        self._of_segment = [tuple(built[segment.start : segment.stop]) for segment in self.segments]
        self.moment = ctx.moment
        self._loss, self._tp = loss, ctx.tp

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Token ids [B, S] on the first stage, else activations [B, S, H], to activations or logits; drops nothing."""
        self.moment.step = None
        for block in self.blocks:
            x = block(x)
        return x

    def run(self, number: int, x: torch.Tensor) -> torch.Tensor:
        """The same for one segment, as part of whatever ``moment`` says."""
        for block in self._of_segment[number]:
            x = block(x)
        return x

    def token_losses(self, output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """The loss of every token [B, S], on the last stage."""
        return self._loss(output, labels, self._tp)

    def segments_of_parameters(self) -> dict[nn.Parameter, int]:
        """The segment in which each parameter of the stage is used."""
        return {
            parameter: number
            for number, blocks in enumerate(self._of_segment)
            for block in blocks
            for parameter in block.parameters()
        }
