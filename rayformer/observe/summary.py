"""The summary: what a run tells at its end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from rayformer.events import CellDone

NUM_LOSSES = 10
MAX_SAMPLE_LINES = 8
MAX_SAMPLE_WIDTH = 76


def summary(done: CellDone, *, total_steps: int, lines: Sequence[Mapping[str, Any]], metrics: Path, go_on: str) -> str:
    """How the run ended, where it stands and where its results lie; ``lines`` is ``read_metrics(metrics)``.

    ``go_on`` is said of a run that was stopped.
    """
    # A run that went back to a checkpoint and was stopped early has later lines from an attempt that is void.
    lines = [line for line in lines if line["step"] <= done.step]
    losses = [line["loss"] for line in lines if line["loss"] is not None][-NUM_LOSSES:]
    evaluated = [line for line in lines if line.get("eval_loss") is not None]

    rows = []
    if losses:
        rows.append(("loss", f"{fmean(losses):.4f} (mean of {_steps(len(losses))} to {lines[-1]['step']})"))
    if evaluated:
        rows.append(("held-out", f"{evaluated[-1]['eval_loss']:.4f} (step {evaluated[-1]['step']})"))
    rows.append(("metrics", str(metrics)))
    if done.checkpoint is not None:
        rows.append(("checkpoint", done.checkpoint))

    head = f"{done.outcome}: {done.step} of {_steps(total_steps)}"
    if done.outcome == "stopped":
        head += f"; {go_on}"
    text = [head, *(f"  {name:<10}  {value}" for name, value in rows)]
    if done.sample is not None:
        text += ["  sample", *(f"    {line}" for line in _tame(done.sample))]
    return "\n".join(text)


def _steps(num: int) -> str:
    return f"{num} step" if num == 1 else f"{num} steps"


def _tame(sample: str) -> list[str]:
    """The first lines of what a model wrote: any bytes at all, so nothing in it may reach the terminal as control."""
    lines = [line.expandtabs(4)[:MAX_SAMPLE_WIDTH].rstrip() for line in sample.strip("\n").split("\n")]
    return ["".join(c if c.isprintable() else "·" for c in line) for line in lines[:MAX_SAMPLE_LINES]]
