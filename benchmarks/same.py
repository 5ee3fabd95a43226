"""The plain model with the weights that rayformer starts from."""

from __future__ import annotations

import torch
from plain import plain_model
from torch import nn
from workloads import SEED, Workload

from rayformer.config.model import ModelConfig
from rayformer.models import decoder
from rayformer.models.block import build_block
from rayformer.nn.context import Context


def same_model(w: Workload, *, tp: int = 1) -> nn.Sequential:
    """The plain model of ``tp`` shares, with rayformer's initial weights."""
    model = plain_model(w, tp=tp)
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
    """The value of a parameter with its rows in the plain model's order."""
    value = values[name]
    if name.endswith("gate_up.weight"):
        return value.view(2, tp, -1, w.hidden).transpose(0, 1).reshape(value.shape)
    if name.endswith("qkv.weight"):  # rayformer's order: [queries of a group | key | value], group after group
        groups = value.view(tp, w.kv_heads // tp, -1, w.head_dim, w.hidden)
        parts = groups.split([w.heads // w.kv_heads, 1, 1], dim=2)
        return torch.cat([part.flatten(1, 2) for part in parts], dim=1).reshape(value.shape)
    return value
