"""Two sides of a benchmark on one machine: each some processes, which work when asked and are stopped otherwise.

A side's program is a function ``(arguments, rank, world, store) -> answer`` that sets a process up; ``answer(request)``
then does what it is asked and returns a value. Between requests every process of the side is stopped by SIGSTOP.
"""

from __future__ import annotations

import ctypes
import datetime
import json
import multiprocessing
import os
import platform
import signal
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

Program = Callable[[Any, int, int, dist.Store], Callable[[Any], Any]]
ENVIRON = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
TIMEOUT_S = 180.0
_PR_SET_PDEATHSIG = 1


class Side:
    """The processes of one side; ``ask`` lets them run, puts a request to all ranks and stops them again."""

    def __init__(self, name: str, program: Program, arguments: Any, world: int) -> None:
        self.name = name
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._links: list[Connection] = []
        self._processes: list[Any] = []
        context = multiprocessing.get_context("spawn")
        for rank in range(world):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(theirs, program, arguments, rank, world, self._store.port), daemon=True
            )
            process.start()
            theirs.close()
            self._links.append(ours)
            self._processes.append(process)

    def wait_until_ready(self) -> None:
        self._answers()
        self._signal(signal.SIGSTOP)

    def ask(self, request: Any) -> list[Any]:
        """What every rank answered, in rank order. Raises RuntimeError with the traceback of one that failed."""
        self._signal(signal.SIGCONT)
        for link in self._links:
            link.send(request)
        answers = self._answers()
        self._signal(signal.SIGSTOP)
        return answers

    def end(self) -> None:
        """Kill every process of this side."""
        for process in self._processes:
            process.kill()
            process.join()

    def _answers(self) -> list[Any]:
        """One answer of every rank; the first that failed is told, as the others then wait for it in vain."""
        answers: dict[int, Any] = {}
        until = time.monotonic() + TIMEOUT_S
        while len(answers) < len(self._links):
            waiting = {link: rank for rank, link in enumerate(self._links) if rank not in answers}
            ready = multiprocessing.connection.wait(list(waiting), max(0.0, until - time.monotonic()))
            if not ready:
                raise RuntimeError(f"{self.name}: ranks {list(waiting.values())} did not answer in {TIMEOUT_S:g} s")
            for link in ready:
                rank = waiting[link]
                good, answers[rank] = link.recv()
                if not good:
                    raise RuntimeError(f"{self.name}: rank {rank} failed\n{answers[rank]}")
        return [answers[rank] for rank in range(len(self._links))]

    def _signal(self, number: int) -> None:
        for process in self._processes:
            with suppress(ProcessLookupError):
                os.kill(process.pid, number)


@contextmanager
def open_sides(entries: Sequence[tuple[str, Program, Any, int]]) -> Iterator[list[Side]]:
    """Start the sides (name, program, arguments, world) one after the other; all are killed at the end."""
    os.environ.update(ENVIRON)  # what the processes inherit
    started: list[Side] = []
    try:
        for entry in entries:
            started.append(Side(*entry))
            started[-1].wait_until_ready()
        yield started
    finally:
        for side in started:
            side.end()


def write_result(name: str, result: dict[str, Any]) -> None:
    """Write benchmarks/results/NAME-DATE.json with the date and the machine added."""
    date = datetime.date.today().isoformat()
    machine = {
        "cpus": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "load_1m": os.getloadavg()[0],
    }
    path = Path(__file__).parent / "results" / f"{name}-{date}.json"
    path.write_text(json.dumps({"date": date, **result, "machine": machine}, indent=1) + "\n")
    print(path)


def _serve(link: Connection, program: Program, arguments: Any, rank: int, world: int, port: int) -> None:
    # A stopped process would outlive a benchmark that is killed.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    torch.set_num_threads(1)
    try:
        answer = program(arguments, rank, world, dist.TCPStore("127.0.0.1", port))
        link.send((True, None))
        while True:
            link.send((True, answer(link.recv())))
    except EOFError:
        pass  # the benchmark ended
    except BaseException:
        link.send((False, traceback.format_exc()))
