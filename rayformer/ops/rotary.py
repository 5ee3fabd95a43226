"""Rotary positions, the half-split form: element i turns together with element i + D/2.

Shapes: S sequence, D head width. Source: Su et al., https://arxiv.org/abs/2104.09864; its stretching for longer
sequences as in Llama 3.1, https://arxiv.org/abs/2407.21783
"""

from __future__ import annotations

import math

import torch

from rayformer.config.model import RopeScaling


class Rotary:
    """Turns queries and keys by their positions; the angles are computed once for each length of sequence."""

    def __init__(self, head_dim: int, *, theta: float, scaling: RopeScaling | None = None) -> None:
        self._frequencies = _frequencies(head_dim, theta, scaling)
        self._tables: dict[tuple[object, ...], tuple[torch.Tensor, torch.Tensor]] = {}

    def turn(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` [..., S, D], turned at every position of S, from 0."""
        key = (x.shape[-2], x.dtype, x.device)
        tables = self._tables.get(key)
        if tables is None:
            tables = self._tables[key] = self._tables_for(x)
        cos, sin = tables
        first, second = x.chunk(2, dim=-1)
        return torch.addcmul(x * cos, torch.cat([second, first], dim=-1), sin)

    def _tables_for(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosine and sine [S, D] of the angles position * frequency, the first half of sines negated."""
        angles = torch.arange(x.shape[-2]).float().unsqueeze(-1) * self._frequencies
        cos, sin = angles.cos(), angles.sin()
        tables = torch.cat([cos, cos], dim=-1), torch.cat([-sin, sin], dim=-1)
        cos, sin = (table.to(x.device, x.dtype) for table in tables)
        return cos, sin


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
