"""Where a run goes on from after cells were lost: the newest step of which every cell's state is held somewhere.

A place is live memory, the cell's slot in the holder of its node, its copy in the holder of another node, or the
checkpoint that the attempt can start from, in this order.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Source = Literal["live", "holder", "second_holder", "checkpoint"]
SOURCES: tuple[Source, ...] = ("live", "holder", "second_holder", "checkpoint")


@dataclass(frozen=True, kw_only=True)
class Restore:
    """Go on after ``step``; ``sources`` says for every cell where its state of that step comes from.

    ``why`` tells what is missing if that is the checkpoint.
    """

    step: int
    sources: Mapping[str, Source]
    why: str = ""

    @property
    def source(self) -> Source:
        """The farthest place that anything comes from."""
        return max(self.sources.values(), key=SOURCES.index)


@dataclass(frozen=True, kw_only=True)
class Holdings:
    """Of which steps the state of one cell is held, by place; all are complete and verified.

    ``live`` is None for a cell whose process is gone or stopped halfway through a load.
    """

    live: int | None = None
    holder: tuple[int, ...] = ()
    second_holder: tuple[int, ...] = ()

    def source_of(self, step: int) -> Source | None:
        """The nearest place that has the state of ``step``; None if there is none but perhaps a checkpoint."""
        if self.live == step:
            return "live"
        if step in self.holder:
            return "holder"
        return "second_holder" if step in self.second_holder else None

    @property
    def steps(self) -> frozenset[int]:
        live = () if self.live is None else (self.live,)
        return frozenset((*live, *self.holder, *self.second_holder))


@dataclass(frozen=True, kw_only=True)
class Held:
    """The holdings of all cells, and the step of the newest checkpoint, 0 for the initial state, which needs none."""

    cells: Mapping[str, Holdings] = field(default_factory=dict)
    checkpoint: int = 0


def choose_restore(held: Held) -> Restore:
    """The newest step that every cell can go on from. A checkpoint restores all cells or none."""
    common = frozenset.intersection(*(holdings.steps for holdings in held.cells.values()))
    newest = max(common, default=-1)
    if newest < held.checkpoint:
        return Restore(step=held.checkpoint, sources=dict.fromkeys(held.cells, "checkpoint"), why=_why(held))
    sources: dict[str, Source] = {}
    for cell, holdings in held.cells.items():
        source = holdings.source_of(newest)
        assert source is not None
        sources[cell] = source
    return Restore(step=newest, sources=sources)


def _why(held: Held) -> str:
    """What keeps the cells from going on after a step that the checkpoint, or the beginning, does not have."""
    empty = [cell for cell, holdings in held.cells.items() if not holdings.steps]
    if empty:
        return f"no memory of {', '.join(empty)} is left"
    newest = {cell: max(holdings.steps) for cell, holdings in held.cells.items()}
    oldest = {cell: min(holdings.steps) for cell, holdings in held.cells.items()}
    behind, ahead = min(newest, key=newest.__getitem__), max(oldest, key=oldest.__getitem__)
    return (
        f"no step later than {held.checkpoint} is held of every cell: of {behind} none after {newest[behind]},"
        f" of {ahead} none before {oldest[ahead]}"
    )
