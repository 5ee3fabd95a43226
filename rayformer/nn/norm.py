"""Normalisation over the last dim.

Sources: Zhang and Sennrich, https://arxiv.org/abs/1910.07467 (RMS); Ba et al., https://arxiv.org/abs/1607.06450 (layer)
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import nn
from torch.nn import functional

from rayformer.nn.context import Context, make_parameter
from rayformer.ops.norm import rms_norm
from rayformer.shards import Init, ParamSpec

Kind = Literal["rmsnorm", "layernorm"]


class RMSNorm(nn.Module):
    """``x / sqrt(mean(x^2) + eps) * weight``, the root in float32.

    ``partial`` says that each tp rank normalises other activations, as it does where heads or the sequence are divided.
    """

    def __init__(
        self, width: int, *, name: str, eps: float, ctx: Context | None = None, partial: bool | None = None
    ) -> None:
        super().__init__()
        self._eps = eps
        self.weight = _vector(f"{name}.weight", width, "ones", ctx or Context(), partial)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, self.weight, self._eps)


class LayerNorm(nn.Module):
    """``(x - mean) / sqrt(variance + eps) * weight + bias``."""

    def __init__(
        self, width: int, *, name: str, eps: float, ctx: Context | None = None, partial: bool | None = None
    ) -> None:
        super().__init__()
        self._shape, self._eps = (width,), eps
        ctx = ctx or Context()
        self.weight = _vector(f"{name}.weight", width, "ones", ctx, partial)
        self.bias = _vector(f"{name}.bias", width, "zeros", ctx, partial)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.layer_norm(x, self._shape, self.weight, self.bias, self._eps)


NORMS: dict[Kind, type[RMSNorm] | type[LayerNorm]] = {"rmsnorm": RMSNorm, "layernorm": LayerNorm}


def _vector(name: str, width: int, kind: Literal["ones", "zeros"], ctx: Context, partial: bool | None) -> nn.Parameter:
    partial = ctx.sequence_parallel if partial is None else partial
    spec = ParamSpec(name=name, shape=(width,), init=Init(kind=kind), decay=False, partial=partial)
    return make_parameter(spec, ctx)
