"""Faults seen from the controller: those of cells are proven by their marks, the others are carried out here."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import ray

from rayformer.actors.crew import Crew
from rayformer.events import JournalEntry
from rayformer.faults.marks import read_marks
from rayformer.faults.plan import CONTROLLER_EFFECTS, Fault

logger = logging.getLogger("rayformer.faults")


class Inflictor:
    """The faults of one run. ``journal`` gets a line ``fault`` for each that takes place; cells mark theirs."""

    def __init__(
        self, faults: tuple[Fault, ...], crew: Crew, marks: Path, journal: Callable[[JournalEntry], None]
    ) -> None:
        self.faults, self._crew, self._marks, self._journal = faults, crew, marks, journal
        self._told: Counter[int] = Counter()
        self.happened: dict[str, float] = {}  # when the last fault befell each cell, Unix time

    def prove(self, generation: int) -> None:
        """Write down the marks that cells have left since the last time."""
        found = Counter[int]()
        for mark in read_marks(self._marks):
            found[mark.number] += 1
            if found[mark.number] > self._told[mark.number]:
                fault = self.faults[mark.number]
                self.happened[fault.cell] = mark.time
                self._tell(fault, step=mark.step, at=mark.phase, generation=generation)

    def on_step(self, step: int, generation: int) -> None:
        """Carry out what is due when the run tells of ``step``."""
        for fault in self.faults:
            due = fault.effect in CONTROLLER_EFFECTS and fault.is_due(step)
            if due and self._told[fault.number] < fault.times and self._carry_out(fault):
                self._tell(fault, step=step, at=fault.at, generation=generation)

    def _carry_out(self, fault: Fault) -> bool:
        """Whether there was something to do it to."""
        node = self._crew.owners[fault.cell].node
        match fault.effect:
            case "kill_standby":
                standby = self._crew.standby_on(node)
                if standby is None:
                    return False
                ray.kill(standby.actor)
            case "drop_node":
                if node == ray.get_runtime_context().get_node_id():
                    logger.warning("fault %d would drop the controller's own node, and is left out", fault.number)
                    return False
                self._crew.holders[node].drop_node.remote()
        return True

    def _tell(self, fault: Fault, *, step: int, at: str, generation: int) -> None:
        self._told[fault.number] += 1
        values = {"number": fault.number, "effect": fault.effect, "cell": fault.cell, "step": step, "at": at}
        self._journal(JournalEntry(kind="fault", generation=generation, values=values))
