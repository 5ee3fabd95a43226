"""The layout: the parallel degrees of a run and the arithmetic between ranks and coordinates.

Ranks are numbered ``tp-cp-dp-pp``, tp fastest. The same ranks have two views, both listed here:

    dense   rank = tp  + TP*cp  + TP*CP*dp    + TP*CP*DP*pp        axes tp  cp dp  pp
    expert  rank = etp + ETP*ep + ETP*EP*edp  + ETP*EP*EDP*pp      axes etp ep edp pp

with TP*CP*DP = ETP*EP*EDP, so both views have the same pipeline groups. A group over a set of axes is all ranks that
share the coordinates on the other axes. Drawn for tp 2, dp 2, pp 2:

             tp0 tp1   tp0 tp1
    pp0  dp0  0   1     dp1  2   3
    pp1  dp0  4   5     dp1  6   7
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

DENSE_AXES = ("tp", "cp", "dp", "pp")
EXPERT_AXES = ("etp", "ep", "edp", "pp")


@dataclass(frozen=True, kw_only=True, order=True)
class Cell:
    """One coordinate of the layout; one actor owns it.

    >>> str(Cell.parse("dp1.pp0"))
    'pp0.dp1.cp0.tp0'
    """

    pp: int = 0
    dp: int = 0
    cp: int = 0
    tp: int = 0

    def __str__(self) -> str:
        return f"pp{self.pp}.dp{self.dp}.cp{self.cp}.tp{self.tp}"

    @classmethod
    def parse(cls, text: str) -> Cell:
        """The cell named by ``text``, its axes in any order, an omitted axis 0; ValueError if it names none."""
        found: dict[str, int] = {}
        for part in text.split("."):
            match = re.fullmatch(r"(tp|cp|dp|pp)([0-9]+)", part)
            if match is None or match[1] in found:
                raise ValueError(f"{text!r} is not a cell; write it like pp1.dp0.tp1, each axis at most once")
            found[match[1]] = int(match[2])
        return cls(**found)


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The degrees of every axis. ``dp`` is the dense data-parallel width; the expert one, ``edp``, follows."""

    tp: int = 1
    cp: int = 1
    dp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int = 1

    def __post_init__(self) -> None:
        for axis in ("tp", "cp", "dp", "pp", "ep", "etp"):
            assert getattr(self, axis) >= 1, f"layout.{axis} must be at least 1"
        assert (self.tp * self.cp * self.dp) % (self.etp * self.ep) == 0, "etp*ep must divide tp*cp*dp"

    @property
    def edp(self) -> int:
        return self.tp * self.cp * self.dp // (self.etp * self.ep)

    @property
    def world(self) -> int:
        return self.tp * self.cp * self.dp * self.pp

    def size(self, axis: str) -> int:
        return int(getattr(self, axis))

    def rank(self, cell: Cell) -> int:
        """The rank of a cell in the dense view."""
        rank, stride = 0, 1
        for axis in DENSE_AXES:
            coordinate = getattr(cell, axis)
            assert 0 <= coordinate < self.size(axis), f"{cell} is outside of {self}"
            rank += stride * coordinate
            stride *= self.size(axis)
        return rank

    def cell(self, rank: int) -> Cell:
        """The cell of a rank in the dense view."""
        return Cell(**self._coordinates(rank, DENSE_AXES))

    def cells(self) -> tuple[Cell, ...]:
        """Every cell, in rank order."""
        return tuple(self.cell(rank) for rank in range(self.world))

    def groups(self, *axes: str) -> tuple[tuple[int, ...], ...]:
        """All groups over ``axes``, which must be of one view; members and groups with the left-most axis fastest.

        >>> Layout(tp=2, dp=2).groups("dp")
        ((0, 2), (1, 3))
        """
        view = self._view(axes)
        rest = [axis for axis in view if axis not in axes]
        groups: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.world):
            at = self._coordinates(rank, view)
            groups.setdefault(tuple(at[axis] for axis in reversed(rest)), []).append(rank)
        return tuple(tuple(groups[key]) for key in sorted(groups))

    def group_of(self, rank: int, *axes: str) -> tuple[int, ...]:
        """The group over ``axes`` that ``rank`` belongs to."""
        return next(group for group in self.groups(*axes) if rank in group)

    def _view(self, axes: Sequence[str]) -> tuple[str, ...]:
        for view in (DENSE_AXES, EXPERT_AXES):
            if set(axes) <= set(view):
                return view
        raise ValueError(f"axes {tuple(axes)} are not of one view; the views are {DENSE_AXES} and {EXPERT_AXES}")

    def _coordinates(self, rank: int, view: Sequence[str]) -> dict[str, int]:
        assert 0 <= rank < self.world, f"rank {rank} is outside of {self}"
        strides = [prod(self.size(axis) for axis in view[:i]) for i in range(len(view))]
        return {axis: rank // stride % self.size(axis) for axis, stride in zip(view, strides)}
