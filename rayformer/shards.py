"""State in model coordinates: named global tensors, the boxes that pieces of them fill, and plans to move pieces.

A *box* is a rectangle ``[lo, hi)`` of a global tensor. A cell's part of a parameter is one block or several (the gate
half and the up half of a fused matrix), and a data-parallel rank's part of that is a flat range of it; both are told as
boxes, so that neither a file nor a plan ever knows a buffer offset, and any layout can read what any other wrote.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import prod
from typing import Generic, Literal, TypeVar

KINDS = ("master", "exp_avg", "exp_avg_sq")


@dataclass(frozen=True, kw_only=True, slots=True)
class Box:
    """The rectangle from corner ``lo`` up to, not including, corner ``hi``."""

    lo: tuple[int, ...]
    hi: tuple[int, ...]

    def __str__(self) -> str:
        return f"[{', '.join(f'{lo}:{hi}' for lo, hi in zip(self.lo, self.hi))}]"

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(h - lo for lo, h in zip(self.lo, self.hi))

    @property
    def numel(self) -> int:
        return prod(self.shape)

    def intersect(self, other: Box) -> Box | None:
        """The common part of two boxes of one tensor, or None."""
        lo = tuple(map(max, self.lo, other.lo))
        hi = tuple(map(min, self.hi, other.hi))
        return Box(lo=lo, hi=hi) if all(a < b for a, b in zip(lo, hi)) else None

    def slices(self, within: Box) -> tuple[slice, ...]:
        """Where this box lies in an array that holds the box ``within``."""
        return tuple(slice(a - base, b - base) for a, b, base in zip(self.lo, self.hi, within.lo))


def whole(shape: Sequence[int]) -> Box:
    """The box of a whole tensor."""
    return Box(lo=(0,) * len(shape), hi=tuple(shape))


@dataclass(frozen=True, kw_only=True)
class Split:
    """How a tensor is divided over an axis: along ``dim``, in units of ``unit`` rows, in ``parts`` equal blocks.

    Each block is divided by itself, and a cell holds its piece of every block one after the other: a fused gate and up
    matrix has two parts, so that each cell holds matching halves. Units that the axis does not divide go to the first
    ranks, one more each.
    """

    dim: int
    unit: int = 1
    parts: int = 1

    def bounds(self, length: int, size: int, rank: int) -> tuple[tuple[int, int], ...]:
        """The global ranges of rows along ``dim`` that ``rank`` of ``size`` holds, one per part."""
        block = length // self.parts
        units = block // self.unit
        assert block * self.parts == length and units * self.unit == block, f"{self} does not fit {length} rows"
        start, stop = (share_start(units, size, r) * self.unit for r in (rank, rank + 1))
        return tuple((p * block + start, p * block + stop) for p in range(self.parts))


def share_start(num_items: int, size: int, rank: int) -> int:
    """Where the contiguous share of ``rank`` starts when ``num_items`` are dealt to ``size``, the first get more."""
    return rank * (num_items // size) + min(rank, num_items % size)


@dataclass(frozen=True, kw_only=True)
class Init:
    """How a parameter starts: ``normal`` with standard deviation ``std``, ``ones``, ``zeros``, or as its module did."""

    kind: Literal["normal", "ones", "zeros", "module"] = "normal"
    std: float = 0.02


@dataclass(frozen=True, kw_only=True)
class ParamSpec:
    """One parameter in model coordinates: its global name and shape, its start, how tp splits it, whether it decays.

    ``partial`` says that tp ranks hold the same values but see different activations, so that each one's gradient is a
    part of the sum; ``tied`` that another block computes with the parameter too.
    """

    name: str
    shape: tuple[int, ...]
    init: Init
    split: Split | None = None
    decay: bool = True
    partial: bool = False
    tied: bool = False

    def boxes(self, tp_size: int, tp_rank: int) -> tuple[Box, ...]:
        """The boxes that one tp rank holds, in the order in which their rows follow each other in its memory."""
        if self.split is None:
            return (whole(self.shape),)
        dim = self.split.dim
        assert self.split.parts == 1 or dim == 0, "several parts follow each other in memory only along dim 0"
        return tuple(
            Box(
                lo=tuple(start if d == dim else 0 for d in range(len(self.shape))),
                hi=tuple(stop if d == dim else n for d, n in enumerate(self.shape)),
            )
            for start, stop in self.split.bounds(self.shape[dim], tp_size, tp_rank)
        )

    def local_shape(self, tp_size: int, tp_rank: int) -> tuple[int, ...]:
        """The shape of the part that one tp rank holds."""
        boxes = self.boxes(tp_size, tp_rank)
        dim = 0 if self.split is None else self.split.dim
        rows = sum(box.shape[dim] for box in boxes)
        return tuple(rows if d == dim else n for d, n in enumerate(boxes[0].shape))

    def room(self, tp_size: int) -> int:
        """Elements of the largest part that a tp rank holds: what every rank reserves, so that all have one plan."""
        return prod(self.local_shape(tp_size, 0))


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A box of a global tensor and the flat range of local memory that holds it, in row-major order."""

    box: Box
    start: int
    stop: int


def flat_pieces(boxes: Sequence[Box], start: int, stop: int) -> tuple[Piece, ...]:
    """The pieces of the flat range ``[start, stop)`` of blocks that follow each other in memory.

    Each n-dim block gives at most 2n-1 boxes. Ranges are relative to the first element of the first block.
    """
    pieces: list[Piece] = []
    offset = 0
    for block in boxes:
        lo, hi = max(start, offset) - offset, min(stop, offset + block.numel) - offset
        if lo < hi:
            at = offset + lo
            for box in _range_boxes(block, lo, hi):
                pieces.append(Piece(box=box, start=at, stop=at + box.numel))
                at += box.numel
        offset += block.numel
    return tuple(pieces)


def _range_boxes(block: Box, lo: int, hi: int) -> list[Box]:
    """The flat range [lo, hi) of a block in ascending boxes: the end of a row, whole rows, the start of a row."""
    shape = block.shape
    if not shape:
        return [block]
    if len(shape) == 1:
        return [Box(lo=(block.lo[0] + lo,), hi=(block.lo[0] + hi,))]
    row = prod(shape[1:])
    first, last = lo // row, hi // row
    inner = Box(lo=block.lo[1:], hi=block.hi[1:])

    def rows(a: int, b: int, within: Box) -> Box:
        return Box(lo=(block.lo[0] + a, *within.lo), hi=(block.lo[0] + b, *within.hi))

    if first == last:
        return [rows(first, first + 1, part) for part in _range_boxes(inner, lo % row, hi % row)]
    boxes: list[Box] = []
    if lo % row:
        boxes += [rows(first, first + 1, part) for part in _range_boxes(inner, lo % row, row)]
        first += 1
    if first < last:
        boxes.append(rows(first, last, inner))
    if hi % row:
        boxes += [rows(last, last + 1, part) for part in _range_boxes(inner, 0, hi % row)]
    return boxes


Place = TypeVar("Place", bound=Hashable)


@dataclass(frozen=True, kw_only=True)
class Holding(Generic[Place]):
    """A box of the tensor ``tensor`` (such as ``layers.3.mlp.down.weight@exp_avg``) that lies at ``place``."""

    tensor: str
    box: Box
    place: Place


@dataclass(frozen=True, kw_only=True)
class Transfer(Generic[Place]):
    """Copy ``part`` out of the holding ``source`` into the wanted box ``target``."""

    tensor: str
    source: Holding[Place]
    target: Box
    part: Box


class CoverageError(ValueError):
    """Some element of a wanted box is held nowhere, or the holdings of one tensor overlap."""


def plan_transfers(have: Iterable[Holding[Place]], want: Iterable[tuple[str, Box]]) -> tuple[Transfer[Place], ...]:
    """Which parts of which holdings fill the wanted boxes, every element exactly once.

    Raises CoverageError, naming the tensor and the box, when holdings leave a hole or overlap.
    """
    by_tensor: dict[str, list[Holding[Place]]] = {}
    for holding in have:
        by_tensor.setdefault(holding.tensor, []).append(holding)
    plan: list[Transfer[Place]] = []
    for tensor, box in want:
        sources = [(holding, holding.box.intersect(box)) for holding in by_tensor.get(tensor, ())]
        parts = [(holding, part) for holding, part in sources if part is not None]
        for (one, a), (other, b) in combinations(parts, 2):
            if a.intersect(b):
                raise CoverageError(f"{tensor}: the holdings {one.box} and {other.box} overlap")
        found = sum(part.numel for _, part in parts)
        if found != box.numel:
            raise CoverageError(f"{tensor}: the holdings have {found} of the {box.numel} elements of {box}, not all")
        plan += [Transfer(tensor=tensor, source=holding, target=box, part=part) for holding, part in parts]
    return tuple(plan)


def tensor_name(parameter: str, kind: str) -> str:
    """The name of one state tensor of a parameter; kinds are master, exp_avg and exp_avg_sq."""
    assert kind in KINDS
    return f"{parameter}@{kind}"
