"""What a run shows in a terminal while it is going on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Protocol, TextIO

from rich.console import Console

from rayformer.events import CheckpointSaved, StepReport
from rayformer.observe.live import LiveDisplay
from rayformer.observe.plain import PlainDisplay

Mode = Literal["auto", "live", "plain", "none"]


class Display(Protocol):
    """Is told what happens, in order, and shows it as it sees fit. Nothing may follow ``close``."""

    def note(self, text: str) -> None:
        """Something worth a line of its own."""

    def membership(self, cells: Mapping[str, Mapping[str, Any]]) -> None:
        """Which actor owns which cell from now on: ``{CELL: {worker, pid, node, ...}}``, as in the journal."""

    def step(self, report: StepReport, total_steps: int) -> None:
        """A step was executed."""

    def saved(self, event: CheckpointSaved) -> None:
        """A checkpoint exists."""

    def close(self) -> None:
        """The run has ended; gives the terminal back."""


def make_display(mode: Mode, out: TextIO, *, run: str, dashboard: str | None = None) -> Display:
    """The display that ``observe.progress`` asks for; ``auto`` is live where ``out`` is a terminal that can draw it."""
    if mode == "auto":
        console = Console(file=out)
        can_draw = out.isatty() and not console.is_dumb_terminal and not console.options.ascii_only
        mode = "live" if can_draw else "plain"
    match mode:
        case "live":
            return LiveDisplay(out, run=run, dashboard=dashboard)
        case "plain":
            return PlainDisplay(out)
        case "none":
            return NoDisplay()
    raise AssertionError(f"no display is called {mode!r}")


class NoDisplay:
    """Shows nothing."""

    def note(self, text: str) -> None:
        pass

    def membership(self, cells: Mapping[str, Mapping[str, Any]]) -> None:
        pass

    def step(self, report: StepReport, total_steps: int) -> None:
        pass

    def saved(self, event: CheckpointSaved) -> None:
        pass

    def close(self) -> None:
        pass
