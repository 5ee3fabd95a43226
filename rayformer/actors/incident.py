"""One incident: from the first sign of a loss to the first step after it, in the figures of its ``recovered`` line."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from rayformer.actors.assignment import Joined
from rayformer.control.failure import first_cause
from rayformer.control.states import Draining, Rebuilding, Restoring, Running, State
from rayformer.events import CellError


@dataclass(kw_only=True)
class Incident:
    """``started`` and ``reached``: when it was noticed, and which step was the last that is known to have been done.

    ``happened`` is the Unix time at which it happened, as far as that is known: from a fault's mark, or since when a
    stalled cell had not moved.
    """

    started: float
    reached: int
    noticed: float = field(default_factory=time.time)
    happened: float | None = None
    lost: dict[str, CellError] = field(default_factory=dict)  # by cell, also those lost while others were repaired
    _entered: dict[str, float] = field(default_factory=dict)
    _restoring: Restoring | None = None
    _joined: dict[str, Joined] = field(default_factory=dict)

    def enter(self, state: State, now: float) -> None:
        """The machine is in ``state`` at ``now``."""
        self._entered.setdefault(type(state).__name__, now)
        if isinstance(state, Draining | Rebuilding):
            self._entered = {name: at for name, at in self._entered.items() if name not in _LATER[type(state).__name__]}
            self.reached = max(self.reached, *(step or 0 for step in state.standing.values()), 0)
        if isinstance(state, Restoring):
            self._restoring = state
            self.lost = {**self.lost, **state.lost}
        assert not isinstance(state, Running) or self._restoring is not None

    def joined(self, cell: str, joined: Joined) -> None:
        """A cell has its state."""
        self._joined[cell] = joined

    @property
    def is_repaired(self) -> bool:
        """Whether the cells have come to run again."""
        return self._restoring is not None and "Running" in self._entered

    def values(self, now: float) -> dict[str, Any]:
        """The line's values, when the first step after it is told, or the end if there was nothing left to do."""
        restoring = self._restoring
        assert restoring is not None
        at = {
            name: self._entered.get(name, self.started) for name in ("Draining", "Rebuilding", "Restoring", "Running")
        }
        return {
            "cells": [cell for cell in restoring.cells if cell in self.lost],
            "cause": first_cause(tuple(self.lost.values())).message if self.lost else "a lost connection",
            "source": restoring.restore.source,
            **({"why": restoring.restore.why} if restoring.restore.why else {}),
            "step": restoring.restore.step,
            "steps_redone": max(0, self.reached - restoring.restore.step),
            "detect_s": None if self.happened is None else max(0.0, self.noticed - self.happened),
            "drain_s": at["Rebuilding"] - at["Draining"],
            "form_s": max((joined.seconds.get("form", 0.0) for joined in self._joined.values()), default=0.0),
            "restore_s": at["Running"] - at["Rebuilding"],
            "first_step_s": now - at["Running"],
            "total_s": now - self.started,
            "bytes_moved": sum(joined.moved_bytes for joined in self._joined.values()),
            "gather_bytes": sum(joined.gather_bytes for joined in self._joined.values()),
            "disk_bytes": sum(joined.disk_bytes for joined in self._joined.values()),
        }


_LATER = {"Draining": ("Rebuilding", "Restoring", "Running"), "Rebuilding": ("Restoring", "Running")}
