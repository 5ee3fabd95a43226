"""The worker: one actor, one process, at most one cell.

Setting up and running happen in the actor's default thread; the ``control`` group answers while they go on, and the
``tether`` group holds one call that never returns, whose failure is the news of this process's death.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import ray
import torch
from torch.distributed import TCPStore

from rayformer.actors.assignment import Assignment
from rayformer.cell.build import Cell, build_cell
from rayformer.cell.loop import train
from rayformer.cell.process import prepare_process
from rayformer.cell.state import load_checkpoint
from rayformer.control.states import Member
from rayformer.errors import CollectiveError
from rayformer.events import CellDone, CellEvent, CheckpointSaved
from rayformer.groups import Groups, StoreClients

REPORT_EVERY_S = 0.5
logger = logging.getLogger("rayformer.worker")


class Worker:
    """Hosts one cell. Every call carries the generation, and one of another generation is refused."""

    def __init__(self, name: str, log_file: str) -> None:
        self._name = name
        self._cell: Cell | None = None
        self._assignment: Assignment | None = None
        self._groups: Groups | None = None
        self._stop_asked = threading.Event()
        self._progress: tuple[int, float] = (0, time.time())
        _log_to(Path(log_file), name)

    def __repr__(self) -> str:
        return f"Worker({self._name})"

    def set_up(self, assignment: Assignment) -> Member:
        """Take a cell: form its groups, build it, load its state."""
        plan = assignment.plan
        device = _device(assignment.device)
        prepare_process(plan.job, device)
        address = "127.0.0.1" if assignment.loopback else ray.util.get_node_ip_address()
        store = TCPStore(assignment.store_host, assignment.store_port, is_master=False, timeout=timedelta(seconds=120))
        self._assignment = assignment
        with _errors_logged():
            self._groups = Groups.form(
                layout=plan.job.layout.degrees,
                rank=assignment.rank,
                generation=assignment.generation,
                run=plan.job.run.name,
                store=StoreClients(store),
                device=device,
                address=address,
            )
            logger.info("owns %s in generation %d", self._groups.cell, assignment.generation)
            self._cell = build_cell(
                plan.job, self._groups, corpus_cache=plan.files.corpus_cache, base_dir=plan.base_dir
            )
            if plan.start_from is not None:
                load_checkpoint(self._cell, plan.start_from)
        return Member(
            worker=self._name,
            pid=os.getpid(),
            node=ray.get_runtime_context().get_node_id(),
            param_addr=self._cell.param_address,
        )

    def run(self, generation: int) -> Iterator[tuple[CellEvent, ...]]:
        """Work through the grant; events come in small batches, from the first cell all of them, else only the last."""
        assert self._assignment is not None and self._cell is not None
        assert generation == self._assignment.generation, f"{self._name} is not of generation {generation}"
        plan = self._assignment.plan
        with _errors_logged():
            events = train(
                self._cell,
                checkpoints=plan.checkpoints,
                done_steps=plan.done_steps,
                consumed_samples=plan.consumed_samples,
                until=plan.until,
                should_stop=self._stop_asked.is_set,
            )
            yield from _batched(self._noted(events), reports=self._assignment.rank == 0)

    @ray.method(concurrency_group="control")
    def ask_stop(self, generation: int) -> None:
        """Stop after the step in progress, with a checkpoint; every cell hears of it in that step's vote."""
        if self._assignment is not None and generation == self._assignment.generation:
            self._stop_asked.set()

    @ray.method(concurrency_group="control")
    def abort(self, generation: int) -> None:
        """Break the groups of ``generation``, so that neither this cell nor its peers stay blocked."""
        if self._groups is not None and self._groups.generation == generation:
            self._groups.abort()

    @ray.method(concurrency_group="control")
    def progress(self) -> dict[str, object]:
        """The last finished step, the instruction in progress, and when the step was finished (Unix seconds)."""
        counter = None if self._cell is None else self._cell.executor.counter
        step, when = self._progress
        return {"step": step, "instruction": None if counter is None else str(counter), "time": when}

    @ray.method(concurrency_group="tether")
    def tether(self) -> None:
        """Never returns; its failure is the news of this process's death."""
        threading.Event().wait()

    def _noted(self, events: Iterator[CellEvent]) -> Iterator[CellEvent]:
        for event in events:
            self._progress = (event.step, time.time())
            yield event


def _batched(events: Iterator[CellEvent], *, reports: bool) -> Iterator[tuple[CellEvent, ...]]:
    batch: list[CellEvent] = []
    sent = time.monotonic()
    for event in events:
        if reports or isinstance(event, CellDone):
            batch.append(event)
        durable = isinstance(event, CheckpointSaved | CellDone)  # what led there must not get lost from now on
        if batch and (durable or time.monotonic() - sent >= REPORT_EVERY_S):
            yield tuple(batch)
            batch, sent = [], time.monotonic()


def _device(kind: str) -> torch.device:
    if kind == "cpu":
        return torch.device("cpu")
    device = torch.device("cuda", 0)  # Ray shows an actor only its own accelerators
    torch.cuda.set_device(device)
    return device


def _log_to(path: Path, name: str) -> None:
    """Everything that this process logs, and every exception of a thread, goes to its own file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handler = logging.FileHandler(path)
    handler.setFormatter(logging.Formatter(f"%(asctime)s {name} %(levelname)s %(message)s"))
    root = logging.getLogger()
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    logger.info("is process %d", os.getpid())

    def log_exception(args: threading.ExceptHookArgs) -> None:
        logger.error("thread %s failed", args.thread, exc_info=(args.exc_type, args.exc_value, args.exc_traceback))  # type: ignore[arg-type]

    threading.excepthook = log_exception


@contextmanager
def _errors_logged() -> Iterator[None]:
    """Writes an exception to the log on its way out; one that only tells of a lost peer, in one line."""
    try:
        yield
    except CollectiveError as error:
        logger.error("lost a peer: %s", error)
        raise
    except Exception:
        logger.exception("failed")
        raise
