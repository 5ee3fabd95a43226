"""Gradients of weights that a function of our own leaves for later: see stages.halves.

What autograd itself computes can be run in two halves from outside. A function written in Python computes all its
gradients in one call; one that asks here can be told to leave those of its weights.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeAlias

import torch

Grads: TypeAlias = Sequence[torch.Tensor | None]
Left: TypeAlias = tuple[Sequence[torch.Tensor | None], Callable[[], Grads]]

_leaving: tuple[Collection[torch.Tensor], list[Left]] | None = None  # seen by autograd's threads too


def is_left(weights: Sequence[torch.Tensor | None]) -> bool:
    """Whether the gradients of all ``weights`` are to be left for later."""
    return _leaving is not None and all(weight is None or weight in _leaving[0] for weight in weights)


def now_or_later(weights: Sequence[torch.Tensor | None], compute: Callable[[], Grads]) -> Grads:
    """The gradients of ``weights`` that ``compute`` gives, or nothing if they are left for later."""
    if _leaving is None or not is_left(weights):
        return compute()
    _leaving[1].append((weights, compute))
    return [None] * len(weights)


@contextmanager
def left_for_later(weights: Collection[torch.Tensor]) -> Iterator[list[Left]]:
    """Collects what functions leave of the gradients of ``weights`` in a backward inside."""
    global _leaving
    before, left = _leaving, list[Left]()
    _leaving = (weights, left)
    try:
        yield left
    finally:
        _leaving = before
