"""The recorder: puts what happens in a run into its files and onto its display, in the order in which it happens."""

from __future__ import annotations

from rayformer.events import CellDone, CellEvent, CheckpointSaved, JournalEntry, StepReport
from rayformer.observe.display import Display
from rayformer.observe.journal import Journal
from rayformer.observe.metrics import MetricsFile, read_metrics
from rayformer.observe.rundir import RunDir
from rayformer.observe.summary import summary


class Recorder:
    """Takes the events of one attempt of a run."""

    def __init__(self, files: RunDir, *, attempt: int, total_steps: int, display: Display) -> None:
        self._files, self._total_steps, self.display = files, total_steps, display
        self._metrics = MetricsFile(files.metrics, attempt)
        self._journal = Journal(files.journal, attempt)

    def journal(self, entry: JournalEntry) -> None:
        """Write one line of journal.jsonl."""
        self._journal.write(entry)

    def take(self, event: CellEvent) -> None:
        """Record and show what the cell that reports for the run has done."""
        match event:
            case StepReport():
                self._metrics.write(event)
                self.display.step(event, self._total_steps)
            case CheckpointSaved():
                values = {"step": event.step, "path": event.path, "seconds": event.seconds}
                self._journal.write(JournalEntry(kind="saved", generation=event.generation, values=values))
                self.display.saved(event)
            case CellDone():
                values = {"outcome": event.outcome, "step": event.step}
                self._journal.write(JournalEntry(kind="done", generation=event.generation, values=values))

    def summary(self, done: CellDone) -> str:
        """What the run tells at its end."""
        lines = read_metrics(self._files.metrics)
        return summary(done, total_steps=self._total_steps, lines=lines, metrics=self._files.metrics)

    def close(self) -> None:
        self.display.close()
        self._metrics.close()
        self._journal.close()
