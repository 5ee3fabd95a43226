"""Root mean square normalisation. Source: Zhang and Sennrich, https://arxiv.org/abs/1910.07467"""

from __future__ import annotations

import torch
from torch import nn

from rayformer.nn.context import Context, make_parameter
from rayformer.shards import Init, ParamSpec


class RMSNorm(nn.Module):
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last dim, the root in float32."""

    def __init__(self, width: int, *, name: str, eps: float, ctx: Context | None = None) -> None:
        super().__init__()
        self.eps = eps
        spec = ParamSpec(name=f"{name}.weight", shape=(width,), init=Init(kind="ones"), decay=False)
        self.weight = make_parameter(spec, ctx or Context())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.float()
        y = y * torch.rsqrt(y.pow(2).mean(dim=-1, keepdim=True) + self.eps)
        return self.weight * y.to(x.dtype)
