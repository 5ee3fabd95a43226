"""What a layer is built with, and how a parameter comes to be.

A parameter is made with its ParamSpec, holds only the own part of the global tensor, and starts from the numbers that
the global tensor has at that place, so every layout starts from the same weights.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from rayformer.errors import ConfigError, Problem
from rayformer.groups import Group, single
from rayformer.ops.dropout import Moment
from rayformer.ops.keyed import normal_box
from rayformer.shards import ParamSpec

Output = TypeVar("Output")


@dataclass(frozen=True, kw_only=True)
class Context:
    """What every layer of one cell shares. The default is one process on the CPU.

    ``tp`` divides the layers; with ``sequence_parallel`` it also divides what stands between them along the sequence.
    ``seed`` is that of the weights, ``device`` where parameters live. They are made in float32; ``dtype`` is what the
    model computes in. ``moment`` says which samples pass through, ``recomputed`` which kinds of modules forget their
    activations and compute them again, and ``compiled`` whether torch.compile compiles each block.
    """

    tp: Group = field(default_factory=single)
    sequence_parallel: bool = False
    seed: int = 0
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    dtype: torch.dtype = torch.float32
    moment: Moment = field(default_factory=Moment)
    recomputed: frozenset[str] = frozenset()
    compiled: bool = False

    def own_sequence(self, length: int) -> slice:
        """Which positions of a whole sequence of ``length`` are this cell's where the sequence is divided."""
        if not self.sequence_parallel:
            return slice(0, length)
        own = length // self.tp.size
        return slice(self.tp.rank * own, (self.tp.rank + 1) * own)

    def selective(self, kind: str, function: Callable[..., Output]) -> Callable[..., Output]:
        """``function`` as it is, or one that keeps only its arguments if modules of this ``kind`` are recomputed."""
        if kind not in self.recomputed:
            return function
        return partial(checkpoint, function, use_reentrant=False, preserve_rng_state=False)


class Parameter(nn.Parameter):
    """The own part of a global tensor; ``spec`` says which.

    ``borrowed`` says that another block owns the tensor and this one computes with it too.
    """

    spec: ParamSpec
    borrowed: bool = False


def make_parameter(spec: ParamSpec, ctx: Context) -> Parameter:
    """The parameter of ``spec`` for this member of ``ctx.tp``, with its initial values."""
    boxes = spec.boxes(ctx.tp.size, ctx.tp.rank)
    if spec.init.kind == "normal":
        parts = [normal_box(box, spec.shape, seed=ctx.seed, name=spec.name) for box in boxes]
        value = torch.cat([torch.from_numpy(part) for part in parts]) * spec.init.std
    else:
        value = torch.full(spec.local_shape(ctx.tp.size, ctx.tp.rank), 1.0 if spec.init.kind == "ones" else 0.0)
    parameter = Parameter(value.to(device=ctx.device))
    parameter.spec = spec
    return parameter


def own_parameters(module: nn.Module) -> list[Parameter]:
    """The parameters of ``module`` that it owns, in model order."""
    return [p for p in module.parameters() if isinstance(p, Parameter) and not p.borrowed]


def parameter_specs(module: nn.Module) -> dict[str, ParamSpec]:
    """The spec of every own parameter of ``module`` by its global name, in model order.

    Raises ConfigError if two have one name.
    """
    own = own_parameters(module)
    refuse_same_names([p.spec.name for p in own])
    return {p.spec.name: p.spec for p in own}


def refuse_same_names(names: Sequence[str]) -> None:
    """Raise ConfigError if two parameters have one name: they would share start, gradient and state."""
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        rule, fix = f"{twice[0]} is the name of two parameters", "start the names of a block's layers with the block's"
        raise ConfigError([Problem(keys={"model.factory": twice[0]}, rule=rule, fix=fix)])
