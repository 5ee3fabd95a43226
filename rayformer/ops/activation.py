"""The non-linearities of feed-forward blocks.

Sources: Shazeer, https://arxiv.org/abs/2002.05202 (gated); Hendrycks and Gimpel,
https://arxiv.org/abs/1606.08415 (GELU)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch.nn import functional

from rayformer.config.model import Activation


def swiglu(x: torch.Tensor) -> torch.Tensor:
    """``silu(gate) * up`` of ``x`` [..., 2F], whose halves are the gate and the up part."""
    gate, up = x.chunk(2, dim=-1)
    return functional.silu(gate) * up


def geglu(x: torch.Tensor) -> torch.Tensor:
    """``gelu(gate) * up`` of ``x`` [..., 2F]."""
    gate, up = x.chunk(2, dim=-1)
    return functional.gelu(gate) * up


ACTIVATIONS: Mapping[Activation, Callable[[torch.Tensor], torch.Tensor]] = {
    "swiglu": swiglu,
    "geglu": geglu,
    "gelu": functional.gelu,
    "gelu_tanh": partial(functional.gelu, approximate="tanh"),
    "relu": functional.relu,
}
GATED: frozenset[Activation] = frozenset({"swiglu", "geglu"})
