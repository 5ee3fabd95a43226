"""Rows of a table by id, with a gradient that touches only the rows used.

Shapes: R rows of the table, H width, ids of any shape.
"""

from __future__ import annotations

from typing import Any

import torch

from rayformer.ops.compiler import not_compiled
from rayformer.ops.later import Grads, now_or_later


def table_rows(ids: torch.Tensor, table: torch.Tensor, *, complete: bool) -> torch.Tensor:
    """``table[ids]`` [..., H]; ids outside [0, R), of which a ``complete`` table sees none, give zeros and no gradient.

    The gradient is added to the rows of the table's ``.grad`` in ascending order of places, so that its bits do not
    depend on how many rows this process holds; where ``.grad`` is None it is returned as usual.
    """
    rows: torch.Tensor = not_compiled(_TableRows.apply, ids, table, complete)
    return rows


class _TableRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ids: torch.Tensor, table: torch.Tensor, complete: bool) -> torch.Tensor:
        owned = None if complete else (ids >= 0) & (ids < table.shape[0])
        index = ids if owned is None else torch.where(owned, ids, 0)
        ctx.save_for_backward(index, owned, table)
        rows = torch.embedding(table, index)
        return rows if owned is None else rows.mul_(owned.unsqueeze(-1))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, torch.Tensor | None, None]:
        index, owned, table = ctx.saved_tensors

        def table_grad() -> Grads:
            rows = (grad if owned is None else grad * owned.unsqueeze(-1)).flatten(0, -2)
            target = torch.zeros_like(table) if table.grad is None else table.grad
            target.index_add_(0, index.flatten(), rows.to(target.dtype))
            return [target if table.grad is None else None]

        (d_table,) = now_or_later((table,), table_grad)
        return None, d_table, None
