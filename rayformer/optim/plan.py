"""The bucket plan: where each parameter lies in a flat buffer, and how buckets of it are cut over dp.

Parameters follow each other in the order in which backward completes them, the last first. Every parameter starts, and
every shard ends, at a multiple of 1024 elements: vectorised kernels round the elements of an incomplete last vector
differently, so other cuts would change bits.

    |<------------- bucket 0 ------------->|<------------- bucket 1 ------------->|
    | p3 ... pad | p2 ..... pad |    pad   | p1 ...... pad | p0 ... pad |   pad   |
    | dp0          | dp1                   | dp0               | dp1              |      shards

A parameter that is used at both ends of the model (tied embeddings) has a bucket of its own, and so has each borrowed
use of it, after all owned ones: the two are cut alike, and their gradients are added shard by shard. Parameters of
different chunks of a rank share no bucket: their gradients are complete at different times.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

ALIGNMENT = 1024
BUCKET_ELEMENTS = 4 * 2**20
CPU_BUCKET_ELEMENTS = 2**18  # Gloo has little to gain from more, and less can hide behind the rest of backward


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
    """The elements [start, stop) of the flat buffer, reduced together; ``slots`` lie in it.

    ``borrowed`` says that its one slot is another block's parameter, whose gradient here is a part of that one's.
    ``chunk`` is the chunk of the rank that computes with them.
    """

    start: int
    stop: int
    slots: tuple[Slot, ...]
    borrowed: bool = False
    chunk: int = 0


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
    def owned(self) -> tuple[Bucket, ...]:
        """The buckets of parameters that the stage owns; they come first."""
        return tuple(bucket for bucket in self.buckets if not bucket.borrowed)

    @property
    def borrowed(self) -> tuple[Bucket, ...]:
        return tuple(bucket for bucket in self.buckets if bucket.borrowed)

    @property
    def slots(self) -> tuple[Slot, ...]:
        """The slots of the parameters that the stage owns."""
        return tuple(slot for bucket in self.owned for slot in bucket.slots)

    def bucket_of(self, name: str) -> Bucket | None:
        """The bucket of the owned parameter ``name``, if the stage owns it."""
        return next((bucket for bucket in self.owned for slot in bucket.slots if slot.name == name), None)

    def shard(self, bucket: Bucket, rank: int) -> tuple[int, int]:
        """The range of the flat buffer that dp rank ``rank`` owns of ``bucket``."""
        length = (bucket.stop - bucket.start) // self.dp
        return bucket.start + rank * length, bucket.start + (rank + 1) * length


def plan_buckets(
    parameters: Sequence[tuple[str, int]],
    *,
    dp: int,
    bucket_elements: int = BUCKET_ELEMENTS,
    rooms: Mapping[str, int] | None = None,
    alone: Collection[str] = (),
    borrowed: Sequence[tuple[str, int]] = (),
    chunks: Mapping[str, int] | None = None,
    borrowing_chunk: int = 0,
) -> BucketPlan:
    """Place ``parameters`` (name and number of elements, in model order) in buckets of at least ``bucket_elements``.

    The last bucket may be smaller. ``rooms`` are the elements to reserve for those parameters that need more than they
    have, since other tp ranks have more and all plans must be alike. Parameters in ``alone`` get buckets of their own;
    ``borrowed`` ones follow after all others. ``chunks`` are those of the parameters, 0 unless told, and
    ``borrowing_chunk`` that of the borrowed ones.

    >>> plan = plan_buckets([("a", 10), ("b", 3000)], dp=2)
    >>> [(slot.name, slot.start) for slot in plan.slots], plan.numel
    ([('b', 0), ('a', 3072)], 4096)
    """
    rooms, chunks = rooms or {}, chunks or {}
    buckets: list[Bucket] = []
    slots: list[Slot] = []
    start = at = chunk = 0

    def close(*, is_borrowed: bool) -> None:
        nonlocal start, at
        if slots:
            at = start + _up(at - start, ALIGNMENT * dp)
            buckets.append(Bucket(start=start, stop=at, slots=tuple(slots), borrowed=is_borrowed, chunk=chunk))
            start = at
            slots.clear()

    for is_borrowed, members in ((False, reversed(parameters)), (True, borrowed)):
        for name, numel in members:
            by_itself = is_borrowed or name in alone
            own_chunk = borrowing_chunk if is_borrowed else chunks.get(name, 0)
            if by_itself or own_chunk != chunk:
                close(is_borrowed=False)
            chunk = own_chunk
            slots.append(Slot(name=name, start=at, numel=numel))
            at = _up(at + max(numel, rooms.get(name, 0)), ALIGNMENT)
            if by_itself or at - start >= bucket_elements:
                close(is_borrowed=is_borrowed)
        close(is_borrowed=False)
    return BucketPlan(buckets=tuple(buckets), dp=dp)


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
