"""The same model in plain PyTorch, as a peer would write it for speed.

One matrix for queries, keys and values, one for gate and up, cached rotary tables with the sign in the sine, queries
and keys rotated together, F.rms_norm and F.scaled_dot_product_attention. Shapes: B batch, S sequence, H hidden, N own
heads, G own key and value heads, D head width.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional
from workloads import SEED, Workload

from rayformer.config.model import ModelConfig
from rayformer.models import decoder
from rayformer.models.block import build_block
from rayformer.nn.context import Context


class RMSNorm(nn.Module):
    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.width, self.eps = (width,), eps
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(x, self.width, self.weight, self.eps)


class Attention(nn.Module):
    """The rows of ``qkv`` are [queries | keys | values], within each of ``tp`` equal shares."""

    def __init__(self, w: Workload, tp: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = w.heads // tp, w.kv_heads // tp, w.head_dim
        self.qkv = nn.Linear(w.hidden, (w.heads + 2 * w.kv_heads) * w.head_dim, bias=False)
        self.out = nn.Linear(w.hidden, w.hidden, bias=False)
        angles = torch.arange(w.seq).float()[:, None] / w.rope_theta ** (
            torch.arange(0, w.head_dim, 2).float() / w.head_dim
        )
        self.register_buffer("cos", torch.cat([angles.cos(), angles.cos()], dim=-1), persistent=False)
        self.register_buffer("sin", torch.cat([-angles.sin(), angles.sin()], dim=-1), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = self.qkv(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)  # B N+2G S D
        qk, v = rows.split([self.heads + self.kv_heads, self.kv_heads], dim=1)
        first, second = qk.chunk(2, dim=-1)
        qk = torch.addcmul(qk * self.cos, torch.cat([second, first], dim=-1), self.sin)
        q, k = qk.split([self.heads, self.kv_heads], dim=1)
        grouped = self.heads != self.kv_heads
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
        return self.out(y.transpose(1, 2).flatten(2))


class SwiGLU(nn.Module):
    """The rows of ``gate_up`` are [gate | up], within each of ``tp`` equal shares."""

    def __init__(self, w: Workload) -> None:
        super().__init__()
        self.gate_up = nn.Linear(w.hidden, 2 * w.ffn, bias=False)
        self.down = nn.Linear(w.ffn, w.hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(functional.silu(gate) * up)


class Layer(nn.Module):
    def __init__(self, w: Workload, tp: int) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(w.hidden, w.norm_eps)
        self.attention = Attention(w, tp)
        self.mlp_norm = RMSNorm(w.hidden, w.norm_eps)
        self.mlp = SwiGLU(w)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class Head(nn.Module):
    def __init__(self, w: Workload) -> None:
        super().__init__()
        self.norm = RMSNorm(w.hidden, w.norm_eps)
        self.linear = nn.Linear(w.hidden, w.vocab, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(self.norm(x))


def same_model(w: Workload, *, tp: int = 1) -> nn.Sequential:
    """Embedding, layers and head with the weights that rayformer starts from; ``tp`` shares of heads and ffn."""
    model = nn.Sequential(nn.Embedding(w.vocab, w.hidden), *(Layer(w, tp) for _ in range(w.layers)), Head(w))
    section = ModelConfig(
        layers=w.layers,
        hidden=w.hidden,
        heads=w.heads,
        kv_heads=w.kv_heads,
        ffn=w.ffn,
        vocab=w.vocab,
        norm_eps=w.norm_eps,
        rope_theta=w.rope_theta,
    )
    blocks, _ = decoder.build(section)
    parameters = (p for block in blocks for p in build_block(block, Context(seed=SEED)).parameters())
    theirs = {p.spec.name: p.detach() for p in parameters}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(_reordered(_rayformer_name(name, w.layers), theirs, w, tp))
    return model


def _rayformer_name(name: str, layers: int) -> str:
    place, _, rest = name.partition(".")
    prefix = {0: "embedding", layers + 1: "output"}.get(int(place), f"layers.{int(place) - 1}")
    return f"{prefix}.{rest}"


def _reordered(name: str, values: dict[str, torch.Tensor], w: Workload, tp: int) -> torch.Tensor:
    """The value of a parameter with its rows in this file's order."""
    value = values[name]
    if name.endswith("gate_up.weight"):
        return value.view(2, tp, -1, w.hidden).transpose(0, 1).reshape(value.shape)
    if name.endswith("qkv.weight"):  # rayformer's order: [queries of a group | key | value], group after group
        groups = value.view(tp, w.kv_heads // tp, -1, w.head_dim, w.hidden)
        parts = groups.split([w.heads // w.kv_heads, 1, 1], dim=2)
        return torch.cat([part.flatten(1, 2) for part in parts], dim=1).reshape(value.shape)
    return value
