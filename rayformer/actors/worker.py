"""The worker: one actor, one process, at most one cell.

Joining and running happen in the actor's default thread; the ``control`` group answers while they go on, and the
``tether`` group holds one call that never returns, whose failure is the news of this process's death.
"""

from __future__ import annotations

import logging
import mmap
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import ray
import torch
from ray.actor import ActorHandle
from torch.distributed import TCPStore

from rayformer.actors.assignment import Assignment, Joined, Stood
from rayformer.cell.build import Cell, build_cell
from rayformer.cell.loop import train
from rayformer.cell.process import prepare_process
from rayformer.cell.progress import NoProgress, Progress, ProgressWord
from rayformer.cell.rehearsal import rehearse
from rayformer.cell.snapshot import Snapshots, restore, slot_bytes
from rayformer.cell.state import load_checkpoint, load_weights
from rayformer.ckpt.slots import PAGE, map_memory
from rayformer.errors import CollectiveError
from rayformer.events import CellDone, CellEvent, CheckpointSaved, SaveDue, SaveWaits, StepReport, plain
from rayformer.faults.marks import Marks
from rayformer.faults.plan import resolve_faults
from rayformer.faults.wrap import FaultyProgress
from rayformer.groups import Groups, StoreClients

REPORT_EVERY_S = 0.5
logger = logging.getLogger("rayformer.worker")


class Worker:
    """Hosts one cell, or waits for one. Every call carries the generation, and one of another generation is refused."""

    def __init__(self, name: str, log_file: str) -> None:
        self._name = name
        self._cell: Cell | None = None
        self._assignment: Assignment | None = None
        self._store: StoreClients | None = None
        self._memory: mmap.mmap | None = None
        self._snapshots: Snapshots | None = None
        self._progress: Progress = NoProgress()
        self._holder_pid = 0
        self._is_copied = False  # by a holder of another node
        self._outbox: list[CellEvent] = []
        self._handed_over: tuple[CellEvent, ...] = ()  # last, and lost if this process dies before Ray has sent it
        self._stop_asked = threading.Event()
        self._aborted = 0  # the last generation that was given up
        self._stands = threading.Event()  # no call of the main thread is at work
        self._stands.set()
        _log_to(Path(log_file), name)

    def __repr__(self) -> str:
        return f"Worker({self._name})"

    @ray.method(concurrency_group="control")
    def where(self) -> tuple[str, str]:
        """The node that this process runs on, and which of its accelerators Ray gave it."""
        return str(ray.get_runtime_context().get_node_id()), os.environ.get("CUDA_VISIBLE_DEVICES", "")

    def warm(self, assignment: Assignment) -> None:
        """Make ready for any cell of the run: everything imported, the store known, the first memory touched.

        No accelerator is touched.
        """
        self._connect(assignment)
        prepare_process(assignment.plan.job, torch.device("cpu"))
        rehearse(assignment.plan)

    def prepare(self, assignment: Assignment) -> None:
        """Build the cell that this process will soon be told to take, while others still come to a stop."""
        prepare_process(assignment.plan.job, _device(assignment))
        self._build(assignment)

    def join(self, assignment: Assignment) -> Joined | None:
        """Take a cell, or go on with the own one: form its groups, build it, bring its state to the step asked for.

        None if the generation was given up meanwhile.
        """
        with self._at_work():
            self._assignment = assignment
            try:
                with _errors_logged():
                    return self._join(assignment)
            except CollectiveError:
                return None

    def run(self, generation: int) -> Iterator[tuple[CellEvent, ...]]:
        """Work through the grant; events come in small batches, from the first cell all of them, else only the last.

        Ends without CellDone if a peer is lost; the caller then asks where this cell stands with ``abort``.
        """
        with self._at_work():
            assignment, cell = self._assignment, self._cell
            assert assignment is not None and cell is not None
            assert generation == assignment.generation, f"{self._name} is not of generation {generation}"
            events = train(
                cell,
                checkpoints=assignment.plan.checkpoints,
                until=assignment.plan.until,
                should_stop=self._stop_asked.is_set,
                snapshots=self._snapshots,
                progress=self._progress,
                is_given_up=lambda: self._aborted >= generation,
                goes_on=assignment.goes_on,
            )
            try:
                with _errors_logged():
                    yield from self._batched(events, reports=assignment.rank == 0)
            except CollectiveError:
                return
            finally:
                self._progress.at("idle", cell.position.step)

    def snapshot(self) -> None:
        """Take a snapshot of the state as it stands, if there is none of it yet."""
        assert self._snapshots is not None and self._cell is not None
        if self._cell.position.step not in self._snapshots.file.steps():
            self._snapshots.take()

    @ray.method(concurrency_group="control")
    def rehouse(self, cell: str, holder: ActorHandle) -> None:
        """Take the snapshots of ``cell`` to ``holder`` from now on; the one before it is gone."""
        if self._cell is None or str(self._cell.groups.cell) != cell:
            return
        self._memory = self._reserved(self._cell, holder)
        if self._snapshots is not None:
            self._snapshots.rehouse(self._memory)
        self._progress.move(self._memory)

    @ray.method(concurrency_group="control")
    def ask_stop(self, generation: int) -> None:
        """Stop after the step in progress, with a checkpoint; every cell hears of it in that step's vote."""
        if self._assignment is not None and generation == self._assignment.generation:
            self._stop_asked.set()

    @ray.method(concurrency_group="control")
    def abort(self, generation: int) -> Stood:
        """Give up ``generation``: break its groups, so that neither this cell nor its peers stay blocked.

        Returns when this cell stands still.
        """
        self._aborted = max(self._aborted, generation)
        if self._cell is not None and self._cell.groups.generation <= generation:
            self._cell.groups.abort()
        self._stands.wait()
        position = None if self._cell is None else self._cell.position
        return Stood(
            step=position.step if position is not None and position.is_whole else None,
            untold=tuple(event for event in self._outbox if isinstance(event, StepReport)),
        )

    @ray.method(concurrency_group="control")
    def stacks(self) -> str:
        """The Python stack of every thread."""
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        return "\n".join(
            f"thread {names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame))}"
            for ident, frame in sys._current_frames().items()
        )

    @ray.method(concurrency_group="control")
    def ping(self) -> None:
        """Answered as long as this process can run Python."""

    @ray.method(concurrency_group="tether")
    def tether(self) -> None:
        """Never returns; its failure is the news of this process's death."""
        threading.Event().wait()

    def _join(self, assignment: Assignment) -> Joined:
        started = time.perf_counter()
        seconds = {}
        self._stop_asked.clear()
        cell = self._cell
        if cell is None or not _can_go_on(cell, assignment):
            prepare_process(assignment.plan.job, _device(assignment))
            cell = self._build(assignment)
        seconds["build"] = time.perf_counter() - started
        self._progress.at("joining", assignment.step)
        cell.forget_messages()
        self._connect(assignment)
        cell.groups.renew(**self._formation(assignment))
        seconds["form"] = time.perf_counter() - started - seconds["build"]
        logger.info("owns %s in generation %d", cell.groups.cell, assignment.generation)
        before = time.perf_counter()
        moved, from_disk = self._restore(cell, assignment)
        sent = cell.groups.dp.sent_bytes["all_gather"]
        if assignment.goes_on:
            self._progress.at("gather", assignment.step)
            cell.optimizer.start_gather()
            cell.optimizer.await_parameters()
        if self._snapshots is not None and assignment.source == "checkpoint":
            self._snapshots.take()  # so that a failure before the first step's snapshot finds one
        seconds["restore"] = time.perf_counter() - before
        logger.info("is at step %d; seconds: %s", assignment.step, seconds)
        pinned = () if self._snapshots is None else self._snapshots.file.pinned()
        return Joined(
            worker=self._name,
            pid=os.getpid(),
            node=ray.get_runtime_context().get_node_id(),
            param_addr=cell.param_address,
            moved_bytes=moved,
            disk_bytes=from_disk,
            gather_bytes=cell.groups.dp.sent_bytes["all_gather"] - sent,
            pinned=max(pinned, default=None),
            seconds=seconds,
        )

    def _restore(self, cell: Cell, assignment: Assignment) -> tuple[int, int]:
        """Bring the own shard to the step asked for; the bytes moved from memory, and those read from disk."""
        step = assignment.step
        self._progress.at("load", step)
        if self._snapshots is not None:
            self._snapshots.file.forget_after(step)
        match assignment.source:
            case "live":
                assert cell.position.is_whole and cell.position.step == step, f"{cell.position} is not {step}"
                return 0, 0
            case "holder":
                assert self._snapshots is not None
                file = self._snapshots.file
                found = file.read(step)
                moved = restore(cell, [(file.index_text, found)])
                self._take_reports(found.extra)
                return moved, 0
            case "second_holder":
                assert assignment.copies is not None
                copy = ray.get(assignment.copies.fetch.remote(str(cell.groups.cell), step))
                moved = restore(cell, [(copy.index, copy.snapshot)])
                self._take_reports(copy.extra)
                return moved, 0
            case "checkpoint":
                self._outbox.clear()
                if assignment.folder is not None:
                    load_checkpoint(cell, assignment.folder)
                    return 0, sum(4 * shard.value.numel() for shard in cell.optimizer.owned_state())
                if assignment.plan.init_from is not None:
                    load_weights(cell, assignment.plan.init_from)
                return 0, 0  # the initial state

    def _build(self, assignment: Assignment) -> Cell:
        """A new cell with the initial weights, its groups not connected yet."""
        plan = assignment.plan
        groups = Groups.unconnected(layout=plan.job.layout.degrees, rank=assignment.rank, device=_device(assignment))
        if self._cell is not None:
            self._cell.groups.abort()
        cell = build_cell(plan.job, groups, corpus_cache=plan.files.corpus_cache, base_dir=plan.base_dir)
        self._watch(cell, assignment)
        cell.programs.train(plan.job.batch.size_after(plan.consumed_samples))
        self._cell = cell
        return cell

    def _take_reports(self, extra: Any) -> None:
        """What the process before this one had not told yet."""
        self._outbox = [StepReport(**values) for values in extra.get("unsent", ())]

    def _formation(self, assignment: Assignment) -> dict[str, Any]:
        generation = assignment.generation
        return {
            "generation": generation,
            "run": f"{assignment.plan.job.run.name}/{assignment.plan.attempt}",
            "store": self._store,
            "address": "127.0.0.1" if assignment.loopback else ray.util.get_node_ip_address(),
            "is_aborted": lambda: self._aborted >= generation,
        }

    def _connect(self, assignment: Assignment) -> None:
        if self._store is None:
            host, port = assignment.store_host, assignment.store_port
            self._store = StoreClients(TCPStore(host, port, is_master=False, timeout=timedelta(seconds=120)))
            self._store.take(5)

    def _watch(self, cell: Cell, assignment: Assignment) -> None:
        """Map the own slots: those of the process before this one, if there was one."""
        if assignment.holder is None:
            return
        every, self._is_copied = assignment.plan.job.recovery.snapshot_every, assignment.is_copied
        self._memory = self._reserved(cell, assignment.holder)
        self._progress = self._faulty(cell, assignment, ProgressWord(self._memory))
        self._progress.at("setup", assignment.step)
        if every != 0:
            self._snapshots = Snapshots(cell, self._memory, every=every, is_copied=self._is_copied, more=self._unsent)

    def _reserved(self, cell: Cell, holder: ActorHandle) -> mmap.mmap:
        """Memory for the snapshots of ``cell``, and at least for its progress word."""
        takes_none = cell.job.recovery.snapshot_every == 0
        num_bytes = PAGE if takes_none else slot_bytes(cell, is_copied=self._is_copied)
        place = ray.get(holder.reserve.remote(str(cell.groups.cell), num_bytes, os.getpid()))
        self._holder_pid = place.pid
        return map_memory(place.path)

    def _kill_holder(self) -> None:
        os.kill(self._holder_pid, signal.SIGKILL)

    def _faulty(self, cell: Cell, assignment: Assignment, word: ProgressWord) -> Progress:
        """``word``, or a decorator of it if faults shall happen to this cell."""
        name = str(cell.groups.cell)
        faults = resolve_faults(cell.job.faults, cell.groups.layout)
        if not any(fault.cell == name for fault in faults):
            return word
        marks = Marks(assignment.plan.files.marks(assignment.plan.attempt), name)
        return FaultyProgress(
            word,
            faults,
            cell=name,
            used=marks.used,
            mark=marks.mark,
            poison=partial(_poison, cell),
            kill_holder=self._kill_holder,
        )

    def _unsent(self) -> dict[str, Any]:
        events = (*self._handed_over, *self._outbox)
        return {"unsent": [plain(event) for event in events if isinstance(event, StepReport)]}

    def _batched(self, events: Iterable[CellEvent], *, reports: bool) -> Iterator[tuple[CellEvent, ...]]:
        """Events in small batches; those that are not sent yet stay in the outbox if something interrupts."""
        assert self._assignment is not None
        generation, sent = self._assignment.generation, 0.0  # the first of this generation is told at once
        for event in events:
            if reports or isinstance(event, CellDone):
                self._outbox.append(event)
            # What led to a checkpoint, or to the end, must not get lost from then on, nor wait for long.
            durable = isinstance(event, CheckpointSaved | SaveDue | SaveWaits | CellDone)
            if self._outbox and (durable or time.monotonic() - sent >= REPORT_EVERY_S):
                self._handed_over = batch = tuple(self._outbox)
                self._outbox = []
                yield batch
                if batch[-1].generation == generation:  # else it is what the process before this one had not told
                    sent = time.monotonic()

    @contextmanager
    def _at_work(self) -> Iterator[None]:
        self._stands.clear()
        try:
            yield
        finally:
            self._stands.set()


def _poison(cell: Cell) -> None:
    """Make one element of the gradient NaN; the next microbatch's is added to it."""
    grad = next(p.grad for stage in cell.stages for p in stage.parameters() if p.grad is not None)
    grad.view(-1)[0] = float("nan")


def _can_go_on(cell: Cell, assignment: Assignment) -> bool:
    """Whether ``cell`` can be filled for the assignment as it is; the initial state is never filled in."""
    if cell.groups.layout.rank(cell.groups.cell) != assignment.rank:
        return False
    is_initial = cell.position.step == 0 and cell.position.is_whole
    return assignment.source != "checkpoint" or assignment.folder is not None or is_initial


def _device(assignment: Assignment) -> torch.device:
    """Where the cell computes. A standby, to which Ray gave no accelerator, takes those of the process before it."""
    if assignment.device == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_initialized():
        os.environ["CUDA_VISIBLE_DEVICES"] = assignment.accelerators
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
