"""Linear layers whose weight tp divides: by output (column) or by input (row).

A column layer followed by a row layer needs no communication between them and one reduction after them. Under sequence
parallelism a column layer takes the own part [B, S/t, in] of the sequence and a row layer gives it back. Shapes:
x [..., in], weight [out, in], bias [out].

What a layer computes is put together once: on a CPU every look-up in a module costs microseconds with cold caches.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise

import torch
from torch import nn
from torch.nn import functional

from rayformer.nn.context import Context, Parameter, make_parameter
from rayformer.ops.linear import column_linear
from rayformer.ops.tensor import gather_from, reduce_from, reduce_sequence, scatter_to
from rayformer.shards import Init, ParamSpec, Split, share_start


class ColumnParallelLinear(nn.Module):
    """``x W^T + b`` of which every tp rank computes some outputs.

    ``unit`` rows stay together (the rows of one kv group), ``parts`` equal blocks of rows are divided each by itself
    (the gate and the up half). With ``gather_output`` the whole result is returned on every rank, else the own part.
    ``borrow`` names the table of an embedding that is the weight too, see nn.embedding.

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
        bias: bool = False,
        unit: int = 1,
        parts: int = 1,
        gather_output: bool = False,
        borrow: str | None = None,
    ) -> None:
        super().__init__()
        ctx = ctx or Context()
        self.tp = ctx.tp
        assert not gather_output or parts == 1, "outputs of several parts cannot be gathered in order"
        split = Split(dim=0, unit=unit, parts=parts)
        weight = ParamSpec(
            name=f"{borrow or name}.weight",
            shape=(out_features, in_features),
            init=Init(std=std),
            split=split,
            tied=borrow is not None,
        )
        self.weight = make_parameter(weight, ctx)
        self.weight.borrowed = borrow is not None
        self.bias: Parameter | None = None
        if bias:
            spec = ParamSpec(
                name=f"{name}.bias", shape=(out_features,), init=Init(kind="zeros"), split=split, decay=False
            )
            self.bias = make_parameter(spec, ctx)
        rows = [sum(b - a for a, b in split.bounds(out_features, self.tp.size, r)) for r in range(self.tp.size)]
        self._gather_sizes = rows if gather_output and self.tp.size > 1 else None
        self._map: Callable[..., torch.Tensor] = partial(functional.linear, weight=self.weight, bias=self.bias)
        if self.tp.size > 1:  # there is something to hide
            self._map = partial(
                column_linear,
                weight=self.weight,
                bias=self.bias,
                tp=self.tp,
                sequence_parallel=ctx.sequence_parallel,
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self._map(x)
        return y if self._gather_sizes is None else gather_from(y, self.tp, self._gather_sizes)


class RowParallelLinear(nn.Module):
    """``x W^T + b`` of which every tp rank sees some inputs; the partial results are summed, and the bias added once.

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
        bias: bool = False,
        unit: int = 1,
        input_is_parallel: bool = True,
    ) -> None:
        super().__init__()
        ctx = ctx or Context()
        self.tp = ctx.tp
        self._reduce = reduce_sequence if ctx.sequence_parallel else reduce_from
        spec = ParamSpec(
            name=f"{name}.weight",
            shape=(out_features, in_features),
            init=Init(std=std),
            split=Split(dim=1, unit=unit),
        )
        self.weight = make_parameter(spec, ctx)
        self.bias: Parameter | None = None
        if bias:
            spec = ParamSpec(
                name=f"{name}.bias",
                shape=(out_features,),
                init=Init(kind="zeros"),
                decay=False,
                partial=ctx.sequence_parallel,
            )
            self.bias = make_parameter(spec, ctx)
        starts = [share_start(in_features // unit, self.tp.size, r) * unit for r in range(self.tp.size + 1)]
        sizes = [b - a for a, b in pairwise(starts)]
        self._scatter_sizes = None if input_is_parallel else sizes
        self._map: Callable[..., torch.Tensor] = partial(functional.linear, weight=self.weight, bias=self.bias)
        if self.tp.size > 1:
            self._map = self._reduced

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._map(x)

    def _reduced(self, x: torch.Tensor) -> torch.Tensor:
        if self._scatter_sizes is not None:
            x = scatter_to(x, self.tp, self._scatter_sizes)
        y = self._reduce(functional.linear(x, self.weight), self.tp)
        return y if self.bias is None else y + self.bias
