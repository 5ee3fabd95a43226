"""The plain display: lines of text, for logs and for people who read them later."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TextIO

from rayformer.events import CheckpointSaved, StepReport

MAX_NAMED = 8


class PlainDisplay:
    """Prints to ``out`` every executed step once, and whatever else happens."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._cells: Mapping[str, Mapping[str, Any]] = {}

    def note(self, text: str) -> None:
        self._print(text)

    def membership(self, cells: Mapping[str, Mapping[str, Any]]) -> None:
        """Names the cells whose actor is not the one it was."""
        changed = [cell for cell, actor in cells.items() if self._cells.get(cell) != actor]
        for cell in changed[:MAX_NAMED]:
            actor = cells[cell]
            self._print(f"{cell} is {actor['worker']}, pid {actor['pid']} on {actor['node']}")
        if len(changed) > MAX_NAMED:
            self._print(f"and {len(changed) - MAX_NAMED} more cells")
        self._cells = dict(cells)

    def step(self, report: StepReport, total_steps: int) -> None:
        self._print(step_line(report, total_steps))

    def saved(self, event: CheckpointSaved) -> None:
        self._print(f"saved step {event.step} in {event.seconds:.1f} s: {event.path}")

    def close(self) -> None:
        pass

    def _print(self, text: str) -> None:
        print(text, file=self._out, flush=True)


def step_line(report: StepReport, total_steps: int) -> str:
    """One step in one line: ``step 120/200  loss 2.3456  norm 0.91  lr 8.1e-04  17,432 tokens/s  0.118 s``."""
    parts = [
        f"step {report.step:>{len(str(total_steps))}}/{total_steps}",
        f"loss {report.loss:.4f}",
        f"norm {report.grad_norm:.2f}",
        f"lr {report.lr:.1e}",
        f"{report.tokens / report.step_s:,.0f} tokens/s",
        f"{report.step_s:.3f} s",
    ]
    if report.eval_loss is not None:
        parts.append(f"held-out {report.eval_loss:.4f}")
    if report.skipped:
        parts.append("skipped")
    if report.nonfinite:
        more = f" and {len(report.nonfinite) - 1} more" if len(report.nonfinite) > 1 else ""
        parts.append(f"gradient not finite in {report.nonfinite[0]}{more}")
    return "  ".join(parts)
