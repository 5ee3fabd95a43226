"""The holder: owns the memory of its node in which cells keep their snapshots, and looks at what they are doing.

It computes nothing and imports no torch. It is a child of the controller and has no accelerator. A cell's memory is a
memfd, which other processes of the node open by this process's number; it stays as long as one of them has it.
"""

from __future__ import annotations

import mmap
import os
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import psutil
import ray

from rayformer.cell.progress import Word, forget_word, read_word, read_worked
from rayformer.ckpt.slots import NUM_ANCHORS, SlotFile, Snapshot
from rayformer.control.straggle import Worked
from rayformer.errors import RunError, SnapshotError

PULL_EVERY_S = 0.1
_CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True, kw_only=True)
class Copy:
    """One snapshot by value, with the index of its file."""

    index: bytes
    step: int
    generation: int
    extra: dict[str, Any]
    payload: npt.NDArray[np.float32]

    @property
    def snapshot(self) -> Snapshot:
        return Snapshot(step=self.step, generation=self.generation, extra=self.extra, payload=self.payload)


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a cell's memory is: a file of the holder's process."""

    pid: int
    descriptor: int

    @property
    def path(self) -> Path:
        return Path(f"/proc/{self.pid}/fd/{self.descriptor}")


@dataclass(frozen=True, kw_only=True)
class Sight:
    """What is seen of a cell from outside: its word, how old that is, its last step, whether its process is stopped."""

    word: Word
    worked: Worked
    age_s: float
    is_stopped: bool


class Holder:
    """The memory of one node, and copies of what other holders have, which it fetches by itself."""

    def __init__(self) -> None:
        self._memory: dict[str, tuple[int, mmap.mmap]] = {}
        self._copies: dict[str, list[Copy]] = {}
        self._sources: list[Any] = []
        self._pids: dict[str, int] = {}
        self._lock = threading.Lock()

    def reserve(self, cell: str, num_bytes: int, pid: int) -> Place:
        """Where ``cell``'s memory is, at least ``num_bytes`` long; what is in it from before stays, but for the word.

        Raises RunError if the node has not that much memory left, beside what others were promised.
        """
        with self._lock:
            known = self._memory.get(cell)
            if known is not None and self._pids[cell] != pid:
                forget_word(known[1])
            self._pids[cell] = pid
            if known is None or len(known[1]) < num_bytes:
                self._drop(cell)
                self._check_room(cell, num_bytes)
                descriptor = os.memfd_create(f"rayformer {cell}")
                os.ftruncate(descriptor, num_bytes)
                self._memory[cell] = descriptor, mmap.mmap(descriptor, num_bytes)
            return Place(pid=os.getpid(), descriptor=self._memory[cell][0])

    def forget_after(self, step: int) -> None:
        """Copies of later steps are of a past that is left behind. Cells forget their own slots themselves."""
        for cell, copies in list(self._copies.items()):
            self._copies[cell] = [copy for copy in copies if copy.step <= step]

    def survey(self) -> tuple[dict[str, tuple[int, ...]], dict[str, tuple[int, ...]]]:
        """Of which steps there is a whole snapshot of each cell: in its own slots, and as copies."""
        with self._lock:
            own = {cell: _whole_steps(memory) for cell, (_, memory) in self._memory.items()}
            return own, {cell: tuple(copy.step for copy in copies) for cell, copies in self._copies.items()}

    def fetch(self, cell: str, step: int) -> Copy:
        """The snapshot of ``cell`` after ``step`` by value. Raises SnapshotError if there is none."""
        for copy in self._copies.get(cell, ()):
            if copy.step == step:
                return copy
        return self._copy(cell, step)

    def places(self, cells: list[str]) -> dict[str, Place]:
        """Where the memory of ``cells`` is. Raises SnapshotError for one that has none here."""
        with self._lock:
            for cell in cells:
                if cell not in self._memory:
                    raise SnapshotError(f"this node holds no memory of {cell}")
            return {cell: Place(pid=os.getpid(), descriptor=self._memory[cell][0]) for cell in cells}

    def have_pinned(self, cells: list[str], step: int, generation: int) -> bool:
        """Whether all of ``cells`` have pinned their snapshot of ``step`` in ``generation`` or a later one."""
        with self._lock:
            return all(
                cell in self._memory and SlotFile(self._memory[cell][1]).is_pinned(step, generation=generation)
                for cell in cells
            )

    def unpin(self) -> None:
        """Let every snapshot be written over again: the save that some were pinned for has ended."""
        for _, memory in list(self._memory.values()):
            with suppress(ValueError):  # closed meanwhile
                SlotFile(memory).unpin()

    def anchors(self) -> dict[str, int]:
        """The newest anchor in each cell's slots."""
        newest = {}
        for cell, (_, memory) in list(self._memory.items()):
            with suppress(ValueError):  # closed meanwhile
                if anchors := SlotFile(memory).anchors():
                    newest[cell] = max(anchors)
        return newest

    def keep_copies_of(self, holders: list[Any]) -> None:
        """Fetch the anchors of ``holders``' cells from now on, in the background."""
        first = not self._sources
        self._sources = list(holders)
        if first and holders:
            threading.Thread(target=self._pull_forever, daemon=True).start()

    def look(self) -> dict[str, Sight]:
        """What is seen of every cell whose process lives: a dead one's word would be held against its successor."""
        seen, now = {}, time.monotonic()
        for cell, (_, memory) in list(self._memory.items()):
            with suppress(ValueError):  # closed meanwhile
                word, status = read_word(memory), _status(self._pids[cell])
                if word.count and status not in _GONE:
                    stopped = status == psutil.STATUS_STOPPED
                    worked = read_worked(memory)
                    seen[cell] = Sight(word=word, worked=worked, age_s=now - word.time, is_stopped=stopped)
        return seen

    @ray.method(concurrency_group="tether")
    def tether(self) -> None:
        """Never returns; its failure is the news of this process's death."""
        threading.Event().wait()

    def drop_node(self) -> None:
        """Kill the raylet of this node, and with it everything on it: a fault, for tests."""
        raylet = psutil.Process().parent()
        assert raylet is not None and "raylet" in raylet.name(), f"{raylet} is no raylet"
        raylet.kill()

    def _pull_forever(self) -> None:
        while True:
            for holder in self._sources:
                with suppress(ray.exceptions.RayError):
                    for cell, step in ray.get(holder.anchors.remote()).items():
                        if all(copy.step != step for copy in self._copies.get(cell, ())):
                            found = ray.get(holder.fetch.remote(cell, step))
                            copy = replace(found, payload=found.payload.copy())  # out of Ray's object store
                            self._copies[cell] = [*self._copies.get(cell, ()), copy][-NUM_ANCHORS:]
            time.sleep(PULL_EVERY_S)

    def _copy(self, cell: str, step: int) -> Copy:
        if cell not in self._memory:
            raise SnapshotError(f"this node holds no memory of {cell}")
        file = SlotFile(self._memory[cell][1])
        found = file.read(step)
        copy = Copy(
            index=file.index_text,
            step=step,
            generation=found.generation,
            extra=dict(found.extra),
            payload=found.payload.copy(),
        )
        file.read(step)  # it may have been written again meanwhile
        return copy

    def _check_room(self, cell: str, num_bytes: int) -> None:
        """Memory is taken when it is written first, so that what was promised before counts as far as it was not."""
        promised = sum(len(memory) - _touched_bytes(descriptor) for descriptor, memory in self._memory.values())
        free = free_memory() - promised
        if num_bytes > free:
            raise RunError(
                f"the snapshots of {cell} take {num_bytes / 2**30:.1f} GiB of host memory, and its node has"
                f" {max(free, 0) / 2**30:.1f} GiB left beside those of {len(self._memory)} other cells; use a wider"
                " layout, or recovery.snapshot_every=0"
            )

    def _drop(self, cell: str) -> None:
        if cell in self._memory:
            descriptor, memory = self._memory.pop(cell)
            os.close(descriptor)
            with suppress(BufferError):  # somebody still looks at it
                memory.close()


def _whole_steps(memory: mmap.mmap) -> tuple[int, ...]:
    file, whole = SlotFile(memory), []
    for step in file.steps():
        with suppress(SnapshotError):
            whole.append(file.read(step).step)
    return tuple(whole)


def _touched_bytes(descriptor: int) -> int:
    return os.fstat(descriptor).st_blocks * 512


def free_memory() -> int:
    """Bytes that this machine, or the control group that this process is in, has left."""
    free = psutil.virtual_memory().available
    with suppress(OSError, ValueError):  # no such file without cgroups v2, and "max" without a limit
        limit = int((_CGROUP / "memory.max").read_text())
        free = min(free, limit - int((_CGROUP / "memory.current").read_text()))
    return free


_GONE = (psutil.STATUS_DEAD, psutil.STATUS_ZOMBIE)


def _status(pid: int) -> str:
    try:
        return psutil.Process(pid).status()
    except psutil.NoSuchProcess:
        return psutil.STATUS_DEAD
