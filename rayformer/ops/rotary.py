"""Rotary positions, the half-split form: element i turns together with element i + D/2.

Shapes: S sequence, D head width. Source: Su et al., https://arxiv.org/abs/2104.09864; its stretching for longer
sequences as in Llama 3.1, https://arxiv.org/abs/2407.21783
"""

from __future__ import annotations

import math
from typing import Any

import torch

from rayformer.config.model import RopeScaling


class Rotary:
    """Turns queries and keys by their positions; the angles are computed once for each length of sequence."""

    def __init__(self, head_dim: int, *, theta: float, scaling: RopeScaling | None = None) -> None:
        self._frequencies = _frequencies(head_dim, theta, scaling)
        self._tables: dict[tuple[int, torch.dtype, torch.device], tuple[torch.Tensor, torch.Tensor]] = {}

    def turn(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` [B, S, ..., D], turned at every position of S, from 0."""
        cos, sin = self.table(x.shape[1], x.dtype, x.device)
        shape = (x.shape[1], *[1] * (x.dim() - 3), -1)
        y: torch.Tensor = _Turn.apply(x, cos.view(shape), sin.view(shape))
        return y

    def table(self, seq: int, dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosine and sine [S, D] of the angles position * frequency, from float32; the first half of sines negated."""
        key = (seq, dtype, device)
        if key not in self._tables:
            angles = torch.arange(seq).float().unsqueeze(-1) * self._frequencies
            cos, sin = angles.cos(), angles.sin()
            tables = torch.cat([cos, cos], dim=-1), torch.cat([-sin, sin], dim=-1)
            self._tables[key] = (tables[0].to(device, dtype), tables[1].to(device, dtype))
        return self._tables[key]


class _Turn(torch.autograd.Function):
    """Turning back is turning with the sines negated."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(cos, sin)
        return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return torch.addcmul(grad * cos, grad.roll(grad.shape[-1] // 2, -1), sin, value=-1), None, None


def _frequencies(head_dim: int, theta: float, scaling: RopeScaling | None) -> torch.Tensor:
    """The turn per position of each pair [D/2], float32: theta^(-2i/D), stretched as ``scaling`` says."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    plain = 1.0 / theta**exponents
    if scaling is None:
        return plain
    if scaling.kind == "linear":
        return plain / scaling.factor
    # Waves that are long against the original context are stretched, short ones stay, those between are blended.
    wavelength = 2 * math.pi / plain
    longest = scaling.original_positions / scaling.low_freq_factor
    shortest = scaling.original_positions / scaling.high_freq_factor
    share = (scaling.original_positions / wavelength - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    blended = (1 - share) * plain / scaling.factor + share * plain
    return torch.where(wavelength > longest, plain / scaling.factor, torch.where(wavelength < shortest, plain, blended))
