"""The conjugate pairs of tensor parallelism: what a layer does forward on one side, its gradient does on the other.

    copy_to           forward: nothing             backward: all-reduce
    reduce_from       forward: all-reduce          backward: nothing
    gather_from       forward: join last dim       backward: keep the own part
    scatter_to        forward: keep own part       backward: join last dim
    reduce_sequence   forward: reduce-scatter along the sequence, backward: join it (its pair is ops.linear)

Shapes: B batch, S sequence, t members. Sources: Shoeybi et al., Megatron-LM, https://arxiv.org/abs/1909.08053, and for
the sequence Korthikanti et al., https://arxiv.org/abs/2205.05198
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from rayformer.groups import Group
from rayformer.ops.compiler import not_compiled


def copy_to(x: torch.Tensor, tp: Group) -> torch.Tensor:
    """``x`` as it is, on its way into a layer of which every member holds a part."""
    return not_compiled(_CopyTo.apply, x, tp)


def reduce_from(x: torch.Tensor, tp: Group) -> torch.Tensor:
    """The sum of every member's partial ``x``; a single member's is ``x`` itself."""
    if tp.size == 1:
        return x
    return not_compiled(_ReduceFrom.apply, x, tp)


def gather_from(x: torch.Tensor, tp: Group, sizes: Sequence[int]) -> torch.Tensor:
    """Every member's part [..., sizes[i]] joined along the last dim."""
    return not_compiled(_GatherFrom.apply, x, tp, tuple(sizes))


def scatter_to(x: torch.Tensor, tp: Group, sizes: Sequence[int]) -> torch.Tensor:
    """The own part of ``x`` [..., sum(sizes)], which every member holds whole."""
    return not_compiled(_ScatterTo.apply, x, tp, tuple(sizes))


def reduce_sequence(x: torch.Tensor, tp: Group) -> torch.Tensor:
    """The own part [B, S/t, ...] of the sum of every member's partial ``x`` [B, S, ...]."""
    if tp.size == 1:
        return x
    return not_compiled(_ReduceSequence.apply, x, tp)


def gather_rows(x: torch.Tensor, tp: Group) -> Callable[[], torch.Tensor]:
    """Start joining the parts [B, S/t, ...] of the sequence; the call gives the whole."""
    if tp.size == 1:
        return lambda: x
    parts = x.new_empty(tp.size, *x.shape)
    ticket = tp.all_gather(parts.view(-1), x.contiguous().view(-1))

    def whole() -> torch.Tensor:
        ticket.wait()
        return parts.transpose(0, 1).flatten(1, 2)  # B t S/t ... -> B S ...

    return whole


def scatter_rows(x: torch.Tensor, tp: Group) -> Callable[[], torch.Tensor]:
    """Start summing ``x`` [B, S, ...] over the group; the call gives the own part [B, S/t, ...] of the sum."""
    if tp.size == 1:
        return lambda: x
    pieces = x.unflatten(1, (tp.size, -1)).transpose(0, 1).contiguous()  # t B S/t ...
    out = x.new_empty(pieces.shape[1:])
    ticket = tp.reduce_scatter(out.view(-1), pieces.view(-1))

    def own() -> torch.Tensor:
        ticket.wait()
        return out

    return own


class _CopyTo(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, tp: Group) -> torch.Tensor:
        ctx.tp = tp
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _summed(grad, ctx.tp), None


class _ReduceFrom(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, tp: Group) -> torch.Tensor:
        return _summed(x, tp)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None


class _GatherFrom(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, tp: Group, sizes: tuple[int, ...]) -> torch.Tensor:
        ctx.tp, ctx.sizes = tp, sizes
        return _joined(x, tp, sizes)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return _own(grad, ctx.tp, ctx.sizes), None, None


class _ScatterTo(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, tp: Group, sizes: tuple[int, ...]) -> torch.Tensor:
        ctx.tp, ctx.sizes = tp, sizes
        return _own(x, tp, sizes)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return _joined(grad, ctx.tp, ctx.sizes), None, None


class _ReduceSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, tp: Group) -> torch.Tensor:
        ctx.tp = tp
        return scatter_rows(x, tp)()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gather_rows(grad, ctx.tp)(), None


def _summed(x: torch.Tensor, tp: Group) -> torch.Tensor:
    if tp.size == 1:
        return x.view_as(x)
    total = x.clone(memory_format=torch.contiguous_format)
    tp.all_reduce(total).wait()
    return total


def _own(x: torch.Tensor, tp: Group, sizes: tuple[int, ...]) -> torch.Tensor:
    return x.split(list(sizes), dim=-1)[tp.rank].contiguous()


def _joined(x: torch.Tensor, tp: Group, sizes: tuple[int, ...]) -> torch.Tensor:
    """The parts of all members along the last dim; parts may differ in width, so each travels at the largest one."""
    width = max(sizes)
    padded = x.new_zeros(*x.shape[:-1], width)
    padded[..., : x.shape[-1]] = x
    out = padded.new_empty(tp.size, *padded.shape)
    tp.all_gather(out.view(-1), padded.view(-1)).wait()
    return torch.cat([part[..., :size] for part, size in zip(out, sizes)], dim=-1)
