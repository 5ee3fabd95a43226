"""The core of causal attention, softmax(q k^T / sqrt(D)) v, by one of several kernels with one signature.

Shapes: B batch, N own query heads, G own key and value heads, S sequence, D head width; q [B, N, S, D], k and v
[B, G, S, D], result [B, N, S, D].
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.nn import functional

from rayformer.config.model import AttentionImpl
from rayformer.errors import ConfigError, Problem
from rayformer.ops.dropout import dropped

Kernel = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def attention_kernel(impl: AttentionImpl, *, device: torch.device, dtype: torch.dtype, head_dim: int) -> Kernel:
    """The kernel that ``model.attention_impl`` names. Raises ConfigError where it isn't installed or can't run."""
    match impl:
        case "auto" | "sdpa":
            return sdpa
        case "explicit":
            return explicit
        case "flash":
            _require(impl, package="flash_attn", extra="flash", device=device, dtype=dtype)
            _fits(impl, head_dim <= 256, f"a head width of at most 256, and it is {head_dim}")
            return partial(flash, deterministic=torch.are_deterministic_algorithms_enabled())
        case "te":
            _require(impl, package="transformer_engine", extra="te", device=device, dtype=dtype)
            return TransformerEngine(head_dim)


def sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """torch's own fused kernel for the device."""
    grouped = q.shape[1] != k.shape[1]
    return functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)


def explicit(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, keep: torch.Tensor | None = None, p: float = 0.0
) -> torch.Tensor:
    """Plain products and a softmax in float32; ``keep`` [B, N, S, S] drops a share ``p`` of the probabilities."""
    k, v = (_every_head(t, q.shape[1]) for t in (k, v))
    seq = q.shape[2]
    scores = (q @ k.transpose(-1, -2)).mul_(q.shape[-1] ** -0.5)
    future = torch.ones(seq, seq, dtype=torch.bool, device=q.device).triu(1)
    probabilities = torch.softmax(scores.masked_fill(future, -torch.inf), dim=-1, dtype=torch.float32).to(q.dtype)
    if keep is not None:
        probabilities = dropped(probabilities, keep, p)
    return probabilities @ v


def flash(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, deterministic: bool) -> torch.Tensor:
    """flash-attn: NVIDIA GPUs, 16-bit, grouped queries without copies. Source: https://arxiv.org/abs/2307.08691"""
    from flash_attn import flash_attn_func

    q, k, v = (t.transpose(1, 2) for t in (q, k, v))  # B S heads D
    y: torch.Tensor = flash_attn_func(q, k, v, causal=True, deterministic=deterministic)
    return y.transpose(1, 2)


class TransformerEngine:
    """transformer-engine's attention, which picks cuDNN's or flash-attn's kernels. The heads are known at first use."""

    def __init__(self, head_dim: int) -> None:
        self._head_dim = head_dim
        self._core: Any = None

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        if self._core is None:
            from transformer_engine.pytorch import DotProductAttention

            self._core = DotProductAttention(
                q.shape[1],
                self._head_dim,
                num_gqa_groups=k.shape[1],
                attention_dropout=0.0,
                qkv_format="bshd",
                attn_mask_type="causal",
            )
        batch, heads, seq, width = q.shape
        y: torch.Tensor = self._core(*(t.transpose(1, 2).contiguous() for t in (q, k, v)))
        return y.view(batch, seq, heads, width).transpose(1, 2)


def _every_head(x: torch.Tensor, heads: int) -> torch.Tensor:
    """``x`` [B, G, S, D] with each head repeated for the queries of its group; no copy if there is one query each."""
    return x.unsqueeze(2).expand(-1, -1, heads // x.shape[1], -1, -1).flatten(1, 2)


def _require(impl: str, *, package: str, extra: str, device: torch.device, dtype: torch.dtype) -> None:
    _fits(impl, device.type == "cuda", f"an NVIDIA GPU, and this cell computes on {device.type}")
    _fits(impl, dtype != torch.float32, "16-bit parameters, and precision.params is fp32")
    if importlib.util.find_spec(package) is None:
        raise _refused(impl, f"{package} is not installed", f"pip install 'rayformer[{extra}]', or use sdpa")


def _fits(impl: str, fits: bool, needed: str) -> None:
    if not fits:
        raise _refused(impl, f"it needs {needed}", "use sdpa or auto")


def _refused(impl: str, rule: str, fix: str) -> ConfigError:
    return ConfigError([Problem(keys={"model.attention_impl": impl}, rule=rule, fix=fix)])
