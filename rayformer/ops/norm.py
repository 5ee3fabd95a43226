"""Root mean square normalisation.

Shapes: H width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from rayformer.ops.compiler import not_compiled
from rayformer.ops.later import is_left, now_or_later


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last dim of ``x`` [..., H]; the rows in float32.

    torch's own, but for 16-bit rows on a CPU, of which it would keep two float32 copies for backward.
    """
    if x.dtype == torch.float32 or x.is_cuda:
        return functional.rms_norm(x, weight.shape, weight, eps)
    return not_compiled(_RMSNorm.apply, x, weight, eps)


class _RMSNorm(torch.autograd.Function):
    """Keeps the normalised rows and one number for each."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        rows = x.float()
        scale = torch.linalg.vector_norm(rows, dim=-1, keepdim=True).square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        normal = (rows * scale).to(x.dtype)
        ctx.save_for_backward(normal, weight, scale)
        return normal * weight

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None, None]:
        normal, weight, scale = ctx.saved_tensors
        product = grad.float() * normal  # [..., H]
        mean = torch.mv(product.flatten(0, -2), weight.float()).view(scale.shape).div_(weight.numel())
        rows = None if is_left((weight,)) else product  # float32 rows are not held until later
        (d_weight,) = now_or_later(
            (weight,), lambda: [(grad.float() * normal if rows is None else rows).flatten(0, -2).sum(0)]
        )
        d_x = torch.addcmul(grad.float() * weight, normal.float(), mean, value=-1).mul_(scale)
        return d_x.to(normal.dtype), d_weight, None
