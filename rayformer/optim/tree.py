"""The fixed order in which virtual ranks are added up, whatever the number of actors.

The leaves 0..n-1 are virtual ranks. A node over [lo, hi) has its left child over the largest power of two of leaves
below hi - lo. For 6 leaves:

                 [0,6)
            [0,4)     [4,6)
        [0,2) [2,4)   4   5
        0  1  2  3

An actor owns a contiguous run of leaves, folds the nodes that lie inside it, and sends the largest ones; whoever
receives them goes on folding along the same tree, so the additions are the same for every number of actors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from rayformer.shards import share_start


@dataclass(frozen=True, order=True, slots=True)
class Node:
    """The leaves from ``lo`` up to, not including, ``hi``."""

    lo: int
    hi: int

    def children(self) -> tuple[Node, Node]:
        """The two nodes that are added to make this one; only for nodes of more than one leaf."""
        middle = self.lo + (1 << (self.hi - self.lo - 1).bit_length() - 1)
        return Node(self.lo, middle), Node(middle, self.hi)


def owned_leaves(num_leaves: int, size: int, rank: int) -> range:
    """The leaves that member ``rank`` of ``size`` runs; shares differ by at most one."""
    return range(share_start(num_leaves, size, rank), share_start(num_leaves, size, rank + 1))


def subtrees(num_leaves: int, leaves: range) -> tuple[Node, ...]:
    """The largest nodes of the tree that lie inside ``leaves``, in ascending order."""

    def inside(node: Node) -> list[Node]:
        if node.lo >= leaves.stop or node.hi <= leaves.start:
            return []
        if leaves.start <= node.lo and node.hi <= leaves.stop:
            return [node]
        return [part for child in node.children() for part in inside(child)]

    return tuple(inside(Node(0, num_leaves)))


Value = TypeVar("Value")


class Fold(Generic[Value]):
    """Adds values along the tree as they arrive in ascending order; ``add(left, right)`` gives their sum.

    >>> fold = Fold(3, lambda a, b: f"({a}+{b})")
    >>> for leaf, value in enumerate("abc"):
    ...     fold.push(Node(leaf, leaf + 1), value)
    >>> fold.parts
    [(Node(lo=0, hi=3), '((a+b)+c)')]
    """

    def __init__(self, num_leaves: int, add: Callable[[Value, Value], Value]) -> None:
        self._root = Node(0, num_leaves)
        self._add = add
        self.parts: list[tuple[Node, Value]] = []

    def push(self, node: Node, value: Value) -> None:
        """Take the value of ``node``, and add up every node that is now complete."""
        while self.parts and self._joins(self.parts[-1][0], node):
            left, left_value = self.parts.pop()
            node, value = Node(left.lo, node.hi), self._add(left_value, value)
        self.parts.append((node, value))

    def _joins(self, left: Node, right: Node) -> bool:
        """Whether the two are the children of one node of the tree."""
        at = self._root
        while at.hi - at.lo > 1:
            first, second = at.children()
            if (first, second) == (left, right):
                return True
            at = first if left.lo < first.hi else second
        return False
