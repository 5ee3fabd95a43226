"""The non-linearities of feed-forward blocks.

Sources: Shazeer, https://arxiv.org/abs/2002.05202 (gated); Hendrycks and Gimpel,
https://arxiv.org/abs/1606.08415 (GELU)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch.nn import functional

from rayformer.config.model import Activation


def swiglu(x: torch.Tensor) -> torch.Tensor:
    """``silu(gate) * up`` of ``x`` [..., 2F], whose halves are the gate and the up part."""
    y: torch.Tensor = _SwiGLU.apply(x)
    return y


def geglu(x: torch.Tensor) -> torch.Tensor:
    """``gelu(gate) * up`` of ``x`` [..., 2F]."""
    gate, up = x.chunk(2, dim=-1)
    return functional.gelu(gate) * up


class _SwiGLU(torch.autograd.Function):
    """Keeps ``x`` and ``silu(gate)``, and writes both halves of the gradient into one tensor."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        gate, up = x.chunk(2, dim=-1)
        silu = functional.silu(gate)
        ctx.save_for_backward(x, silu)
        return silu * up

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        x, silu = ctx.saved_tensors
        gate, up = x.chunk(2, dim=-1)
        d_x = torch.empty_like(x)
        d_gate, d_up = d_x.chunk(2, dim=-1)
        torch.mul(grad, silu, out=d_up)
        torch.ops.aten.silu_backward(grad * up, gate, grad_input=d_gate)
        return d_x


ACTIVATIONS: Mapping[Activation, Callable[[torch.Tensor], torch.Tensor]] = {
    "swiglu": swiglu,
    "geglu": geglu,
    "gelu": functional.gelu,
    "gelu_tanh": partial(functional.gelu, approximate="tanh"),
    "relu": functional.relu,
}
GATED: frozenset[Activation] = frozenset({"swiglu", "geglu"})
