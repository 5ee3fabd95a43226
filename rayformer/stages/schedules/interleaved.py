"""Interleaved 1F1B: every rank holds several chunks, which makes the bubble as many times smaller.

Narayanan et al. 2021, https://arxiv.org/abs/2104.04473, section 2.2.
"""

from __future__ import annotations

from rayformer.stages.instructions import Backward, Compute, Forward


def interleaved(pp: int, chunks: int, microbatches: int, group: int | None = None) -> tuple[tuple[Compute, ...], ...]:
    """The order of forwards and backwards on each rank, which passes microbatches through its chunks in groups.

    A group of microbatches goes through one chunk after the other, forwards in ascending and backwards in descending
    order of the chunks. Groups have ``group`` microbatches where that fits, else as few as do, see ``group_size``.
    Where the microbatches divide by pp, the bubble is (pp - 1) / (microbatches * chunks) of the ideal time, and the
    first rank holds as much as pp + (pp - 1) / chunks whole ranks do of a microbatch. With 4 ranks of 2 chunks, 4
    microbatches, and a backward as long as a forward:

    pp0 F0   F1   F2   F3   F0c1 F1c1 F2c1 F3c1 .    .    .    B0c1 .    B1c1 .    B2c1 .    B3c1 B0   B1   B2   B3
    pp1 .    F0   F1   F2   F3   F0c1 F1c1 F2c1 F3c1 .    B0c1 .    B1c1 .    B2c1 .    B3c1 B0   B1   B2   B3   .
    pp2 .    .    F0   F1   F2   F3   F0c1 F1c1 F2c1 B0c1 F3c1 B1c1 .    B2c1 .    B3c1 B0   B1   B2   B3   .    .
    pp3 .    .    .    F0   F1   F2   F3   F0c1 B0c1 F1c1 B1c1 F2c1 B2c1 F3c1 B3c1 B0   B1   B2   B3   .    .    .
    """
    size = group if group and fits(group, pp, microbatches) else group_size(pp, microbatches)
    forwards = _table(chunks, microbatches, size)
    backwards = [(v, chunks - 1 - chunk) for v, chunk in forwards]
    return tuple(
        _order(forwards, backwards, warmup=min(2 * (pp - rank - 1) + (chunks - 1) * size, len(forwards)))
        for rank in range(pp)
    )


def group_size(pp: int, microbatches: int) -> int:
    """The smallest number of microbatches, pp or more, that leaves no last group of fewer than pp.

    >>> group_size(4, 8), group_size(4, 9), group_size(4, 3)
    (4, 5, 3)
    """
    return next((size for size in range(pp, microbatches) if fits(size, pp, microbatches)), microbatches)


def fits(size: int, pp: int, microbatches: int) -> bool:
    """Whether no group of ``size`` has fewer than pp microbatches: with fewer, a rank waits within the group."""
    rest = microbatches % size
    return size == microbatches or (pp <= size < microbatches and (rest == 0 or rest >= pp))


def _table(chunks: int, microbatches: int, size: int) -> list[tuple[int, int]]:
    """The microbatch and the chunk of every forward, in order."""
    return [
        (v, chunk)
        for start in range(0, microbatches, size)
        for chunk in range(chunks)
        for v in range(start, min(start + size, microbatches))
    ]


def _order(forwards: list[tuple[int, int]], backwards: list[tuple[int, int]], *, warmup: int) -> tuple[Compute, ...]:
    order: list[Compute] = [Forward(*place) for place in forwards[:warmup]]
    for forward, backward in zip(forwards[warmup:], backwards):
        order += [Forward(*forward), Backward(*backward)]
    order += [Backward(*place) for place in backwards[len(forwards) - warmup :]]
    return tuple(order)
