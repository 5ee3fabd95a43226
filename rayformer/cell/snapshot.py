"""A cell's snapshots: its own state copied into slots outside of its process, and taken back from there."""

from __future__ import annotations

import math
import mmap
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict
from typing import Any, Literal

import torch
import xxhash

from rayformer.cell.build import Cell
from rayformer.cell.process import environment
from rayformer.ckpt.slots import (
    NUM_ANCHORS,
    NUM_PINNED,
    NUM_RECENT,
    Cadence,
    IndexEntry,
    SlotFile,
    Snapshot,
    dump_index,
    holdings_of,
)
from rayformer.errors import CollectiveError
from rayformer.events import StepReport, plain
from rayformer.optim.scaler import LossScale
from rayformer.shards import plan_transfers

PIECE = 1 << 18  # elements that are copied at a time
SHARE = 0.01  # of a step, for snapshots
LOOK_EVERY_S = 0.005  # whether the checkpoint before is written
ANCHOR_S, COPIED_BYTES_PER_S = 2.0, 50e6  # between two anchors there is time to make a copy on another node


def slot_index(cell: Cell) -> list[IndexEntry]:
    """What lies where in a snapshot of ``cell``."""
    return [IndexEntry(tensor=s.tensor, box=s.box, start=s.start) for s in cell.optimizer.owned_state()]


def slot_bytes(cell: Cell, *, is_copied: bool) -> int:
    """The size of the file that holds the slots of ``cell``; more of them where another node makes copies."""
    return SlotFile.bytes_needed(_payload_bytes(cell), len(dump_index(slot_index(cell))), _num_slots(is_copied))


class Snapshots:
    """Takes snapshots of ``cell`` into ``memory`` after every ``every`` steps, auto: as often as costs little.

    Where it ``is_copied`` to another node, some steps are anchors. ``more`` gives further small values of each.
    """

    def __init__(
        self,
        cell: Cell,
        memory: mmap.mmap,
        *,
        every: int | Literal["auto"],
        is_copied: bool = False,
        more: Callable[[], dict[str, Any]] = dict,
    ) -> None:
        self._cell, self._more = cell, more
        self._environment = environment(cell.groups.device)
        self._is_auto, self._is_copied = every == "auto", is_copied
        first = 1 if every == "auto" else every
        self._first = Cadence(every=first, anchor_every=first if is_copied else 0)
        self.seconds = 0.0
        self._use(memory)

    def rehouse(self, memory: mmap.mmap) -> None:
        """Take the next snapshots into other memory, with all that there is so far.

        Another thread may be taking one: half of it is copied, and its checksum says so.
        """
        new, old = (torch.frombuffer(m, dtype=torch.uint8) for m in (memory, self._memory))
        new[: len(old)].copy_(old)
        self._use(memory)

    def _use(self, memory: mmap.mmap) -> None:
        """What the process before this one left there stays, and when it took snapshots."""
        self._memory, self.file = memory, SlotFile(memory)
        self.file.prepare(slot_index(self._cell), _payload_bytes(self._cell), _num_slots(self._is_copied), self._first)
        self.cadence = self.file.cadence

    def is_due(self, step: int) -> bool:
        """Whether a snapshot is to be taken after ``step``."""
        return self.cadence.is_due(step)

    def take(self) -> None:
        """Copy the state as it is now, after the step that ``cell.position`` says."""
        cell, started = self._cell, time.perf_counter()
        position, file = cell.position, self.file
        slot = file.begin(position.step)
        checksum = _copy(cell.optimizer.flat_state(), file.payload(slot))
        extra = {
            "updates": cell.optimizer.num_updates,
            "loss_scale": asdict(cell.optimizer.loss_scale),
            "consumed_samples": position.consumed_samples,
            "skipped_in_row": position.skipped_in_row,
            "report": None if position.report is None else plain(position.report),
            "environment": self._environment,
            "samples": None if cell.training is None else cell.training.num_samples,
            **self._more(),
        }
        is_anchor = self.cadence.is_anchor(position.step)
        file.commit(
            slot,
            step=position.step,
            generation=cell.groups.generation,
            extra=extra,
            is_anchor=is_anchor,
            checksum=checksum,
        )
        self.seconds = time.perf_counter() - started

    @property
    def is_pinned(self) -> bool:
        """Whether a checkpoint of another step is still being written from here."""
        return any(step != self._cell.position.step for step in self.file.pinned())

    def pin(self, is_given_up: Callable[[], bool]) -> None:
        """Keep the state as it is now for a checkpoint, once the one before it is written.

        Raises CollectiveError if the generation ``is_given_up`` meanwhile.
        """
        step, generation = self._cell.position.step, self._cell.groups.generation
        while self.is_pinned:
            if is_given_up():
                raise CollectiveError("the generation was given up while a checkpoint was written")
            time.sleep(LOOK_EVERY_S)
        if not self.file.pin(step, generation):
            self.take()
            self.file.pin(step, generation)

    def agree(self, step_s: float) -> None:
        """Choose the cadence, with all cells, now that a step of ``step_s`` and a snapshot have been seen.

        With auto it is the smallest interval that costs at most ``SHARE`` of a step, or a little more, so that a
        checkpoint needs no snapshot of its own.
        """
        world, every = self._cell.groups.world, self.cadence.every
        if self._is_auto:
            every = max(1, *world.gather_values(math.ceil(self.seconds / (SHARE * step_s))))
            every = _dividing(self._cell.job.checkpoint.every, every)
        apart_s = ANCHOR_S + _payload_bytes(self._cell) / COPIED_BYTES_PER_S
        apart = max(world.gather_values(math.ceil(apart_s / (every * step_s)) if self._is_copied else 0))
        self.cadence = self.file.cadence = Cadence(every=every, anchor_every=every * apart if self._is_copied else 0)


def restore(cell: Cell, snapshots: Iterable[tuple[bytes, Snapshot]]) -> int:
    """Fill the own shard of ``cell`` from snapshots of one step, each with the index of its file; the bytes moved.

    The parameters are not gathered yet. Raises CoverageError if the snapshots leave a hole.
    """
    taken = list(snapshots)
    have = [holding for index, snapshot in taken for holding in holdings_of(index, snapshot)]
    targets = {(shard.tensor, shard.box): shard.value for shard in cell.optimizer.owned_state()}
    moved = 0
    cell.position.is_whole = False
    for transfer in plan_transfers(have, targets):
        snapshot, start = transfer.source.place
        box = transfer.source.box
        values = torch.from_numpy(snapshot.payload)[start : start + box.numel].view(box.shape)
        part = values[transfer.part.slices(box)]
        targets[transfer.tensor, transfer.target][transfer.part.slices(transfer.target)].copy_(part)
        moved += part.numel() * part.element_size()
    (extra,) = {snapshot.step: snapshot.extra for _, snapshot in taken}.values()
    cell.optimizer.num_updates = extra["updates"]
    cell.optimizer.loss_scale = LossScale(**extra["loss_scale"])
    cell.position.move_to(
        taken[0][1].step, consumed_samples=extra["consumed_samples"], skipped_in_row=extra["skipped_in_row"]
    )
    if extra["report"] is not None:
        cell.position.report = StepReport(**extra["report"])
    return moved


def _dividing(whole: int, least: int) -> int:
    """The smallest divisor of ``whole`` from ``least`` on, unless it is more than twice that."""
    divisors = (n for n in range(least, min(whole, 2 * least) + 1) if whole % n == 0)
    return next(divisors, least)


def _copy(tensors: Iterable[torch.Tensor], memory: memoryview) -> int:
    """Copy flat float32 tensors to ``memory``; its xxh3_64, of each piece while that is in the cache."""
    target, hasher = torch.frombuffer(memory, dtype=torch.float32), xxhash.xxh3_64()
    at = 0
    for flat in tensors:
        for piece in flat.split(PIECE):
            target[at : at + piece.numel()].copy_(piece)
            hasher.update(memory[4 * at : 4 * (at + piece.numel())])
            at += piece.numel()
    return int(hasher.intdigest())


def _num_slots(is_copied: bool) -> int:
    return NUM_RECENT + NUM_PINNED + (NUM_ANCHORS if is_copied else 0)


def _payload_bytes(cell: Cell) -> int:
    return sum(flat.numel() * flat.element_size() for flat in cell.optimizer.flat_state())
