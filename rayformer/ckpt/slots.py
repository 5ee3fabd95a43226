"""A cell's snapshots in memory that outlives its process: some slots, each the cell's whole state of one step.

The newest are there for the loss of a process, which is noticed at once. Where another node keeps copies, which takes
it some time, some steps are anchors: the last two of them stay until the next one, so that a step that was copied is
still here when it is needed. One snapshot may be pinned: it stays as it is until a checkpoint of it is written.

The file is a memfd that a holder owns and the cell maps. It begins with a page of its own (how many slots of what size,
how often they are written, the cell's progress word), then comes the index, which says in model coordinates what lies
where in a slot, then the slots: a header, some small values, and the payload. A header is not valid while its slot is
written, and its checksum covers the payload, so that a half-written slot is never taken for a snapshot.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from rayformer.errors import SnapshotError
from rayformer.shards import Box, Holding

PAGE = 4096
NUM_RECENT, NUM_ANCHORS, NUM_PINNED = 2, 2, 1
EXTRA_BYTES = 256 * 1024
_MAGIC = b"rfslots1"
_FILE = struct.Struct("<8sQQQ")  # magic, slots, payload bytes, index bytes
_CADENCE = struct.Struct("<QQ")  # steps between snapshots, and between anchors
_SLOT = struct.Struct("<QQQQQQQ")  # valid, generation, step, anchor, xxh3 of payload, bytes of small values, their xxh3
CADENCE_AT, PROGRESS_AT, WORKED_AT = 512, 1024, 2048  # in the first page
_PIN_AT = 512  # in a slot's first page: 0, or one more than the generation in which it was pinned


@dataclass(frozen=True, kw_only=True)
class IndexEntry:
    """A box of one state tensor and where its float32 values start in the payload, in elements."""

    tensor: str
    box: Box
    start: int


@dataclass(frozen=True, kw_only=True)
class Cadence:
    """Steps between two snapshots, and between two anchors: a multiple, or 0 for none."""

    every: int
    anchor_every: int = 0

    def is_due(self, step: int) -> bool:
        return self.every > 0 and step % self.every == 0

    def is_anchor(self, step: int) -> bool:
        return self.anchor_every > 0 and step % self.anchor_every == 0


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """One complete slot: after which step, of which generation, with what small values; ``payload`` is flat float32."""

    step: int
    generation: int
    extra: Mapping[str, Any]
    payload: npt.NDArray[np.float32]


class SlotFile:
    """The slots in ``memory``, which is as long as ``bytes_needed`` says.

    One process writes; others may read at any time. ``payload_bytes``, the index and how many slots there are is set
    once, by ``prepare``.
    """

    def __init__(self, memory: mmap.mmap) -> None:
        self._memory = memory

    @staticmethod
    def bytes_needed(payload_bytes: int, index_bytes: int, num_slots: int) -> int:
        return PAGE + _up(index_bytes) + num_slots * (PAGE + EXTRA_BYTES + _up(payload_bytes))

    def prepare(self, index: Sequence[IndexEntry], payload_bytes: int, num_slots: int, cadence: Cadence) -> None:
        """Write the file's head, unless it is there already: slots that hold the same boxes keep their contents."""
        text = dump_index(index)
        if self.is_prepared and self.index_text == text and self._head[1:3] == (num_slots, payload_bytes):
            return
        needed = self.bytes_needed(payload_bytes, len(text), num_slots)
        assert len(self._memory) >= needed, f"{len(self._memory)} bytes for slots of {needed}"
        self._memory[: _FILE.size] = _FILE.pack(bytes(len(_MAGIC)), num_slots, payload_bytes, len(text))
        self._memory[PAGE : PAGE + len(text)] = text
        self.cadence = cadence
        for slot in range(num_slots):
            self._invalidate(slot)
        self._memory[: len(_MAGIC)] = _MAGIC  # last: what old slots have left must not be taken for headers

    @property
    def is_prepared(self) -> bool:
        return self._memory[:8] == _MAGIC

    @property
    def payload_bytes(self) -> int:
        return int(self._head[2])

    @property
    def index_text(self) -> bytes:
        return self._memory[PAGE : PAGE + self._head[3]]

    @property
    def cadence(self) -> Cadence:
        """When snapshots are due, for whoever takes over."""
        every, anchor_every = _CADENCE.unpack_from(self._memory, CADENCE_AT)
        return Cadence(every=every, anchor_every=anchor_every)

    @cadence.setter
    def cadence(self, cadence: Cadence) -> None:
        _CADENCE.pack_into(self._memory, CADENCE_AT, cadence.every, cadence.anchor_every)

    def begin(self, step: int) -> int:
        """The slot to write the snapshot of ``step`` into, which is no snapshot from now on.

        It is the oldest that is neither pinned nor one of the last two anchors.
        """
        headers = [self._header(slot) for slot in self._slots]
        free = [slot for slot, (valid, *_) in enumerate(headers) if not valid]
        same = [slot for slot, header in enumerate(headers) if header[0] and header[2] == step]
        by_age = sorted(self._slots, key=lambda slot: headers[slot][2])
        kept = [slot for slot in by_age if headers[slot][3]][-NUM_ANCHORS:]
        kept += [slot for slot in self._slots if self._is_pinned(slot)]
        slot = (same or free or [slot for slot in by_age if slot not in kept])[0]
        self._invalidate(slot)
        return slot

    def pin(self, step: int, generation: int = 0) -> bool:
        """Keep the snapshot of ``step`` as it is until ``unpin``; whether there is one."""
        for slot in self._slots:
            valid, _, found, *_ = self._header(slot)
            if valid and found == step:
                self._set_pin(slot, generation + 1)
                return True
        return False

    def unpin(self) -> None:
        """Let all snapshots be written over again."""
        for slot in self._slots:
            self._set_pin(slot, 0)

    def pinned(self) -> tuple[int, ...]:
        """The steps whose snapshots are pinned."""
        return tuple(self._header(slot)[2] for slot in self._slots if self._is_pinned(slot) and self._header(slot)[0])

    def is_pinned(self, step: int, *, generation: int) -> bool:
        """Whether the snapshot of ``step`` was pinned in ``generation`` or a later one."""
        return any(self._header(slot)[2] == step and self._pin(slot) > generation for slot in self._slots)

    def payload(self, slot: int) -> memoryview:
        """The memory of a slot's payload, to be written between ``begin`` and ``commit``."""
        start = self._slot_at(slot) + PAGE + EXTRA_BYTES
        return memoryview(self._memory)[start : start + self.payload_bytes]

    def commit(
        self,
        slot: int,
        *,
        step: int,
        generation: int,
        extra: Mapping[str, Any],
        is_anchor: bool = False,
        checksum: int | None = None,
    ) -> None:
        """Make the slot a snapshot; the header is complete before it becomes valid.

        ``checksum`` is the payload's xxh3_64, if the caller has it.
        """
        text = json.dumps(extra).encode()
        assert len(text) <= EXTRA_BYTES, f"{len(text)} bytes of small values"
        at = self._slot_at(slot)
        self._memory[at + PAGE : at + PAGE + len(text)] = text
        if checksum is None:
            checksum = xxhash.xxh3_64_intdigest(self.payload(slot))
        header = _SLOT.pack(0, generation, step, is_anchor, checksum, len(text), xxhash.xxh3_64_intdigest(text))
        self._memory[at : at + _SLOT.size] = header
        self._memory[at : at + 8] = (1).to_bytes(8, "little")

    def forget_after(self, step: int) -> None:
        """Snapshots of later steps are of a past that is left behind: they are none from now on."""
        for slot in self._slots:
            valid, _, found, *_ = self._header(slot)
            if valid and found > step:
                self._invalidate(slot)

    def steps(self) -> dict[int, int]:
        """The generation of every step that some slot says it holds; nothing is verified."""
        return {step: generation for valid, generation, step, *_ in self._headers if valid}

    def anchors(self) -> tuple[int, ...]:
        """The anchors among ``steps``."""
        return tuple(step for valid, _, step, is_anchor, *_ in self._headers if valid and is_anchor)

    def read(self, step: int) -> Snapshot:
        """The snapshot of ``step``, verified; its payload is a view. SnapshotError if there is none, or not whole."""
        for slot in self._slots:
            valid, generation, found, _, checksum, extra_bytes, extra_checksum = self._header(slot)
            if not valid or found != step:
                continue
            at = self._slot_at(slot) + PAGE
            text = self._memory[at : at + extra_bytes]
            payload = self.payload(slot)
            if (
                xxhash.xxh3_64_intdigest(payload) == checksum
                and xxhash.xxh3_64_intdigest(text) == extra_checksum
                and self._header(slot)[:3] == (1, generation, step)  # nor has it been written while it was read
            ):
                values = np.frombuffer(payload, dtype="<f4")
                return Snapshot(step=step, generation=generation, extra=json.loads(text), payload=values)
        raise SnapshotError(f"the slots hold no whole snapshot of step {step}, but of {sorted(self.steps())}")

    def _invalidate(self, slot: int) -> None:
        self._memory[self._slot_at(slot) : self._slot_at(slot) + 8] = bytes(8)
        self._set_pin(slot, 0)

    def _is_pinned(self, slot: int) -> bool:
        return self._pin(slot) > 0

    def _pin(self, slot: int) -> int:
        at = self._slot_at(slot) + _PIN_AT
        return int.from_bytes(self._memory[at : at + 8], "little")

    def _set_pin(self, slot: int, pin: int) -> None:
        at = self._slot_at(slot) + _PIN_AT
        self._memory[at : at + 8] = pin.to_bytes(8, "little")

    @property
    def _head(self) -> tuple[Any, ...]:
        return _FILE.unpack_from(self._memory)

    @property
    def _slots(self) -> range:
        return range(self._head[1]) if self.is_prepared else range(0)

    @property
    def _headers(self) -> list[tuple[int, ...]]:
        return [self._header(slot) for slot in self._slots]

    def _header(self, slot: int) -> tuple[int, ...]:
        return _SLOT.unpack_from(self._memory, self._slot_at(slot))

    def _slot_at(self, slot: int) -> int:
        _, _, payload_bytes, index_bytes = self._head
        return int(PAGE + _up(index_bytes) + slot * (PAGE + EXTRA_BYTES + _up(payload_bytes)))


def load_index(text: bytes) -> list[IndexEntry]:
    """The inverse of ``dump_index``."""
    return [
        IndexEntry(tensor=tensor, box=Box(lo=tuple(lo), hi=tuple(hi)), start=start)
        for tensor, lo, hi, start in json.loads(text)
    ]


def map_memory(path: Path) -> mmap.mmap:
    """The memory of ``path``, such as /proc/PID/fd/N; it stays as long as somebody maps it."""
    descriptor = os.open(path, os.O_RDWR)
    try:
        return mmap.mmap(descriptor, 0)
    finally:
        os.close(descriptor)


def dump_index(index: Sequence[IndexEntry]) -> bytes:
    return json.dumps([[e.tensor, e.box.lo, e.box.hi, e.start] for e in index]).encode()


def holdings_of(index_text: bytes, snapshot: Snapshot) -> Iterator[Holding[tuple[Snapshot, int]]]:
    for entry in load_index(index_text):
        yield Holding(tensor=entry.tensor, box=entry.box, place=(snapshot, entry.start))


def _up(number: int) -> int:
    return -(-number // PAGE) * PAGE
