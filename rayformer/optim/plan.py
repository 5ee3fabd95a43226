"""The bucket plan: where each parameter lies in a flat buffer, and how buckets of it are cut over dp.

Parameters follow each other in the order in which backward completes them, the last first. Every parameter starts, and
every shard ends, at a multiple of 1024 elements: vectorised kernels round the elements of an incomplete last vector
differently, so other cuts would change bits.

    |<------------- bucket 0 ------------->|<------------- bucket 1 ------------->|
    | p3 ... pad | p2 ..... pad |    pad   | p1 ...... pad | p0 ... pad |   pad   |
    | dp0          | dp1                   | dp0               | dp1              |      shards
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

ALIGNMENT = 1024
BUCKET_ELEMENTS = 4 * 2**20


@dataclass(frozen=True, kw_only=True, slots=True)
class Slot:
    """The elements [start, start + numel) of the flat buffer, which are parameter ``name``'s."""

    name: str
    start: int
    numel: int

    @property
    def stop(self) -> int:
        return self.start + self.numel


@dataclass(frozen=True, kw_only=True, slots=True)
class Bucket:
    """The elements [start, stop) of the flat buffer, reduced together; ``slots`` lie in it."""

    start: int
    stop: int
    slots: tuple[Slot, ...]


@dataclass(frozen=True, kw_only=True)
class BucketPlan:
    """The flat buffer of one cell: its buckets and the dp width over which each is cut into equal shards."""

    buckets: tuple[Bucket, ...]
    dp: int

    @property
    def numel(self) -> int:
        """Elements in the flat buffer, padding included."""
        return self.buckets[-1].stop if self.buckets else 0

    @property
    def slots(self) -> tuple[Slot, ...]:
        return tuple(slot for bucket in self.buckets for slot in bucket.slots)

    def shard(self, bucket: Bucket, rank: int) -> tuple[int, int]:
        """The range of the flat buffer that dp rank ``rank`` owns of ``bucket``."""
        length = (bucket.stop - bucket.start) // self.dp
        return bucket.start + rank * length, bucket.start + (rank + 1) * length


def plan_buckets(
    parameters: Sequence[tuple[str, int]], *, dp: int, bucket_elements: int = BUCKET_ELEMENTS
) -> BucketPlan:
    """Place ``parameters`` (name and number of elements, in model order) in buckets of at least ``bucket_elements``.

    The last bucket may be smaller.

    >>> plan = plan_buckets([("a", 10), ("b", 3000)], dp=2)
    >>> [(slot.name, slot.start) for slot in plan.slots], plan.numel
    ([('b', 0), ('a', 3072)], 4096)
    """
    buckets: list[Bucket] = []
    slots: list[Slot] = []
    start = at = 0
    for i, (name, numel) in enumerate(reversed(parameters)):
        slots.append(Slot(name=name, start=at, numel=numel))
        at = _up(at + numel, ALIGNMENT)
        if at - start >= bucket_elements or i == len(parameters) - 1:
            at = start + _up(at - start, ALIGNMENT * dp)
            buckets.append(Bucket(start=start, stop=at, slots=tuple(slots)))
            start, slots = at, []
    return BucketPlan(buckets=tuple(buckets), dp=dp)


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
