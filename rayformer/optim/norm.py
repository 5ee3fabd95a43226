"""The gradient norm, with the same bits for every dp, pp and zero level.

Leaves are the 1024-element blocks of the flat buffer, folded by halving; block sums fold along a fixed tree per
parameter, tp ranks add in rank order, and parameters fold in model order. No library reduction ever runs over a shard,
whose length depends on dp.
"""

from __future__ import annotations

from collections.abc import Sequence

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


class RangeSums:
    """``tree_sum`` of many ranges of one tensor at a time: those of like length are rows of one, filled up with zeros.

    One by one, a model of 300 parameters would cost a GPU some thousand launches a step.
    """

    def __init__(self, ranges: Sequence[tuple[int, int]], device: torch.device) -> None:
        by_width: dict[int, list[int]] = {}
        for number, (start, stop) in enumerate(ranges):
            by_width.setdefault(1 << max(stop - start - 1, 0).bit_length(), []).append(number)
        self._rows: list[torch.Tensor] = []
        for width, numbers in by_width.items():
            starts, stops = (torch.tensor([ranges[n][end] for n in numbers]).view(-1, 1) for end in (0, 1))
            places = starts + torch.arange(width)
            # Place 0 is a zero, put before the first value.
            self._rows.append(torch.where(places < stops, places + 1, 0).to(device))
        order = [number for numbers in by_width.values() for number in numbers]
        self._order = torch.tensor(order, dtype=torch.int64).argsort().to(device)

    def __call__(self, values: torch.Tensor) -> torch.Tensor:
        """The sum of every range of ``values`` [n], as [ranges]."""
        padded = torch.cat([values.new_zeros(1), values])
        sums = [values.new_zeros(0)]
        for places in self._rows:
            rows = padded[places]
            while rows.shape[1] > 1:
                rows = rows[:, 0::2] + rows[:, 1::2]
            sums.append(rows.view(-1))
        return torch.cat(sums)[self._order]
