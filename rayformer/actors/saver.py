"""The saver: writes checkpoints straight from the memory of its node's cells, outside of their processes.

It computes nothing and imports no torch. It is a child of the controller, like the holder, and a process of its own, so
that a storage that hangs or a library that crashes takes no snapshot with it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import ray

from rayformer.actors.holder import Place
from rayformer.ckpt.manifest import ShardRecord
from rayformer.ckpt.slots import IndexEntry, SlotFile, Snapshot, map_memory
from rayformer.ckpt.storage import Folder
from rayformer.ckpt.writer import BoxValue, Written, file_name, write_file
from rayformer.errors import SnapshotError

PIN_S, LOOK_EVERY_S = 120.0, 0.01  # until every cell has come to the step
THREADS = 4  # files at a time
NICE = 10  # training comes first


@dataclass(frozen=True, kw_only=True)
class Order:
    """What a saver is to write of ``step``: of each cell, whose memory is at ``places``, these files.

    ``number`` tells this save from others; ``shapes`` are those of the whole tensors.
    """

    number: int
    folder: Folder
    step: int
    places: Mapping[str, Place]
    files: Mapping[str, list[list[IndexEntry]]]
    shapes: Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, kw_only=True)
class Share:
    """What a saver has written: its boxes, what they add to the state hash, and a snapshot's small values."""

    records: tuple[ShardRecord, ...]
    hash: int
    extra: dict[str, Any]


class Saver:
    """Writes what it is told to. One call of ``write`` at a time; the others answer meanwhile."""

    def __init__(self) -> None:
        os.nice(NICE)
        self._given_up = 0
        self._num_bytes = 0

    def indexes(self, places: Mapping[str, Place]) -> dict[str, bytes]:
        """What lies where in the slots of each cell."""
        return {cell: SlotFile(map_memory(place.path)).index_text for cell, place in places.items()}

    def write(self, order: Order) -> Share:
        """Write the files of an order, each cell's as soon as its snapshot is pinned.

        Raises SnapshotError if there is none or it did not last, and CheckpointError if the storage refuses.
        """
        files = {cell: SlotFile(map_memory(place.path)) for cell, place in order.places.items()}
        snapshots: dict[str, Snapshot] = {}
        with ThreadPoolExecutor(THREADS) as pool:
            jobs = []
            for cell, file in files.items():
                snapshots[cell] = snapshot = self._pinned(cell, file, order)
                for number, entries in enumerate(order.files[cell]):
                    boxes = [_value(snapshot, entry) for entry in entries]
                    jobs.append(pool.submit(self._write, order, file_name(cell, number), boxes))
            written = [job.result() for job in jobs]
        for cell, file in files.items():
            if order.step not in file.pinned() or file.steps()[order.step] != snapshots[cell].generation:
                raise SnapshotError(f"the snapshot of {cell} after step {order.step} went while it was written")
        extras = [snapshot.extra for snapshot in snapshots.values()]
        samples = next((extra["samples"] for extra in extras if extra["samples"]), None)
        return Share(
            records=tuple(record for part in written for record in part.records),
            hash=sum(part.hash for part in written) % 2**64,
            extra={**extras[0], "samples": samples},
        )

    @ray.method(concurrency_group="control")
    def num_bytes(self) -> int:
        """How many bytes were written so far, in files that are done."""
        return self._num_bytes

    @ray.method(concurrency_group="control")
    def give_up(self, number: int) -> None:
        """Stop waiting for what orders up to ``number`` need."""
        self._given_up = max(self._given_up, number)

    def _pinned(self, cell: str, file: SlotFile, order: Order) -> Snapshot:
        """The snapshot to be written, once the cell has come so far."""
        until = time.monotonic() + PIN_S
        while order.step not in file.pinned():
            if order.number <= self._given_up or time.monotonic() > until:
                raise SnapshotError(f"{cell} has pinned no snapshot of step {order.step}")
            time.sleep(LOOK_EVERY_S)
        return file.read(order.step)

    def _write(self, order: Order, name: str, boxes: list[BoxValue]) -> Written:
        written = write_file(order.folder, name, boxes, order.shapes)
        self._num_bytes += sum(record.num_bytes for record in written.records)
        return written


def _value(snapshot: Snapshot, entry: IndexEntry) -> BoxValue:
    values = snapshot.payload[entry.start : entry.start + entry.box.numel]
    return entry.tensor, entry.box, values.reshape(entry.box.shape)
