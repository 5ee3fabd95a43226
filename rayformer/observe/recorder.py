"""The recorder: puts what happens in a run into its files and onto its display, in the order in which it happens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rayformer.events import (
    CellDone,
    CellEvent,
    CheckpointSaved,
    JournalEntry,
    SaveDue,
    SaveFailed,
    SaveSkipped,
    SaveWaits,
    StepReport,
    StepTrace,
)
from rayformer.observe.display import Display
from rayformer.observe.journal import Journal
from rayformer.observe.metrics import MetricsFile
from rayformer.observe.rundir import RunDir
from rayformer.observe.trace import TraceFile


class Recorder:
    """Takes the events of one attempt of a run."""

    def __init__(self, files: RunDir, *, attempt: int, total_steps: int, display: Display) -> None:
        self._total_steps, self.display = total_steps, display
        self._metrics = MetricsFile(files.metrics, attempt)
        self._journal = Journal(files.journal, attempt)
        self._trace = TraceFile(files.trace)

    def journal(self, entry: JournalEntry) -> None:
        """Write one line of journal.jsonl."""
        self._journal.write(entry)

    def take(self, event: CellEvent) -> None:
        """Record and show what the cell that reports for the run has done."""
        match event:
            case StepReport():
                self._metrics.write(event)
                self.display.step(event, self._total_steps)
            case StepTrace():
                self._trace.write(event)
            case CheckpointSaved():
                values = {
                    "step": event.step,
                    "path": event.path,
                    "seconds": event.seconds,
                    "state_hash": event.state_hash,
                }
                self._journal.write(JournalEntry(kind="saved", generation=event.generation, values=values))
                self.display.saved(event)
            case SaveWaits(step=step):
                self._journal.write(JournalEntry(kind="save_waits", generation=event.generation, values={"step": step}))
            case SaveSkipped(step=step):
                values = {"step": step}
                self._journal.write(JournalEntry(kind="save_skipped", generation=event.generation, values=values))
                self.display.note(skipped(event))
            case SaveFailed(step=step, message=message):
                values = {"step": step, "message": message}
                self._journal.write(JournalEntry(kind="save_failed", generation=event.generation, values=values))
                self.display.note(failed(event))
            case SaveDue():
                pass  # it is told when it is done
            case CellDone():
                values = {"outcome": event.outcome, "step": event.step}
                self._journal.write(JournalEntry(kind="done", generation=event.generation, values=values))

    def membership(self, generation: int, cells: Mapping[str, Mapping[str, Any]]) -> None:
        """Record and show who owns which cell from now on: ``{CELL: {worker, pid, node, param_addr}}``."""
        self._journal.write(JournalEntry(kind="membership", generation=generation, values={"cells": cells}))
        self.display.membership(cells)

    def close(self) -> None:
        self.display.close()
        self._metrics.close()
        self._journal.close()


def skipped(event: SaveSkipped) -> str:
    """In words."""
    return f"no checkpoint of step {event.step}: the one before it is still being written (checkpoint.busy is skip)"


def failed(event: SaveFailed) -> str:
    """In words."""
    return f"the checkpoint of step {event.step} could not be written: {event.message}; training goes on"
