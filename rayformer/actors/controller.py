"""The controller: a detached, async actor that owns the workers of one run and carries out what the machine decides.

Workers, holders and placement groups are its children, so a killed driver loses nothing and a dead controller leaks
nothing. Everything is journaled before it is done.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError

from rayformer.actors.assignment import Assignment
from rayformer.actors.crew import Crew, Hand
from rayformer.actors.failures import cell_error, in_words, is_death
from rayformer.actors.incident import Incident
from rayformer.actors.inflict import Inflictor
from rayformer.actors.salvage import save_copies
from rayformer.actors.saves import Saves
from rayformer.actors.shown import Membership, Noted, Recovered, RunEnded, Shown
from rayformer.actors.survey import survey
from rayformer.actors.watch import LOOK_EVERY_S, Watch
from rayformer.cell.plan import RunPlan
from rayformer.ckpt.manifest import step_folder
from rayformer.control.journal import attempt_entry, entry_of
from rayformer.control.machine import Machine
from rayformer.control.messages import (
    Abort,
    AskStop,
    CellBroke,
    CellDrained,
    CellEnded,
    CellFailed,
    CellLost,
    CellPlaced,
    CellReady,
    Command,
    ControllerFailed,
    DeadlinePassed,
    Event,
    Grant,
    HeldSaved,
    Join,
    Kill,
    NoRoom,
    Placed,
    PlacementFailed,
    Replace,
    SaveHeld,
    SetUp,
    StopAsked,
    Survey,
    Surveyed,
    Wait,
    WaitOver,
)
from rayformer.control.policy import Budget
from rayformer.control.restore import Held, Restore, Source
from rayformer.control.states import (
    END_STATES,
    Draining,
    Failed,
    Finished,
    Member,
    Rebuilding,
    Running,
    Starting,
    State,
)
from rayformer.errors import DamagedError
from rayformer.events import (
    CellDone,
    CellError,
    CellEvent,
    CheckpointSaved,
    JournalEntry,
    SaveDue,
    SaveFailed,
    SaveSkipped,
    SaveWaits,
    StepReport,
    StepTrace,
    plain,
)
from rayformer.faults.plan import resolve_faults
from rayformer.observe.display import NoDisplay
from rayformer.observe.recorder import Recorder, failed, skipped

FIRST_GENERATION = 1
LINGER_S = 60.0
logger = logging.getLogger("rayformer.controller")


class Controller:
    """Runs one attempt of one run. ``run`` is called once; ``events`` tells the driver what to show."""

    def __init__(self, plan: RunPlan, device: str) -> None:
        self._plan, self._device = plan, device
        job = plan.job
        self._layout = job.layout.degrees
        self._names = [str(cell) for cell in self._layout.cells()]
        budget = Budget(max_failures=job.recovery.max_failures)
        self._machine = Machine(Starting(generation=FIRST_GENERATION, cells=tuple(self._names), budget=budget))
        self._recorder = Recorder(plan.files, attempt=plan.attempt, total_steps=job.run.steps, display=NoDisplay())
        self._inbox: asyncio.Queue[Event] = asyncio.Queue()
        self._shown: asyncio.Queue[Shown] = asyncio.Queue()
        self._crew = Crew(plan, device, self._on_death, self._on_rehoused)
        self._saves = Saves(plan, self._crew, self._on_saved)
        self._failed_save: SaveFailed | None = None
        self._store: Any = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._calls: dict[str, asyncio.Task[None]] = {}  # in which each cell is
        self._waiting: asyncio.Task[None] | None = None
        self._told = (0, 0)  # generation and step of the last report
        self._checkpoint = plan.done_steps, plan.start_from
        self._incident: Incident | None = None
        self._second_holder: dict[str, ActorHandle] = {}
        faults = resolve_faults(job.faults, self._layout)
        marks = plan.files.marks(plan.attempt)
        self._inflictor = Inflictor(faults, self._crew, marks, self._recorder.journal) if faults else None
        self._watch = Watch(
            self._crew,
            plan.files.logs,
            stall_s=None if job.recovery.stall_s == "auto" else job.recovery.stall_s,
            journal=self._recorder.journal,
            tell=lambda text: self._shown.put_nowait(Noted(text=text)),
            stalled=self._inbox.put_nowait,
        )

    def __repr__(self) -> str:
        return f"Controller({self._plan.job.run.name})"

    async def run(self) -> None:
        """Place, set up, run and clean up. When the run is over and no driver ends this process, it ends itself."""
        assert isinstance(self._machine.state, Starting)
        self._recorder.journal(attempt_entry(self._machine.state))
        self._spawn(self._place())
        while not isinstance(self._machine.state, END_STATES):
            event = await self._inbox.get()
            try:
                self._handle(event)
            except Exception as error:
                logger.exception("could not handle %s", event)
                failed = ControllerFailed(generation=self._generation, message=in_words(error))
                self._machine.advance(failed)  # not journaled: it may be the journal that failed
        if self._inflictor is not None:
            self._inflictor.prove(self._generation)
        await self._saves.finish()
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
        self._inbox.put_nowait(StopAsked(generation=self._generation, by=by))

    @property
    def _generation(self) -> int:
        return self._machine.state.generation

    def _handle(self, event: Event) -> None:
        self._recorder.journal(entry_of(event))
        before = self._machine.state
        commands = self._machine.advance(event)
        after = self._machine.state
        self._time_incident(before, after)
        if isinstance(after, Running) and not isinstance(before, Running):
            self._watch.start_generation()
            self._announce(after)
        if isinstance(after, Finished) and self._incident is not None and self._incident.is_repaired:
            self._recovered(self._incident)  # there was no step left to do
        for command in commands:
            self._recorder.journal(entry_of(command))
            self._carry_out(command)

    def _carry_out(self, command: Command) -> None:
        match command:
            case SetUp(generation=generation):
                for cell in self._names:
                    self._calls[cell] = self._spawn(self._join(cell, self._assignment(cell, generation)))
            case Join(generation=generation, restore=restore, pause_s=pause_s):
                self._spawn(self._join_all(generation, restore, pause_s))
            case Grant(generation=generation):
                for cell in self._names:
                    self._calls[cell] = self._spawn(self._follow(cell, generation))
            case AskStop(generation=generation):
                for hand in self._crew.owners.values():
                    hand.actor.ask_stop.remote(generation)
            case Abort(generation=generation, cells=cells, seconds=seconds):
                for cell in cells:
                    self._spawn(self._abort(cell, generation))
                self._spawn(self._after(seconds, DeadlinePassed(generation=generation)))
            case Kill(cells=cells):
                for cell in cells:
                    if cell in self._crew.owners:
                        ray.kill(self._crew.owners[cell].actor)
            case Replace(generation=generation, cells=cells):
                for cell in cells:
                    self._spawn(self._replace(cell, generation))
            case Survey(generation=generation, number=number):
                self._spawn(self._survey(generation, number))
            case Wait(generation=generation):
                if self._waiting is not None:
                    self._waiting.cancel()
                wait = self._after(self._plan.job.cluster.wait_s, WaitOver(generation=generation))
                self._waiting = self._spawn(wait)
            case SaveHeld(generation=generation, restore=restore):
                self._spawn(self._save_held(generation, restore))

    async def _place(self) -> None:
        """Find room for every cell, start its actor, and open the store where they will meet."""
        self._store = await asyncio.to_thread(_open_store, self._host)
        missing = await self._crew.start(self._plan.job.cluster.wait_s)
        if missing is not None:
            self._inbox.put_nowait(PlacementFailed(generation=FIRST_GENERATION, missing=missing))
            return
        self._spawn(self._watch.look_forever(lambda: self._machine.state))
        self._spawn(self._saves.work())
        if self._inflictor is not None:
            self._spawn(self._watch_faults(self._inflictor))
        self._inbox.put_nowait(Placed(generation=FIRST_GENERATION))

    def _assignment(self, cell: str, generation: int, restore: Restore | None = None) -> Assignment:
        hand = self._crew.owners[cell]
        step, folder = self._checkpoint
        source: Source = "checkpoint" if restore is None else restore.sources[cell]
        return Assignment(
            plan=self._plan,
            generation=generation,
            rank=self._names.index(cell),
            device=self._device,
            store_host=self._host,
            store_port=self._store.port,
            loopback=self._is_local,
            accelerators=hand.accelerators,
            holder=self._crew.holders.get(hand.node),
            is_copied=len(self._crew.holders) > 1,
            step=step if restore is None else restore.step,
            source=source,
            folder=folder,
            copies=self._second_holder.get(cell) if source == "second_holder" else None,
            goes_on=restore is not None,
        )

    async def _join_all(self, generation: int, restore: Restore, pause_s: float) -> None:
        self._saves.went_back(restore.step)
        await asyncio.sleep(pause_s)
        for holder in self._crew.holders.values():
            holder.forget_after.remote(restore.step)
        if self._generation == generation:
            for cell in self._names:
                self._calls[cell] = self._spawn(self._join(cell, self._assignment(cell, generation, restore)))

    async def _join(self, cell: str, assignment: Assignment) -> None:
        hand, generation = self._crew.owners[cell], assignment.generation
        try:
            joined = await hand.actor.join.options(name=self._title(cell, generation)).remote(assignment)
        except RayError as error:
            self._fail(cell, hand, generation, error)
            return
        if joined is None:
            self._broke(cell, hand, generation)
            return
        if self._incident is not None:
            self._incident.joined(cell, joined)
        if joined.pinned is not None and cell == self._names[0]:
            self._saves.found_pinned(generation, joined.pinned)
        member = Member(worker=joined.worker, pid=joined.pid, node=joined.node, param_addr=joined.param_addr)
        self._inbox.put_nowait(CellReady(generation=generation, cell=cell, member=member))

    async def _follow(self, cell: str, generation: int) -> None:
        """Take the stream of one cell's events; its last item may be the error."""
        hand = self._crew.owners[cell]
        run = hand.actor.run.options(name=self._title(cell, generation), num_returns="streaming")
        done = False
        try:
            async for reference in run.remote(generation):
                for event in await reference:
                    self._take(cell, event)
                    done = done or isinstance(event, CellDone)
        except RayError as error:
            self._fail(cell, hand, generation, error)
        else:
            if not done:
                self._broke(cell, hand, generation)

    async def _abort(self, cell: str, generation: int) -> None:
        hand, call = self._crew.owners[cell], self._calls.get(cell)
        with suppress(RayError):  # its death is told elsewhere
            stood = await hand.actor.abort.remote(generation)
            if call is not None:
                await asyncio.wait([call])  # what it has to say comes first
            for report in stood.untold:
                self._take(cell, report)
            self._inbox.put_nowait(CellDrained(generation=generation, cell=cell, standing=stood.step))

    async def _replace(self, cell: str, generation: int) -> None:
        def no_room(missing: str) -> None:
            self._inbox.put_nowait(NoRoom(generation=generation, missing=missing))

        hand = await self._crew.replace(cell, no_room)
        self._inbox.put_nowait(CellPlaced(generation=generation, cell=cell, worker=hand.name))

    async def _survey(self, generation: int, number: int) -> None:
        found = await survey(self._crew, self._names)
        self._second_holder = found.second_holder
        held = Held(cells=found.holdings, checkpoint=self._checkpoint[0])
        self._inbox.put_nowait(Surveyed(generation=generation, number=number, held=held))

    async def _save_held(self, generation: int, restore: Restore) -> None:
        """Write what is held of ``restore`` as a checkpoint; if that is where it comes from, it is one already."""
        step, path = self._checkpoint[0], self._checkpoint[1]
        if restore.source != "checkpoint":
            for cell, source in restore.sources.items():
                if source == "live":
                    await self._crew.owners[cell].actor.snapshot.remote()
            copies = {cell: await self._holding(cell, restore).fetch.remote(cell, restore.step) for cell in self._names}
            saved = await asyncio.to_thread(save_copies, self._plan, copies, generation=generation)
            self._recorder.take(saved)
            self._shown.put_nowait(saved)
            step, path = saved.step, self._plan.checkpoints / step_folder(saved.step)
        done = CellDone(
            generation=generation, outcome="stopped", step=step, checkpoint=None if path is None else str(path)
        )
        self._inbox.put_nowait(HeldSaved(generation=generation, done=done))

    def _holding(self, cell: str, restore: Restore) -> ActorHandle:
        """The holder that has what ``restore`` says of ``cell``."""
        if restore.sources[cell] == "second_holder":
            return self._second_holder[cell]
        return self._crew.holders[self._crew.owners[cell].node]

    async def _watch_faults(self, inflictor: Inflictor) -> None:
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            inflictor.prove(self._generation)

    async def _after(self, seconds: float, event: Event) -> None:
        await asyncio.sleep(seconds)
        self._inbox.put_nowait(event)

    def _take(self, cell: str, event: CellEvent) -> None:
        """Record and show what a cell tells, of all but the first only that it is done."""
        is_first = cell == self._names[0]
        match event:
            case CellDone():
                if is_first:
                    self._spawn(self._ended(cell, event))
                else:
                    self._inbox.put_nowait(CellEnded(generation=event.generation, cell=cell, done=event))
            case _ if not is_first:
                pass
            case StepReport():
                self._take_report(event)
            case StepTrace():
                self._recorder.take(event)
            case SaveDue():
                self._saves.due(event)
            case CheckpointSaved():
                self._checkpoint = event.step, self._plan.checkpoints / step_folder(event.step)
                self._show(event)
            case SaveWaits(step=step):
                self._recorder.take(event)
                self._shown.put_nowait(Noted(text=f"training waits after step {step} for the checkpoint before"))
            case SaveSkipped():
                self._recorder.take(event)
                self._shown.put_nowait(Noted(text=skipped(event)))
            case SaveFailed():
                self._recorder.take(event)
                self._shown.put_nowait(Noted(text=failed(event)))

    def _take_report(self, report: StepReport) -> None:
        if (report.generation, report.step) <= self._told:  # told again by the one that took over
            return
        if report.generation > self._told[0]:  # its first step: now there is time for what is needed next
            self._crew.refill(lambda hand: hand.actor.warm.remote(self._assignment(self._names[0], 0)))
        self._told = report.generation, report.step
        self._watch.note_step(report.step_s)
        self._show(report)
        if self._inflictor is not None:
            self._inflictor.on_step(report.step, report.generation)
        is_after = report.generation == self._generation
        if is_after and self._incident is not None and self._incident.is_repaired:
            self._recovered(self._incident)

    def _show(self, event: StepReport | CheckpointSaved) -> None:
        self._recorder.take(event)
        self._shown.put_nowait(event)

    def _on_saved(self, ended: CheckpointSaved | SaveFailed, report: StepReport | None) -> None:
        """A save has ended; ``report`` is that of its step, if it waited for it."""
        self._failed_save = ended if isinstance(ended, SaveFailed) else None
        if report is not None:
            found = ended.state_hash if isinstance(ended, CheckpointSaved) else None
            self._take_report(replace(report, state_hash=found))
        if self._failed_save is not None or ended.step != self._checkpoint[0]:
            self._take(self._names[0], ended)

    async def _on_rehoused(self) -> None:
        await self._saves.rehoused()

    async def _ended(self, cell: str, done: CellDone) -> None:
        """The first cell is done; so is the run when its last checkpoint is written."""
        await self._saves.settle()
        lost = self._failed_save
        if lost is not None and lost.step == done.step:
            message = f"the checkpoint of step {lost.step} could not be written: {lost.message}"
            self._inbox.put_nowait(ControllerFailed(generation=self._generation, message=message))
        else:
            self._inbox.put_nowait(CellEnded(generation=done.generation, cell=cell, done=done))

    def _time_incident(self, before: State, after: State) -> None:
        now = time.monotonic()
        if isinstance(after, Draining | Rebuilding) and self._incident is None:  # a lone cell leaves nobody to drain
            self._incident = Incident(started=now, reached=self._told[1], happened=self._watch.stalled_since)
            self._watch.stalled_since = None
        if self._incident is not None:
            self._incident.enter(after, now)

    def _recovered(self, incident: Incident) -> None:
        if incident.happened is None and self._inflictor is not None:
            incident.happened = max(
                (
                    at
                    for cell, at in self._inflictor.happened.items()
                    if cell in incident.lost and at <= incident.noticed
                ),
                default=None,
            )
        values = incident.values(time.monotonic())
        self._incident = None
        self._recorder.journal(JournalEntry(kind="recovered", generation=self._generation, values=values))
        self._shown.put_nowait(Recovered(values=values))

    def _on_death(self, worker: str, error: RayError) -> None:
        cell = self._crew.owner_of(worker)
        if cell is None:
            self._crew.dismiss(worker)
            return
        standby = self._crew.prepare(cell)
        if standby is not None:
            standby.actor.prepare.remote(self._assignment(cell, 0))
        failure = cell_error(cell, self._crew.owners[cell], error)
        self._inbox.put_nowait(CellLost(generation=self._generation, error=failure))

    def _fail(self, cell: str, hand: Hand, generation: int, error: RayError) -> None:
        """A call of a cell failed: its process is gone, which the tether tells too, or its program raised."""
        if self._crew.owners[cell] is not hand:
            return
        failure = cell_error(cell, hand, error)
        if isinstance(getattr(error, "cause", None), DamagedError):
            assert self._checkpoint[1] is not None
            failure = replace(failure, damaged=self._checkpoint[1].name)
        if is_death(error):
            self._inbox.put_nowait(CellLost(generation=self._generation, error=failure))
        else:
            self._inbox.put_nowait(CellFailed(generation=generation, error=failure))

    def _broke(self, cell: str, hand: Hand, generation: int) -> None:
        if self._crew.owners[cell] is hand:
            message = "it lost the connection to a peer"
            error = CellError(cell=cell, worker=hand.name, kind="collateral", message=message)
            self._inbox.put_nowait(CellBroke(generation=generation, error=error))

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
                    self._recorder.journal(JournalEntry(kind="failed", generation=self._generation, values=values))
            case state:
                raise AssertionError(f"{state} is no end")
        for task in self._tasks:
            task.cancel()
        self._crew.end()
        self._recorder.close()
        self._shown.put_nowait(ended)

    def _title(self, cell: str, generation: int) -> str:
        return f"{self._plan.job.run.name} g{generation} {cell}"

    @property
    def _is_local(self) -> bool:
        return self._plan.job.cluster.address == "local"

    @property
    def _host(self) -> str:
        return "127.0.0.1" if self._is_local else str(ray.util.get_node_ip_address())

    def _spawn(self, work: Any) -> asyncio.Task[None]:
        task: asyncio.Task[None] = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._finished)
        return task

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("a task failed", exc_info=error)
            self._inbox.put_nowait(ControllerFailed(generation=self._generation, message=in_words(error)))


def _open_store(host: str) -> Any:
    """The store in which the cells of every generation meet, listening on ``host`` alone, on a port that is free."""
    from torch.distributed import TCPStore

    listener = socket.create_server((host, 0))
    port = listener.getsockname()[1]
    return TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
