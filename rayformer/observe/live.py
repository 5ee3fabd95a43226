"""The live display: a picture of the run that stays at the bottom of a terminal.

    tiny   generation 1   http://127.0.0.1:8265                              0:00:09
    step 120/200  ━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━╺━━━━━━━━━━━━━━━━━━━━  0:00:04 left
    loss 2.2039   held-out 2.4100 (step 100)   40,960 tokens/s   0.050 s a step
    5.56 ██▇▇▇▆▆▆▅▅▅▅▅▄▄▄▄▄▃▃▃▃▃▃▃▂▂▂▂▂▂▂▂▂▂▂▁▁▁▁▁▁▁▁▁▁▁▁▁▁ 2.20
    saved step 100: runs/tiny/checkpoints/step-000000100
    cell             worker         pid  node    step
    pp0.dp0.cp0.tp0  worker-0000  12000  node-a   120
    pp0.dp0.cp0.tp1  worker-0001  12001  node-a   120
    and 2 more

Step time and tokens/s are means over the last steps; losses are those of the last step.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta
from statistics import fmean
from typing import Any, TextIO

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from rayformer.events import CheckpointSaved, StepReport
from rayformer.observe.curve import Curve

NUM_RECENT = 20
MAX_NODE_WIDTH = 24  # a node may be known by 56 hex digits, which would squeeze the other columns at 80


class LiveDisplay:
    """Redraws ``Screen`` four times a second, also while nothing happens; notes scroll by above it."""

    def __init__(
        self, out: TextIO, *, run: str, dashboard: str | None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._clock = clock
        self._screen = Screen(run=run, dashboard=dashboard)
        self._started_at = clock()
        self._console = Console(file=out, force_terminal=True)
        self._live = Live(console=self._console, get_renderable=self._picture)
        self._live.start()

    def note(self, text: str) -> None:
        self._console.print(Text(text))

    def membership(self, cells: Mapping[str, Mapping[str, Any]]) -> None:
        self._screen = replace(self._screen, cells=dict(cells))

    def step(self, report: StepReport, total_steps: int) -> None:
        self._screen = self._screen.after(report, total_steps)

    def saved(self, event: CheckpointSaved) -> None:
        self._screen = replace(self._screen, saved=event)

    def close(self) -> None:
        """Leaves the last picture on the terminal."""
        self._live.stop()

    def _picture(self) -> Screen:
        return replace(self._screen, elapsed_s=self._clock() - self._started_at)


@dataclass(frozen=True, kw_only=True)
class Screen:
    """What the live display shows, as a value that rich can draw at any size."""

    run: str
    dashboard: str | None = None
    elapsed_s: float = 0.0
    cells: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    total_steps: int = 0
    recent: tuple[StepReport, ...] = ()
    evaluated: StepReport | None = None
    saved: CheckpointSaved | None = None
    curve: Curve = field(default_factory=Curve)
    first_loss: float | None = None

    def after(self, report: StepReport, total_steps: int) -> Screen:
        """The screen once ``report`` is known."""
        finite = math.isfinite(report.loss)
        return replace(
            self,
            total_steps=total_steps,
            recent=(*self.recent, report)[-NUM_RECENT:],
            evaluated=self.evaluated if report.eval_loss is None else report,
            curve=self.curve.add(report.loss) if finite else self.curve,
            first_loss=report.loss if self.first_loss is None and finite else self.first_loss,
        )

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        lines = [self._title(), *self._progress(options)]
        yield from lines
        if self.cells:
            yield self._table(max_rows=console.height - len(lines) - 4)

    def _title(self) -> Table:
        left = Text(self.run, style="bold")
        if self.recent:
            left.append(f"   generation {self.recent[-1].generation}", style="not bold")
        if self.dashboard:
            left.append(f"   {self.dashboard}", style="not bold dim")
        return _spread(left, Text(_hms(self.elapsed_s), style="dim"))

    def _progress(self, options: ConsoleOptions) -> list[Table | Text]:
        if not self.recent:
            return [Text("waiting for the first step", style="dim")]
        last = self.recent[-1]
        step_s = fmean(report.step_s for report in self.recent)
        tokens_per_s = sum(report.tokens for report in self.recent) / sum(report.step_s for report in self.recent)

        bar = Table.grid(padding=(0, 2, 0, 0), expand=True)
        bar.add_column(no_wrap=True)
        bar.add_column(ratio=1)
        bar.add_column(no_wrap=True, justify="right")
        left_s = (self.total_steps - last.step) * step_s
        bar.add_row(
            Text(f"step {last.step}/{self.total_steps}", style="bold"),
            ProgressBar(total=self.total_steps, completed=last.step),
            f"{_hms(left_s)} left",
        )

        numbers = Text(no_wrap=True, overflow="ellipsis")
        numbers.append(f"loss {last.loss:.4f}", style="bold")
        if self.evaluated is not None:
            numbers.append(f"   held-out {self.evaluated.eval_loss:.4f} (step {self.evaluated.step})")
        numbers.append(f"   {tokens_per_s:,.0f} tokens/s   {step_s:.3f} s a step")

        lines: list[Table | Text] = [bar, numbers]
        if self.first_loss is not None:
            head, tail = f"{self.first_loss:.2f} ", f" {last.loss:.2f}"
            drawn = self.curve.draw(max(1, options.max_width - len(head) - len(tail)))
            lines.append(Text.assemble((head, "dim"), (drawn, "cyan"), (tail, "dim"), no_wrap=True))
        if self.saved is not None:
            lines.append(Text(f"saved step {self.saved.step}: {self.saved.path}", no_wrap=True, overflow="ellipsis"))
        return lines

    def _table(self, max_rows: int) -> Table:
        table = Table(box=None, header_style="dim", padding=(0, 2, 0, 0))
        table.add_column("cell", no_wrap=True)
        table.add_column("worker", no_wrap=True)
        table.add_column("pid", no_wrap=True, justify="right")
        table.add_column("node", no_wrap=True, max_width=MAX_NODE_WIDTH)
        table.add_column("step", no_wrap=True, justify="right")
        step = str(self.recent[-1].step) if self.recent else "-"
        # The line that says how many more there are takes the place of a cell.
        num_shown = len(self.cells) if len(self.cells) <= max_rows else max(0, max_rows - 1)
        for cell in list(self.cells)[:num_shown]:
            actor = self.cells[cell]
            table.add_row(*map(Text, (cell, str(actor["worker"]), str(actor["pid"]), str(actor["node"]), step)))
        if num_shown < len(self.cells):
            table.add_row(Text(f"and {len(self.cells) - num_shown} more", style="dim"))
        return table


def _spread(left: Text, right: Text) -> Table:
    row = Table.grid(expand=True)
    row.add_column(no_wrap=True, ratio=1)
    row.add_column(no_wrap=True, justify="right")
    row.add_row(left, right)
    return row


def _hms(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))
