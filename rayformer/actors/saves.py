"""The saves of a run: one at a time, from the slots of the cells, while these go on.

When the first cell says that a checkpoint is due, its step is pinned there, and soon on all. The savers of all nodes
write what each is to write, the manifest makes a checkpoint of it, and the slots are let go. A save that fails is tried
again as long as its snapshots are there; if it fails for good, that is told and training goes on.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any

from ray.actor import ActorHandle
from ray.exceptions import RayActorError, RayError, RayTaskError

from rayformer.actors.crew import Crew
from rayformer.actors.saver import Order, Share
from rayformer.cell.plan import RunPlan
from rayformer.cell.state import make_manifest, prune_for
from rayformer.ckpt.hash import shown
from rayformer.ckpt.manifest import step_folder
from rayformer.ckpt.share import plan_files, shapes_of
from rayformer.ckpt.slots import load_index
from rayformer.ckpt.writer import abandon, commit, start
from rayformer.errors import RayformerError, SnapshotError
from rayformer.events import CheckpointSaved, SaveDue, SaveFailed, StepReport

TRIES, PAUSE_S = 3, 1.0
PIN_S, LOOK_FOR_PINS_S = 120.0, 0.05  # until every cell has come to a step that is saved
FINISH_S = 60.0  # for the last save of a run that failed
LOOK_EVERY_S, STUCK_S = 5.0, 300.0  # a file that takes longer than this is given up
logger = logging.getLogger("rayformer.saves")

Told = Callable[[CheckpointSaved | SaveFailed, StepReport | None], None]


class Saves:
    """Writes the checkpoints of one attempt; ``told`` hears how each ended, with the report that waited for it."""

    def __init__(self, plan: RunPlan, crew: Crew, told: Told) -> None:
        self._plan, self._crew, self._told = plan, crew, told
        self._queue: asyncio.Queue[SaveDue] = asyncio.Queue()
        self._pinning: dict[int, int] = {}  # steps that cells are pinning, and the newest generation that does
        self._now: SaveDue | None = None
        self._report: StepReport | None = None
        self._is_given_up = self._is_ending = False
        self._savers: list[ActorHandle] = []
        self._number = 0  # of the last order
        self._last: CheckpointSaved | None = None
        self._idle = asyncio.Event()
        self._idle.set()

    def due(self, event: SaveDue) -> None:
        """Save the state after a step, which a cell has pinned; one that is being saved, or is saved, only once."""
        self._pinning[event.step] = event.generation
        self._put(event)

    def _put(self, event: SaveDue) -> None:
        if self._now is not None and self._now.step == event.step and not self._is_given_up:
            self._report = event.report or self._report
            return
        self._idle.clear()
        self._queue.put_nowait(event)

    def found_pinned(self, generation: int, step: int) -> None:
        """A cell joins with a snapshot pinned, of which nobody may have heard."""
        self._put(SaveDue(generation=generation, step=step))

    async def rehoused(self) -> None:
        """Slots were taken to new memory, and what had been let go before may be pinned there."""
        if self._now is None:
            await self.let_go()

    def went_back(self, step: int) -> None:
        """The run goes on after ``step``: a later one's state is of a past that is left behind."""
        if self._now is not None and self._now.step > step:
            self._is_given_up = True

    async def finish(self) -> None:
        """The run is over: what is being written is written to its end, and nothing is waited for or tried again."""
        self._is_ending = True
        for saver in self._savers:
            saver.give_up.remote(self._number)
        with suppress(TimeoutError):
            await asyncio.wait_for(self.settle(), FINISH_S)

    async def settle(self) -> None:
        """Return when everything that was due is saved, or has failed."""
        await self._idle.wait()

    async def work(self) -> None:
        """Save whatever is due, one after the other; never returns."""
        while True:
            self._now = await self._queue.get()
            self._report, self._is_given_up = self._now.report, False
            if self._last is None or self._last.step != self._now.step:
                ended = await self._save(self._now)
            else:
                ended = self._last  # the generation before this one got that far
            if isinstance(ended, CheckpointSaved):
                self._last = ended
            if not self._is_given_up:  # else the cells have forgotten that step, and may have pinned it again
                await self._let_go_of(ended)
            report, self._now = self._report, None
            if not self._is_given_up:
                self._told(ended, report)
            if self._queue.empty():
                self._idle.set()

    async def _save(self, due: SaveDue) -> CheckpointSaved | SaveFailed:
        message = ""
        for attempt in range(TRIES):
            if attempt:
                await asyncio.sleep(PAUSE_S)
            try:
                return await self._try(due)
            except (RayError, RayformerError, OSError) as error:
                cause = getattr(error, "cause", None) or error
                message = str(cause).splitlines()[0]
                if isinstance(error, RayActorError) and not isinstance(error, RayTaskError):
                    for node in {hand.node for hand in self._crew.owners.values()}:
                        self._crew.drop_saver(node)
                logger.warning("the save of step %d failed: %s", due.step, cause)
                await asyncio.to_thread(abandon, self._plan.checkpoints / step_folder(due.step))
            if self._is_given_up or self._is_ending:
                break
        return SaveFailed(generation=due.generation, step=due.step, message=message)

    async def _try(self, due: SaveDue) -> CheckpointSaved:
        started, directory, job = time.monotonic(), self._plan.checkpoints, self._plan.job
        folder = directory / step_folder(due.step)
        await asyncio.to_thread(start, folder)
        by_node: defaultdict[str, list[str]] = defaultdict(list)
        for cell, hand in self._crew.owners.items():
            if hand.node == "":
                raise SnapshotError(f"{cell} has no owner at the moment")
            by_node[hand.node].append(cell)
        savers = {node: self._crew.saver(node) for node in by_node}
        places = {node: await self._places(node, cells) for node, cells in by_node.items()}
        indexes: dict[str, bytes] = {}
        for node, saver in savers.items():
            indexes |= await saver.indexes.remote(places[node])
        held = {cell: load_index(text) for cell, text in indexes.items()}
        files = plan_files(held, max_file_bytes=job.checkpoint.max_file_bytes)
        shapes = shapes_of(held.values())
        self._number = number = self._number + 1
        self._savers = list(savers.values())
        orders = {
            node: Order(
                number=number,
                folder=folder,
                step=due.step,
                places=places[node],
                files={cell: files[cell] for cell in cells},
                shapes=shapes,
            )
            for node, cells in by_node.items()
        }
        shares = await self._written(savers, orders, number)
        found = shown(sum(share.hash for share in shares))
        manifest = make_manifest(
            job,
            step=due.step,
            extra=next((share.extra for share in shares if share.extra["samples"]), shares[0].extra),
            records=[record for share in shares for record in share.records],
            state_hash=found,
        )
        if self._is_given_up:
            raise SnapshotError(f"the run went back to a step before {due.step}")
        await asyncio.to_thread(commit, directory, folder, manifest)
        await asyncio.to_thread(prune_for, job, directory)
        seconds = time.monotonic() - started
        return CheckpointSaved(
            generation=due.generation, step=due.step, path=str(folder), state_hash=found, seconds=seconds
        )

    async def _places(self, node: str, cells: list[str]) -> Mapping[str, Any]:
        holder = self._crew.holders.get(node)
        if holder is None:
            raise SnapshotError(f"the node of {', '.join(cells)} has no holder at the moment")
        places: Mapping[str, Any] = await holder.places.remote(cells)
        return places

    async def _written(
        self, savers: Mapping[str, ActorHandle], orders: Mapping[str, Order], number: int
    ) -> list[Share]:
        """What every saver wrote. One that writes nothing for long is killed, which ends its call."""
        calls = [asyncio.ensure_future(_awaited(savers[node].write.remote(order))) for node, order in orders.items()]
        moved, num_bytes = time.monotonic(), -1
        try:
            while True:
                done, pending = await asyncio.wait(
                    calls, timeout=LOOK_EVERY_S if num_bytes >= 0 else 1.0, return_when=asyncio.FIRST_EXCEPTION
                )
                if not pending or any(call.exception() for call in done):
                    return [call.result() for call in sorted(calls, key=lambda call: not call.done())]
                if self._is_given_up:
                    raise SnapshotError("the run went back meanwhile")
                now = await self._num_bytes(savers.values())
                if now != num_bytes:
                    moved, num_bytes = time.monotonic(), now
                elif time.monotonic() - moved > STUCK_S:
                    for node in savers:
                        self._crew.drop_saver(node)
                    raise SnapshotError(f"nothing was written for {STUCK_S:g} s; the savers were killed")
        finally:
            for saver in savers.values():
                saver.give_up.remote(number)
            for call in calls:
                call.cancel()

    async def _num_bytes(self, savers: Any) -> int:
        total = 0
        for saver in savers:
            with suppress(RayError, TimeoutError):
                total += await asyncio.wait_for(_awaited(saver.num_bytes.remote()), LOOK_EVERY_S)
        return total

    async def _let_go_of(self, ended: CheckpointSaved | SaveFailed) -> None:
        """Let the slots go once all cells have pinned them: who pins later than that would keep it for good.

        The cells of a generation that goes on from a step that is saved pin it again.
        """
        while True:
            generation = self._pinning.get(ended.step)
            if generation is not None and isinstance(ended, CheckpointSaved):
                await self._all_pinned(ended.step, generation)
            await self.let_go()
            if self._pinning.get(ended.step) == generation:
                break
        self._pinning.pop(ended.step, None)

    async def _all_pinned(self, step: int, generation: int) -> None:
        """Return when every cell has pinned ``step`` in ``generation``, or will not do so any more."""
        until = time.monotonic() + PIN_S
        while not (self._is_given_up or self._is_ending) and time.monotonic() < until:
            by_node: defaultdict[str, list[str]] = defaultdict(list)
            for cell, hand in self._crew.owners.items():
                by_node[hand.node].append(cell)
            holders = self._crew.holders
            with suppress(RayError):
                if all(
                    [
                        node in holders and await holders[node].have_pinned.remote(cells, step, generation)
                        for node, cells in by_node.items()
                    ]
                ):
                    return
            await asyncio.sleep(LOOK_FOR_PINS_S)

    async def let_go(self) -> None:
        """Let the slots of all cells be written over again."""
        for holder in list(self._crew.holders.values()):
            with suppress(RayError):
                await holder.unpin.remote()


async def _awaited(reference: Awaitable[Any]) -> Any:
    return await reference
