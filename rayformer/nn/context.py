"""What a layer is built with, and how a parameter comes to be.

A parameter is made with its ParamSpec, holds only the own part of the global tensor, and starts from the numbers that
the global tensor has at that place, so every layout starts from the same weights.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import nn

from rayformer.groups import Group, single
from rayformer.ops.keyed import normal_box
from rayformer.shards import ParamSpec


@dataclass(frozen=True, kw_only=True)
class Context:
    """The tp group, the seed of the weights, and where parameters live. The default is one process on the CPU."""

    tp: Group = field(default_factory=single)
    seed: int = 0
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    dtype: torch.dtype = torch.float32


class Parameter(nn.Parameter):
    """The own part of a global tensor; ``spec`` says which."""

    spec: ParamSpec


def make_parameter(spec: ParamSpec, ctx: Context) -> Parameter:
    """The parameter of ``spec`` for this member of ``ctx.tp``, with its initial values."""
    boxes = spec.boxes(ctx.tp.size, ctx.tp.rank)
    if spec.init.kind == "normal":
        parts = [normal_box(box, spec.shape, seed=ctx.seed, name=spec.name) for box in boxes]
        value = torch.cat([torch.from_numpy(part) for part in parts]) * spec.init.std
    else:
        value = torch.full(spec.local_shape(ctx.tp.size, ctx.tp.rank), 1.0 if spec.init.kind == "ones" else 0.0)
    parameter = Parameter(value.to(device=ctx.device, dtype=ctx.dtype))
    parameter.spec = spec
    return parameter


def parameter_specs(module: nn.Module) -> dict[str, ParamSpec]:
    """The spec of every parameter of ``module`` by its global name, in model order."""
    return {p.spec.name: p.spec for p in module.parameters()}  # type: ignore[attr-defined]
