"""Marks that a fault has taken place, in memory that outlives the process it befell.

So the fault is proven, and whoever takes over does not repeat it.
"""

from __future__ import annotations

import mmap
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass

from rayformer.cell.progress import PHASES, Phase
from rayformer.faults.plan import MOST_FAULTS

_MARK = struct.Struct("<qqqd")  # how often it took place; when it last did: step, phase, Unix time
MARKS_BYTES = MOST_FAULTS * _MARK.size


@dataclass(frozen=True, kw_only=True)
class Mark:
    """A fault has taken place ``count`` times, the last time in ``phase`` of ``step`` at ``time``, in Unix seconds."""

    number: int
    count: int
    step: int
    phase: Phase
    time: float


class Marks:
    """The marks in the ``MARKS_BYTES`` of ``memory`` from ``offset`` on, which are zero at first."""

    def __init__(self, memory: mmap.mmap, offset: int, clock: Callable[[], float] = time.time) -> None:
        assert 0 <= offset <= len(memory) - MARKS_BYTES, f"{len(memory)} bytes end within the marks at {offset}"
        self._memory, self._offset, self._clock = memory, offset, clock

    def move(self, memory: mmap.mmap) -> None:
        """Go on in other memory, with all marks made so far."""
        known = self._memory[self._offset : self._offset + MARKS_BYTES]
        memory[self._offset : self._offset + MARKS_BYTES] = known
        self._memory = memory

    def used(self, number: int) -> int:
        """How often fault ``number`` has taken place."""
        return int(_MARK.unpack_from(self._memory, self._at(number))[0])

    def mark(self, number: int, step: int, phase: str) -> None:
        """Fault ``number`` takes place now; the count is written last."""
        at, count, place = self._at(number), self.used(number), PHASES.index(phase)
        _MARK.pack_into(self._memory, at, count, step, place, self._clock())
        struct.pack_into("<q", self._memory, at, count + 1)

    def read(self) -> list[Mark]:
        """The marks of all faults that have taken place."""
        entries = ((number, *_MARK.unpack_from(self._memory, self._at(number))) for number in range(MOST_FAULTS))
        return [
            Mark(number=number, count=count, step=step, phase=PHASES[place], time=at)
            for number, count, step, place, at in entries
            if count
        ]

    def _at(self, number: int) -> int:
        assert 0 <= number < MOST_FAULTS, f"there is no mark for fault {number}"
        return self._offset + number * _MARK.size
