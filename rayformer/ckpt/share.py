"""Who writes what: every box of the state once, in files of bounded size, the bytes dealt evenly to the writers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import TypeVar

from rayformer.ckpt.slots import IndexEntry
from rayformer.shards import Box

BYTES = 4  # of an element: state is float32

Writer = TypeVar("Writer", bound=str)


def plan_files(
    held: Mapping[Writer, Sequence[IndexEntry]], *, max_file_bytes: int
) -> dict[Writer, list[list[IndexEntry]]]:
    """The files of each writer, by what it writes into them; ``held`` is what each has of the state.

    A box that several hold is written by one of them: the largest are dealt first, each to whoever has the least so
    far. Boxes of more than ``max_file_bytes`` are cut.
    """
    holders: defaultdict[tuple[str, Box], dict[Writer, IndexEntry]] = defaultdict(dict)
    for writer, entries in held.items():
        for entry in entries:
            holders[entry.tensor, entry.box][writer] = entry
    load: dict[Writer, int] = dict.fromkeys(held, 0)
    mine: dict[Writer, list[IndexEntry]] = {writer: [] for writer in held}
    # What only one has comes first, as there is no choice.
    for having in sorted(holders.values(), key=lambda having: (len(having) > 1, -_numel(having))):
        writer = min(having, key=lambda w: load[w])
        load[writer] += _numel(having)
        mine[writer].append(having[writer])
    most = max(1, max_file_bytes // BYTES)
    return {writer: list(_files(sorted(entries, key=lambda e: e.start), most)) for writer, entries in mine.items()}


def shapes_of(held: Iterable[Sequence[IndexEntry]]) -> dict[str, tuple[int, ...]]:
    """The shapes of the whole tensors that ``held`` covers."""
    shapes: dict[str, tuple[int, ...]] = {}
    for entries in held:
        for entry in entries:
            shapes[entry.tensor] = tuple(map(max, entry.box.hi, shapes.get(entry.tensor, entry.box.hi)))
    return shapes


def cut(entry: IndexEntry, most: int) -> Iterator[IndexEntry]:
    """``entry`` in pieces of at most ``most`` elements, each of which lies in one piece in memory."""
    lo, hi = entry.box.lo, entry.box.hi
    if entry.box.numel <= most:
        yield entry
        return
    dim = next(d for d, n in enumerate(entry.box.shape) if n > 1)
    row = prod(entry.box.shape[dim + 1 :])
    step = max(1, most // row)
    for first in range(lo[dim], hi[dim], step):
        box = Box(
            lo=(*lo[:dim], first, *lo[dim + 1 :]),
            hi=(*hi[:dim], min(first + step, hi[dim]), *hi[dim + 1 :]),
        )
        yield from cut(replace(entry, box=box, start=entry.start + (first - lo[dim]) * row), most)


def _files(entries: Sequence[IndexEntry], most: int) -> Iterator[list[IndexEntry]]:
    file: list[IndexEntry] = []
    room = most
    for entry in entries:
        for piece in cut(entry, most):
            if piece.box.numel > room:
                yield file
                file, room = [], most
            file.append(piece)
            room -= piece.box.numel
    if file:
        yield file


def _numel(having: Mapping[Writer, IndexEntry]) -> int:
    return next(iter(having.values())).box.numel
