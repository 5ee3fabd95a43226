"""What a model is made of: blocks, each built only by the cells that hold it, and a loss over the last one's output."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import xxhash
from torch import nn

from rayformer.errors import ConfigError, Problem
from rayformer.groups import Group
from rayformer.nn.context import Context, Parameter
from rayformer.ops.compiler import hold_the_line
from rayformer.shards import Init, ParamSpec

# (output of the last block, labels [B, S], tp) -> the loss of every token [B, S], 0 where a label is below 0
TokenLoss = Callable[[torch.Tensor, torch.Tensor, Group], torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Block:
    """One piece of a model that is never divided over pipeline stages.

    ``kind`` says where it may stand: the ``input`` block takes token ids [B, S], ``layer`` blocks are dealt to the
    stages, the ``output`` block stands before the loss. ``cost`` is its computing time relative to the other blocks',
    by which stages are balanced.
    """

    name: str
    kind: str
    build: Callable[[Context], nn.Module]
    cost: float = 1.0


def build_block(block: Block, ctx: Context) -> nn.Module:
    """Build ``block``; parameters of plain torch modules become replicated over tp, with the start their module drew.

    What a plain module draws at its making is keyed by the seed and the block's name. Raises ConfigError for modules
    whose result would depend on the layout.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(xxhash.xxh3_64_intdigest(f"{ctx.seed}/{block.name}".encode()) >> 1)
        module = block.build(ctx).to(ctx.device)
    for path, child in module.named_modules():
        _refuse_hidden_state(f"{block.name}.{path}".rstrip("."), child)
    for path, parameter in module.named_parameters():
        if not isinstance(parameter, Parameter):
            name = f"{block.name}.{path}"
            if ctx.sequence_parallel:
                rule = f"{name} is a plain torch parameter, which would see a part of the sequence only"
                fix = "build the block from rayformer.nn, or leave layout.sequence_parallel out"
                raise ConfigError([Problem(keys={"layout.sequence_parallel": True}, rule=rule, fix=fix)])
            shape = tuple(parameter.shape)
            adopt(parameter, ParamSpec(name=name, shape=shape, init=Init(kind="module"), decay=len(shape) > 1))
    for buffer in module.buffers():
        if buffer.is_floating_point():
            buffer.data = buffer.data.to(ctx.dtype)
    if ctx.compiled:
        hold_the_line()
        module.compile(dynamic=False)
    return module


def adopt(parameter: nn.Parameter, spec: ParamSpec) -> None:
    """Make a plain parameter one of ours."""
    parameter.__class__ = Parameter
    assert isinstance(parameter, Parameter)
    parameter.spec = spec


def _refuse_hidden_state(name: str, module: nn.Module) -> None:
    found = None
    if isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0:
        found = ("draws from a generator that knows neither step nor sample", "use rayformer.nn.dropout.Dropout")
    elif isinstance(module, nn.modules.batchnorm._NormBase) and module.track_running_stats:
        found = ("keeps statistics of the samples that this cell saw", "use a norm over the last dim")
    if found is not None:
        rule = f"{name} is a {type(module).__name__}, which {found[0]}"
        raise ConfigError([Problem(keys={"model.factory": name}, rule=rule, fix=found[1])])
