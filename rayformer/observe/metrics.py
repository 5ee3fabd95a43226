"""metrics.jsonl: one line for every executed step."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rayformer.events import StepReport
from rayformer.observe.jsonl import JsonlWriter, read_lines


def metrics_line(report: StepReport, *, attempt: int, time: float) -> dict[str, Any]:
    """The line of one step; ``time`` is in Unix seconds.

    ``eval_loss``, ``state_hash``, ``flops_per_token`` and ``phase_s`` are there where known. JSON has no NaN and
    no infinity, so such a number becomes null; ``nonfinite``, there only where it has something to say, lists the keys
    that this befell and then the cells and parameters whose gradient was not finite: ``["grad_norm", "pp0.dp1.cp0.tp0
    output.norm.weight"]``.
    """
    line: dict[str, Any] = {
        "attempt": attempt,
        "generation": report.generation,
        "step": report.step,
        "loss": report.loss,
        "grad_norm": report.grad_norm,
        "lr": report.lr,
        "tokens": report.tokens,
        "valid_tokens": report.valid_tokens,
        "consumed_samples": report.consumed_samples,
        "step_s": report.step_s,
        "tokens_per_s": report.tokens / report.step_s,
        "skipped": report.skipped,
        "time": time,
    }
    for key in ("eval_loss", "state_hash", "flops_per_token", "phase_s"):
        if getattr(report, key) is not None:
            line[key] = getattr(report, key)
    keys = [key for key, value in line.items() if isinstance(value, float) and not math.isfinite(value)]
    line.update(dict.fromkeys(keys))
    if keys or report.nonfinite:
        line["nonfinite"] = [*keys, *report.nonfinite]
    return line


class MetricsFile:
    """Appends the steps of one attempt to ``path``."""

    def __init__(self, path: Path, attempt: int, clock: Callable[[], float] = time.time) -> None:
        self._writer = JsonlWriter(path)
        self._attempt = attempt
        self._clock = clock

    def write(self, report: StepReport) -> None:
        self._writer.append(metrics_line(report, attempt=self._attempt, time=self._clock()))

    def close(self) -> None:
        self._writer.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """One line per step, in the order of steps; of a step that was redone, the last one written."""
    last = {line["step"]: line for line in read_lines(path)}
    return [last[step] for step in sorted(last)]
