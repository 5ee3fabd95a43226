"""Marks that a fault has taken place, in files that outlive the process it befell and everything else of its run.

So the fault is proven, and whoever takes over does not repeat it. Each cell has a file, with a line for each time.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from rayformer.cell.progress import Phase
from rayformer.observe.jsonl import JsonlWriter, read_lines


@dataclass(frozen=True, kw_only=True)
class Mark:
    """Fault ``number`` has taken place in ``phase`` of ``step`` at ``time``, in Unix seconds."""

    number: int
    step: int
    phase: Phase
    time: float


class Marks:
    """The marks of ``cell`` in ``folder``; those of the processes before this one count too."""

    def __init__(self, folder: Path, cell: str, clock: Callable[[], float] = time.time) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{cell}.jsonl"
        self._used = Counter(line["number"] for line in read_lines(path))
        self._lines, self._clock = JsonlWriter(path), clock

    def used(self, number: int) -> int:
        """How often fault ``number`` has taken place."""
        return self._used[number]

    def mark(self, number: int, step: int, phase: Phase) -> None:
        """Fault ``number`` takes place now."""
        self._lines.append(asdict(Mark(number=number, step=step, phase=phase, time=self._clock())))
        self._used[number] += 1


def read_marks(folder: Path) -> list[Mark]:
    """The marks of all cells in ``folder``, in the order of their time."""
    lines = (line for path in folder.glob("*.jsonl") for line in read_lines(path))
    return sorted((Mark(**line) for line in lines), key=lambda mark: mark.time)
