"""The gradient norm, with the same bits for every dp, pp and zero level.

Leaves are the 1024-element blocks of the flat buffer, folded by halving; block sums fold along a fixed tree per
parameter, tp ranks add in rank order, and parameters fold in model order. No library reduction ever runs over a shard,
whose length depends on dp.
"""

from __future__ import annotations

import torch

from rayformer.optim.plan import ALIGNMENT


def block_sums(flat: torch.Tensor) -> torch.Tensor:
    """The sum of squares of every block of ``flat`` [blocks * 1024], as [blocks]."""
    squares = flat.view(-1, ALIGNMENT).square()
    width = ALIGNMENT
    while width > 1:
        width //= 2
        squares = squares[:, :width] + squares[:, width:]
    return squares.view(-1)


def tree_sum(values: torch.Tensor) -> torch.Tensor:
    """The sum of ``values`` [n] as a scalar: neighbours are added, again and again; an odd last one is carried."""
    while values.numel() > 1:
        if values.numel() % 2:
            values = torch.cat([values, values.new_zeros(1)])
        values = values[0::2] + values[1::2]
    return values.view(-1)[0] if values.numel() else values.new_zeros(())
