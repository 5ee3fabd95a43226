"""Which cells compute much longer than their peers, waiting excluded. Pure: what was seen is given.

Peers are the cells of the same pipeline stage, which all do the same work; a stage with a single cell has none.
"""

from __future__ import annotations

import statistics
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from rayformer.layout import Cell

SLOW = 2.0  # times the compute time of its peers
RECOVERED = 1.5
SAMPLES = 16  # steps, of which the median counts


@dataclass(frozen=True, kw_only=True)
class Worked:
    """The last step that a cell has done, and the seconds that it computed in it."""

    step: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Straggler:
    """``cell`` computes ``compute_s`` in a step, and its peers ``peers_s`` in the median."""

    cell: str
    step: int
    compute_s: float
    peers_s: float

    @property
    def message(self) -> str:
        return (
            f"{self.cell} computes {self.compute_s:.3f} s a step, {self.compute_s / self.peers_s:.1f} times as long as"
            " the other cells of its stage, which wait for it"
        )


class StragglerJudge:
    """Looks at all cells again and again; a straggler is told once, and again only after it had kept up."""

    def __init__(self) -> None:
        self._seconds: defaultdict[str, deque[float]] = defaultdict(lambda: deque(maxlen=SAMPLES))
        self._last: dict[str, int] = {}
        self._told: set[str] = set()

    def start_generation(self) -> None:
        """Cells may have other processes and other places from now on."""
        self._seconds.clear()
        self._last.clear()
        self._told.clear()

    def judge(self, cells: Mapping[str, Worked]) -> list[Straggler]:
        """The cells that have come to be stragglers."""
        for cell, worked in cells.items():
            if worked.step > self._last.setdefault(cell, worked.step):  # its first step may compile
                self._last[cell] = worked.step
                self._seconds[cell].append(worked.seconds)
        return list(self._new_stragglers(cells))

    def _new_stragglers(self, cells: Mapping[str, Worked]) -> Iterator[Straggler]:
        usual = {cell: statistics.median(seconds) for cell, seconds in self._seconds.items() if len(seconds) == SAMPLES}
        for cell, compute_s in usual.items():
            peers = [usual[peer] for peer in usual if peer != cell and Cell.parse(peer).pp == Cell.parse(cell).pp]
            if not peers:
                continue
            peers_s = statistics.median(peers)
            if compute_s < RECOVERED * peers_s:
                self._told.discard(cell)
            elif compute_s > SLOW * peers_s and cell not in self._told:
                self._told.add(cell)
                yield Straggler(cell=cell, step=cells[cell].step, compute_s=compute_s, peers_s=peers_s)
