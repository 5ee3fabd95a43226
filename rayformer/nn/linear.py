"""Linear layers whose weight tp divides: by output (column) or by input (row).

A column layer followed by a row layer needs no communication between them and one reduction after them. Shapes:
x [..., in], weight [out, in].
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import nn
from torch.nn import functional

from rayformer.nn.context import Context, make_parameter
from rayformer.ops.tensor import copy_to, gather_from, reduce_from, scatter_to
from rayformer.shards import Init, ParamSpec, Split, share_start


class ColumnParallelLinear(nn.Module):
    """``x W^T`` of which every tp rank computes some outputs.

    ``unit`` rows stay together (the rows of one kv group), ``parts`` equal blocks of rows are divided each by itself
    (the gate and the up half). With ``gather_output`` the whole result is returned on every rank, else the own part.

    >>> ColumnParallelLinear(4, 8, name="up")(torch.ones(2, 4)).shape
    torch.Size([2, 8])
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        name: str,
        ctx: Context | None = None,
        std: float = 0.02,
        unit: int = 1,
        parts: int = 1,
        gather_output: bool = False,
    ) -> None:
        super().__init__()
        ctx = ctx or Context()
        self.tp = ctx.tp
        assert not gather_output or parts == 1, "outputs of several parts cannot be gathered in order"
        split = Split(dim=0, unit=unit, parts=parts)
        spec = ParamSpec(
            name=f"{name}.weight", shape=(out_features, in_features), init=Init(kind="normal", std=std), split=split
        )
        self.weight = make_parameter(spec, ctx)
        rows = [sum(b - a for a, b in split.bounds(out_features, self.tp.size, r)) for r in range(self.tp.size)]
        self._gather_sizes = rows if gather_output else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = functional.linear(copy_to(x, self.tp), self.weight)
        return y if self._gather_sizes is None else gather_from(y, self.tp, self._gather_sizes)


class RowParallelLinear(nn.Module):
    """``x W^T`` of which every tp rank sees some inputs; the partial results are summed.

    ``unit`` columns stay together. With ``input_is_parallel`` False every rank passes the whole ``x``.

    >>> RowParallelLinear(8, 4, name="down")(torch.ones(2, 8)).shape
    torch.Size([2, 4])
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        name: str,
        ctx: Context | None = None,
        std: float = 0.02,
        unit: int = 1,
        input_is_parallel: bool = True,
    ) -> None:
        super().__init__()
        ctx = ctx or Context()
        self.tp = ctx.tp
        spec = ParamSpec(
            name=f"{name}.weight",
            shape=(out_features, in_features),
            init=Init(kind="normal", std=std),
            split=Split(dim=1, unit=unit),
        )
        self.weight = make_parameter(spec, ctx)
        starts = [share_start(in_features // unit, self.tp.size, r) * unit for r in range(self.tp.size + 1)]
        sizes = [b - a for a, b in pairwise(starts)]
        self._scatter_sizes = None if input_is_parallel else sizes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self._scatter_sizes is not None:
            x = scatter_to(x, self.tp, self._scatter_sizes)
        return reduce_from(functional.linear(x, self.weight), self.tp)
