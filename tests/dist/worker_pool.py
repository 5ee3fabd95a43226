"""A pool of worker processes that tests hand functions to: started when first needed, kept for the whole session.

A task is a function of a test file or of a module beside it. Every worker of the task calls ``function(member, *args)``
and sends back what it returns or its traceback. Functions are found by file and name, so test modules need no import
path. Tasks never share a key of the store, so groups of one can't meet those of another. If a worker raises, the others
get a few seconds; if one does not answer, the stacks of all that are late are shown and they are killed.
"""

from __future__ import annotations

import faulthandler
import gc
import importlib.util
import inspect
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from multiprocessing import connection
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from rayformer.groups import Groups, StoreClients
from rayformer.layout import Layout

MAX_WORKERS = 8
GRACE_S = 5.0
_PRELOAD = ["torch", "torch.distributed", "rayformer.cell.build", "rayformer.cell.state", "rayformer.cell.loop"]


@dataclass(frozen=True, kw_only=True)
class Member:
    """What a task knows of its place: rank, number of members, and where they meet."""

    rank: int
    world: int
    task: str
    store: StoreClients

    def form(self, layout: Layout, *, generation: int = 1, timeout_s: float = 60.0) -> Groups:
        """The groups of this member in ``layout``."""
        return Groups.form(
            layout=layout,
            rank=self.rank,
            generation=generation,
            run=self.task,
            store=self.store,
            device=torch.device("cpu"),
            timeout_s=timeout_s,
        )


class TaskFailed(AssertionError):
    """A task raised or hung; the message has every worker's traceback or stack, the first cause first."""


class WorkerPool:
    """Workers of this test session; ``close`` ends every one of them, each by its process id."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(_PRELOAD)
        self._store: dist.TCPStore | None = None
        self._workers: dict[int, _Worker] = {}
        self._num_tasks = 0

    def run(self, world: int, function: Callable[..., Any], args: tuple[Any, ...], *, deadline_s: float) -> list[Any]:
        """What ``function(member, *args)`` returned on every rank; TaskFailed if one raised or took too long."""
        assert 1 <= world <= MAX_WORKERS
        self._num_tasks += 1
        task = f"{function.__name__}-{self._num_tasks}"
        workers = [self._worker(rank) for rank in range(world)]
        for worker in workers:
            worker.link.send((inspect.getfile(function), function.__qualname__, task, world, args))
        answers: dict[int, tuple[bool, Any]] = {}
        until = time.monotonic() + deadline_s
        while len(answers) < world:
            late = {worker.link: rank for rank, worker in enumerate(workers) if rank not in answers}
            ready = connection.wait(list(late), timeout=max(0.0, until - time.monotonic()))
            if not ready:
                stacks = self._kill([workers[rank] for rank in late.values()])
                answers |= {rank: (False, f"no answer within its time:\n{stacks[rank]}") for rank in late.values()}
            for link in ready:
                answers[late[link]] = self._answer(workers[late[link]])
            if not all(good for good, _ in answers.values()):
                until = min(until, time.monotonic() + GRACE_S)
        failures = [(rank, text) for rank, (good, text) in sorted(answers.items()) if not good]
        if failures:
            failures.sort(key=lambda failure: "CollectiveError" in failure[1] or "no answer" in failure[1])
            told = "\n".join(f"--- rank {rank} of {world}: {text}" for rank, text in failures)
            raise TaskFailed(f"{task} failed on {len(failures)} of {world} workers\n{told}")
        return [answers[rank][1] for rank in range(world)]

    def close(self) -> None:
        for worker in self._workers.values():
            worker.link.close()
        for worker in self._workers.values():
            worker.process.join(5)
            if worker.process.is_alive():
                worker.process.kill()
                worker.process.join()
        self._workers.clear()

    @property
    def pids(self) -> list[int]:
        return [worker.process.pid for worker in self._workers.values()]

    def _worker(self, rank: int) -> _Worker:
        if rank not in self._workers:
            if self._store is None:
                self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            ours, theirs = self._context.Pipe()
            stacks = self._folder / f"stacks-{rank}.txt"
            process = self._context.Process(
                target=_serve, args=(theirs, rank, self._store.port, stacks), name=f"test-worker-{rank}", daemon=True
            )
            process.start()
            theirs.close()
            self._workers[rank] = _Worker(rank=rank, process=process, link=ours, stacks=stacks)
        return self._workers[rank]

    def _answer(self, worker: _Worker) -> tuple[bool, Any]:
        try:
            return worker.link.recv()
        except (EOFError, ConnectionError):
            self._forget(worker)
            worker.process.join()
            return False, f"its process ended with status {worker.process.exitcode}"

    def _kill(self, workers: list[_Worker]) -> dict[int, str]:
        """Kill workers that do not answer, and return where each one stood."""
        for worker in workers:
            os.kill(worker.process.pid, signal.SIGUSR1)
        time.sleep(0.3)
        stacks = {worker.rank: worker.stacks.read_text() for worker in workers}
        for worker in workers:
            self._forget(worker)
            worker.process.kill()
            worker.process.join()
        return stacks

    def _forget(self, worker: _Worker) -> None:
        worker.link.close()
        del self._workers[worker.rank]


@dataclass(frozen=True, kw_only=True)
class _Worker:
    rank: int
    process: Any
    link: connection.Connection
    stacks: Path


def _serve(link: connection.Connection, rank: int, port: int, stacks: Path) -> None:
    """The life of a worker: take a task, answer, until the other end is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    store = StoreClients(dist.TCPStore("127.0.0.1", port, is_master=False))
    gc.collect()
    gc.freeze()  # what was imported need not be looked through after every task
    with stacks.open("w") as file:
        faulthandler.register(signal.SIGUSR1, file=file, all_threads=True)
        while True:
            try:
                file_name, name, task, world, args = link.recv()
            except (EOFError, ConnectionError):
                return
            try:
                function = getattr(_module(file_name), name)
                answer = True, function(Member(rank=rank, world=world, task=task, store=store), *args)
            except BaseException:
                answer = False, traceback.format_exc()
            gc.collect()
            try:
                link.send(answer)
            except (BrokenPipeError, ConnectionError):
                return
            except Exception:
                link.send((False, f"its result could not be sent\n{traceback.format_exc()}"))


@lru_cache
def _module(file_name: str) -> ModuleType:
    """The module in a file, under its plain name."""
    path = Path(file_name)
    if path.stem in sys.modules:
        return sys.modules[path.stem]
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module
