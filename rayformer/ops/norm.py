"""Root mean square normalisation that keeps the normalised rows and one number per row for backward.

Shapes: R rows, H width.
"""

from __future__ import annotations

from typing import Any

import torch


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last dim of ``x`` [..., H]; the rows in float32."""
    y: torch.Tensor = _RMSNorm.apply(x, weight, eps)
    return y


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        rows = x.float()
        scale = torch.linalg.vector_norm(rows, dim=-1, keepdim=True).square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        normal = (rows * scale).to(x.dtype)
        ctx.save_for_backward(normal, weight, scale)
        return normal * weight

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        normal, weight, scale = ctx.saved_tensors
        product = grad.float() * normal  # [..., H]
        mean = torch.mv(product.flatten(0, -2), weight.float()).view(scale.shape).div_(weight.numel())
        d_weight = product.flatten(0, -2).sum(0)
        d_x = torch.addcmul(grad.float() * weight, normal, mean, value=-1).mul_(scale)
        return d_x.to(normal.dtype), d_weight, None
