"""The controller: a detached, async actor that owns the workers of one run and carries out what the machine decides.

Workers and placement groups are its children, so a killed driver loses nothing and a dead controller leaks nothing.
Everything is journaled before it is done.
"""

from __future__ import annotations

import asyncio
import logging
import re
import socket
from collections.abc import AsyncIterator, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayActorError, RayError

from rayformer.actors.assignment import Assignment
from rayformer.actors.placement import Placement, cell_resources
from rayformer.actors.worker import Worker
from rayformer.cell.plan import RunPlan
from rayformer.control.machine import Machine
from rayformer.control.messages import (
    Abort,
    AskStop,
    CellEnded,
    CellFailed,
    CellReady,
    Command,
    ControllerFailed,
    DeadlinePassed,
    Event,
    Grant,
    Kill,
    Placed,
    PlacementFailed,
    SetUp,
    StopAsked,
)
from rayformer.control.states import END_STATES, Failed, Finished, Member, Running, Starting
from rayformer.errors import CollectiveError
from rayformer.events import CellDone, CellError, CellEvent, CheckpointSaved, JournalEntry, StepReport, plain
from rayformer.observe.display import NoDisplay
from rayformer.observe.recorder import Recorder

GENERATION = 1
logger = logging.getLogger("rayformer.controller")
LINGER_S = 60.0


@dataclass(frozen=True, kw_only=True)
class RunEnded:
    """The end of a run: either what the first cell said, or the errors."""

    done: CellDone | None
    errors: tuple[CellError, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Membership:
    """Who owns which cell from now on."""

    generation: int
    members: dict[str, Member]


Shown = StepReport | CheckpointSaved | Membership | RunEnded


class Controller:
    """Runs one attempt of one run. ``run`` is called once; ``events`` tells the driver what to show."""

    def __init__(self, plan: RunPlan, device: str) -> None:
        self._plan, self._device = plan, device
        job = plan.job
        self._layout = job.layout.degrees
        self._names = [str(cell) for cell in self._layout.cells()]
        self._machine = Machine(Starting(generation=GENERATION, cells=tuple(self._names)))
        self._recorder = Recorder(plan.files, attempt=plan.attempt, total_steps=job.run.steps, display=NoDisplay())
        self._inbox: asyncio.Queue[Event] = asyncio.Queue()
        self._shown: asyncio.Queue[Shown] = asyncio.Queue()
        self._workers: dict[str, ActorHandle] = {}
        self._placement: Placement | None = None
        self._store: Any = None
        self._tasks: set[asyncio.Task[None]] = set()

    def __repr__(self) -> str:
        return f"Controller({self._plan.job.run.name})"

    async def run(self) -> None:
        """Place, set up, run and clean up. When the run is over and no driver ends this process, it ends itself."""
        self._spawn(self._place())
        while not isinstance(self._machine.state, END_STATES):
            event = await self._inbox.get()
            try:
                self._handle(event)
            except Exception as error:
                logger.exception("could not handle %s", event)
                failed = ControllerFailed(generation=GENERATION, message=_shown_error(error))
                for command in self._machine.advance(failed):  # not journaled: it may be the journal that failed
                    self._carry_out(command)
        self._end()
        await asyncio.sleep(LINGER_S)
        ray.actor.exit_actor()

    async def events(self) -> AsyncIterator[Shown]:
        """What happens, for the driver to show; the last item is RunEnded."""
        while True:
            item = await self._shown.get()
            yield item
            if isinstance(item, RunEnded):
                return

    async def stop(self, by: str) -> None:
        """Ask for a checkpoint and then the end."""
        self._inbox.put_nowait(StopAsked(generation=self._machine.state.generation, by=by))

    async def progress(self) -> dict[str, dict[str, object]]:
        """What every cell is doing now, by cell."""
        answers = await asyncio.gather(*(worker.progress.remote() for worker in self._workers.values()))
        return dict(zip(self._workers, answers))

    def _handle(self, event: Event) -> None:
        self._journal("event", event)
        before = self._machine.state
        commands = self._machine.advance(event)
        after = self._machine.state
        if isinstance(after, Running) and isinstance(before, Starting):
            self._announce(after)
        for command in commands:
            self._journal("command", command)
            self._carry_out(command)

    def _carry_out(self, command: Command) -> None:
        match command:
            case SetUp():
                for rank, cell in enumerate(self._names):
                    self._spawn(self._set_up(rank, cell))
            case Grant():
                for cell in self._names:
                    self._spawn(self._follow(cell))
            case AskStop(generation=generation):
                for worker in self._workers.values():
                    worker.ask_stop.remote(generation)
            case Abort(generation=generation, seconds=seconds):
                for worker in self._workers.values():
                    worker.abort.remote(generation)
                self._spawn(self._deadline(generation, seconds))
            case Kill(cells=cells):
                for cell in cells:
                    if cell in self._workers:
                        ray.kill(self._workers[cell])

    async def _place(self) -> None:
        """Find room for every cell, start its actor, and open the store where they will meet."""
        job = self._plan.job
        resources = cell_resources(self._device, self._layout.world)
        self._placement = Placement(self._layout, resources, job.run.name)
        missing = await self._placement.wait(job.cluster.wait_s)
        if missing is not None:
            self._inbox.put_nowait(PlacementFailed(generation=GENERATION, missing=missing))
            return
        remote = ray.remote(concurrency_groups={"control": 2, "tether": 1})(Worker)
        for rank, cell in enumerate(self._layout.cells()):
            name = _worker_name(rank)
            self._workers[str(cell)] = remote.options(
                name=f"{job.run.name}/{name}",
                num_cpus=resources.num_cpus,
                num_gpus=resources.num_gpus,
                max_restarts=0,
                max_task_retries=0,
                scheduling_strategy=self._placement.strategy(cell),
            ).remote(name, str(self._plan.files.logs / f"{name}.log"))
        for cell in self._names:
            self._spawn(self._tether(cell))
        self._store = await asyncio.to_thread(_open_store, self._host)
        self._inbox.put_nowait(Placed(generation=GENERATION))

    async def _set_up(self, rank: int, cell: str) -> None:
        assignment = Assignment(
            plan=self._plan,
            generation=GENERATION,
            rank=rank,
            device=self._device,
            store_host=self._host,
            store_port=self._store.port,
            loopback=self._is_local,
        )
        try:
            member = await self._workers[cell].set_up.options(name=self._title(cell)).remote(assignment)
        except RayError as error:
            self._fail(cell, error)
        else:
            self._inbox.put_nowait(CellReady(generation=GENERATION, cell=cell, member=member))

    async def _follow(self, cell: str) -> None:
        """Take the stream of one cell's events; its last item may be the error."""
        stream = self._workers[cell].run.options(name=self._title(cell), num_returns="streaming").remote(GENERATION)
        try:
            async for reference in stream:
                for event in await reference:
                    self._take(cell, event)
        except RayError as error:
            self._fail(cell, error)

    async def _tether(self, cell: str) -> None:
        try:
            await self._workers[cell].tether.options(concurrency_group="tether").remote()
        except RayActorError as error:
            self._fail(cell, error)

    async def _deadline(self, generation: int, seconds: float) -> None:
        await asyncio.sleep(seconds)
        self._inbox.put_nowait(DeadlinePassed(generation=generation))

    def _take(self, cell: str, event: CellEvent) -> None:
        if cell == self._names[0]:
            self._recorder.take(event)
            if isinstance(event, StepReport | CheckpointSaved):
                self._shown.put_nowait(event)
        if isinstance(event, CellDone):
            self._inbox.put_nowait(CellEnded(generation=event.generation, cell=cell, done=event))

    def _fail(self, cell: str, error: Exception) -> None:
        failure = _cell_error(cell, _worker_name(self._names.index(cell)), error)
        self._inbox.put_nowait(CellFailed(generation=GENERATION, error=failure))

    def _announce(self, state: Running) -> None:
        cells = {cell: plain(member) for cell, member in state.members.items()}
        self._recorder.membership(state.generation, cells)
        self._shown.put_nowait(Membership(generation=state.generation, members=dict(state.members)))

    def _end(self) -> None:
        match self._machine.state:
            case Finished(done=done):
                ended = RunEnded(done=done)
            case Failed(errors=errors):
                ended = RunEnded(done=None, errors=errors)
                values = {"errors": [plain(error) for error in errors]}
                with suppress(OSError):  # the disk may be the cause
                    self._recorder.journal(JournalEntry(kind="failed", generation=GENERATION, values=values))
            case state:
                raise AssertionError(f"{state} is no end")
        for task in self._tasks:
            task.cancel()
        for worker in self._workers.values():
            ray.kill(worker)
        if self._placement is not None:
            self._placement.remove()
        self._recorder.close()
        self._shown.put_nowait(ended)

    def _journal(self, role: str, message: Event | Command) -> None:
        values = plain(message)
        generation = values.pop("generation")
        kind = re.sub(r"(?<!^)(?=[A-Z])", "_", type(message).__name__).lower()
        entry = JournalEntry(kind=kind, generation=generation, values={"role": role, **values})
        self._recorder.journal(entry)

    def _title(self, cell: str) -> str:
        return f"{self._plan.job.run.name} g{GENERATION} {cell}"

    @property
    def _is_local(self) -> bool:
        return self._plan.job.cluster.address == "local"

    @property
    def _host(self) -> str:
        return "127.0.0.1" if self._is_local else str(ray.util.get_node_ip_address())

    def _spawn(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._finished)

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("a task failed", exc_info=error)
            self._inbox.put_nowait(ControllerFailed(generation=GENERATION, message=_shown_error(error)))


def _worker_name(number: int) -> str:
    return f"worker-{number:04d}"


def _cell_error(cell: str, worker: str, error: Exception) -> CellError:
    """What an exception from an actor call means for its cell."""
    if isinstance(error, RayActorError):
        return CellError(cell=cell, worker=worker, kind="died", message=death_of(error))
    cause = getattr(error, "cause", None) or error
    kind = "collateral" if isinstance(cause, CollectiveError) else "raised"
    return CellError(cell=cell, worker=worker, kind=kind, message=_shown_error(cause))


def _shown_error(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def death_of(error: RayActorError) -> str:
    """Ray's report of a death, without its advice."""
    text = str(error)
    lines: Iterable[str] = (line.strip() for line in text.splitlines())
    told = [line for line in lines if "exit" in line.lower() or "died" in line.lower()]
    reason, _, _ = (told[-1] if told else text).partition(" If the process was killed by the kernel OOM killer")
    return f"its process died: {reason}"


def _open_store(host: str) -> Any:
    """The store in which the cells of every generation meet, listening on ``host`` alone, on a port that is free."""
    from torch.distributed import TCPStore

    listener = socket.create_server((host, 0))
    port = listener.getsockname()[1]
    return TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
