"""Rotary positions, the half-split form: element i turns together with element i + D/2.

Shapes: S sequence, D head width. Source: Su et al., https://arxiv.org/abs/2104.09864
"""

from __future__ import annotations

import torch


def rotary_table(positions: torch.Tensor, head_dim: int, theta: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosine and sine [S, D] of the angles position * theta^(-2i/D), in float32."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64, device=positions.device).float() / head_dim
    angles = positions.float().unsqueeze(-1) * (1.0 / theta**exponents)
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos(), angles.sin()


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """``x`` [..., S, D] turned by the table's angles."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin
