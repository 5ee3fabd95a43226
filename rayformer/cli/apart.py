"""A job trained in a process of its own, by a command that trains it more than once."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import IO

from rayformer.cell.plan import EXIT_ABORTED, EXIT_STOPPED
from rayformer.cell.problems import job_problems
from rayformer.config.job import Job
from rayformer.config.load import Check
from rayformer.errors import Problem
from rayformer.faults.plan import fault_problems


def _needs_its_cells(job: Job) -> Iterator[Problem]:
    if job.layout.dp == "auto":
        rule, fix = "the cells that faults happen to must be known before the start", "add --set layout.dp=2"
        yield Problem(keys={"layout.dp": "auto"}, rule=rule, fix=fix)


CHECKS: tuple[Check, ...] = (partial(job_problems, fresh=True), fault_problems, _needs_its_cells)


def setting(key: str, value: object) -> str:
    """``--set``'s argument that gives ``key`` this value.

    >>> setting("faults", [{"kill": "pp1", "step": 7}])
    'faults=[{"kill": "pp1", "step": 7}]'
    """
    return f"{key}={json.dumps(value)}"


def train_apart(job_file: Path, settings: Sequence[str], *flags: str, output: IO[bytes] | None = None) -> int:
    """Train a job in another process, what it prints going to ``output``; its status.

    Signals are for that process to answer. Raises KeyboardInterrupt if it came to its end as if there had been none.
    """
    command = [sys.executable, "-m", "rayformer.cli.main", "train", str(job_file), *flags]
    command += [part for one in settings for part in ("--set", one)]
    with subprocess.Popen(command, stdout=output, stderr=output) as child, _signals_passed_to(child) as came:
        status = child.wait()
    if came and status not in (EXIT_STOPPED, EXIT_ABORTED):
        raise KeyboardInterrupt
    return status


@contextmanager
def _signals_passed_to(child: subprocess.Popen[bytes]) -> Iterator[list[int]]:
    """A terminal sends SIGINT to both; SIGTERM comes to this process only. Gives the numbers of those that came."""
    came: list[int] = []

    def leave(number: int, _: FrameType | None) -> None:
        came.append(number)

    def forward(number: int, _: FrameType | None) -> None:
        came.append(number)
        child.send_signal(number)

    before = {
        signal.SIGINT: signal.signal(signal.SIGINT, leave),
        signal.SIGTERM: signal.signal(signal.SIGTERM, forward),
    }
    try:
        yield came
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
