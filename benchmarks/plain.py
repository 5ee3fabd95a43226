"""The same model, its loss and its optimizer in plain PyTorch, as a peer would write them for speed.

One matrix for queries, keys and values, one for gate and up, cached rotary tables with the sign in the sine, queries
and keys rotated together, F.rms_norm and F.scaled_dot_product_attention. Shapes: B batch, S sequence, H hidden, N own
heads, G own key and value heads, D head width.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn
from torch.nn import functional
from workloads import Workload


def plain_model(w: Workload, *, tp: int = 1) -> nn.Sequential:
    """Embedding, layers and head; ``tp`` shares of heads and ffn."""
    return nn.Sequential(nn.Embedding(w.vocab, w.hidden), *(Layer(w, tp) for _ in range(w.layers)), Head(w))


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


def token_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def adamw_groups(parameters: Iterable[nn.Parameter], w: Workload) -> list[dict[str, object]]:
    """Matrices, which decay, and vectors, which do not."""
    every = list(parameters)
    return [
        {"params": [p for p in every if p.ndim > 1], "weight_decay": w.weight_decay},
        {"params": [p for p in every if p.ndim == 1], "weight_decay": 0.0},
    ]


def fused_adamw(parameters: Iterable[nn.Parameter], w: Workload) -> torch.optim.AdamW:
    groups = [group for group in adamw_groups(parameters, w) if group["params"]]
    return torch.optim.AdamW(groups, lr=w.lr, betas=w.betas, eps=w.eps, fused=True)
