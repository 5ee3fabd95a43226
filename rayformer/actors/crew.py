"""The crew of a run: its workers with and without a cell, the holders of their nodes, and where they are placed."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rayformer.actors.holder import Holder
from rayformer.actors.placement import Placement, cell_resources
from rayformer.actors.saver import Saver
from rayformer.actors.worker import Worker
from rayformer.cell.plan import RunPlan
from rayformer.errors import RunError
from rayformer.layout import Cell, Layout

logger = logging.getLogger("rayformer.crew")
# Made once: Ray publishes a class each time that it is made remote, and keeps what it published.
_WORKER = ray.remote(concurrency_groups={"control": 2, "tether": 1})(Worker)
_HOLDER = ray.remote(max_concurrency=4, concurrency_groups={"tether": 1})(Holder)
_SAVER = ray.remote(concurrency_groups={"control": 1})(Saver)
RETRY_S, TRIES = 0.2, 5
UP_S = 300.0  # seconds that a process may take to come up where there is room for it
ROOM_S = 3.0  # seconds until a lost cell that finds no place is told


@dataclass(kw_only=True)
class Hand:
    """One worker: its name and actor, its node and accelerators once it has said so, and which cell it prepares for."""

    name: str
    actor: ActorHandle
    node: str = ""
    accelerators: str = ""
    prepares: str = ""


class Crew:
    """Starts, keeps and replaces workers. ``on_death`` is told the name of a worker whose process is gone, and why.

    ``on_rehoused`` is called when cells have taken their snapshots to a new holder.
    """

    def __init__(
        self,
        plan: RunPlan,
        device: str,
        on_death: Callable[[str, RayError], None],
        on_rehoused: Callable[[], Awaitable[None]],
    ) -> None:
        job = plan.job
        self._plan, self._job, self._on_death, self._on_rehoused = plan, job, on_death, on_rehoused
        self._layout: Layout = job.layout.degrees
        self._resources = cell_resources(device, self._layout.world)
        self.placement = Placement(self._layout, self._resources, job.run.name, num_spares=job.recovery.spare_bundles)
        self.owners: dict[str, Hand] = {}
        self.holders: dict[str, ActorHandle] = {}
        self._savers: dict[str, ActorHandle] = {}
        self._standbys: dict[str, list[Hand]] = {}
        self._early: dict[str, Hand] = {}  # by the cell that they are going to own
        self._coming: Counter[str] = Counter()
        self._moved: set[tuple[tuple[int, int, int], str]] = set()
        self._num_started = 0
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self, wait_s: float) -> str | None:
        """A worker for every cell, and a holder on every node; None, or what is missing."""
        missing = await self.placement.wait(wait_s)
        if missing is not None:
            return missing
        owners = {str(cell): self._placed_worker(str(cell)) for cell in self._layout.cells()}
        await asyncio.gather(*(self._settle(hand) for hand in owners.values()))
        lost = [cell for cell, hand in owners.items() if not hand.node]
        if lost:
            return (
                f"the workers of {', '.join(lost)} died before they were up; their logs are in {self._plan.files.logs}"
            )
        self.owners = owners
        self.hold({hand.node for hand in owners.values()})
        return None

    def hold(self, nodes: Iterable[str]) -> None:
        """A holder on each of ``nodes``; each keeps copies of what the one before it holds."""
        for node in nodes:
            if node not in self.holders:
                self.holders[node] = self._holder(node)
        self._link_holders()

    def _link_holders(self) -> None:
        ring = list(self.holders.values())
        for holder, following in zip(ring, ring[1:] + ring[:1]):
            following.keep_copies_of.remote([holder] if len(ring) > 1 else [])

    def _holder(self, node: str) -> ActorHandle:
        holder: ActorHandle = _HOLDER.options(
            num_cpus=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)
        ).remote()
        self._spawn(self._tether_holder(node, holder))
        return holder

    async def _tether_holder(self, node: str, holder: ActorHandle) -> None:
        """If the holder dies and not its node, another one takes its place, and the cells there get new memory."""
        with suppress(RayError):
            await holder.tether.remote()
        if self.holders.get(node) is not holder:
            return
        del self.holders[node]
        if node not in live_nodes():
            return
        logger.warning("the holder of node %s died; its cells take their snapshots to a new one", node)
        self.hold([node])
        for cell, hand in self.owners.items():
            if hand.node == node:
                with suppress(RayError):  # its death is told elsewhere
                    await hand.actor.rehouse.remote(cell, self.holders[node])
        await self._on_rehoused()

    def saver(self, node: str) -> ActorHandle:
        """The process that writes the checkpoints of ``node``."""
        if node not in self._savers:
            self._savers[node] = _SAVER.options(
                num_cpus=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)
            ).remote()
        return self._savers[node]

    def drop_saver(self, node: str) -> None:
        """Kill the saver of ``node``; the next one that is asked for is new."""
        if node in self._savers:
            ray.kill(self._savers.pop(node))

    def owner_of(self, worker: str) -> str | None:
        """The cell that ``worker`` owns."""
        return next((cell for cell, hand in self.owners.items() if hand.name == worker), None)

    def dismiss(self, worker: str) -> None:
        """Forget a standby that is gone."""
        for hands in self._standbys.values():
            hands[:] = [hand for hand in hands if hand.name != worker]

    async def replace(self, cell: str, no_room: Callable[[str], None]) -> Hand:
        """A new owner for ``cell``: a standby of its node, else a cold start on its own place, else on another one."""
        node = self.owners[cell].node
        if node in live_nodes():
            hand = self._standby(cell, node)
            if hand is not None:
                if cell in self._early:  # a standby came up meanwhile; two can't have the place
                    ray.kill(self._early.pop(cell).actor)
                self._standbys[node].remove(hand)
                hand.accelerators = self.owners[cell].accelerators
                self.owners[cell] = hand
                return hand
        else:
            self.holders.pop(node, None)
            self._early.pop(cell, None)  # its place is gone too
            await self._move(cell, node, no_room)
        for _ in range(TRIES):
            hand = self._early.pop(cell, None) or self._placed_worker(cell)
            await self._settle(hand)
            if hand.node:
                break
            await asyncio.sleep(RETRY_S)
        else:
            raise RunError(
                f"{TRIES} processes for {cell} died before they were up; their logs are in {self._plan.files.logs}"
            )
        self.owners[cell] = hand
        self.hold([hand.node])
        return hand

    def prepare(self, cell: str) -> Hand | None:
        """The standby that is going to take over ``cell``, if there is one that nobody else has asked for.

        Without one a process for the cell is started, which ``replace`` will find.
        """
        node = self.owners[cell].node
        hand = self._standby(cell, node)
        if hand is None:
            if cell not in self._early and node in live_nodes() and self._job.recovery.max_failures != 0:
                self._early[cell] = self._placed_worker(cell)
            return None
        hand.prepares, hand.accelerators = cell, self.owners[cell].accelerators
        return hand

    def standby_on(self, node: str) -> Hand | None:
        """Some standby of ``node``."""
        return next(iter(self._standbys.get(node, ())), None)

    def refill(self, warm: Callable[[Hand], Any]) -> None:
        """Start the standbys that are missing, in the background; ``warm`` makes one ready."""
        for node in {hand.node for hand in self.owners.values()} & live_nodes():
            there = len(self._standbys.get(node, ())) + self._coming[node]
            for _ in range(self._job.recovery.standbys_per_node - there):
                self._coming[node] += 1
                self._spawn(self._add_standby(node, warm))

    def end(self) -> None:
        """Kill everybody and give the places back."""
        for task in self._tasks:
            task.cancel()
        standbys = (hand for hands in self._standbys.values() for hand in hands)
        hands = [*self.owners.values(), *standbys, *self._early.values()]
        for actor in (*(hand.actor for hand in hands), *self.holders.values(), *self._savers.values()):
            ray.kill(actor)
        self.placement.remove()

    def _standby(self, cell: str, node: str) -> Hand | None:
        """A standby of ``node``: the one that prepares for ``cell``, or one that is free."""
        there = [hand for hand in self._standbys.get(node, ()) if hand.prepares in ("", cell)]
        return max(there, key=lambda hand: hand.prepares, default=None)

    async def _add_standby(self, node: str, warm: Callable[[Hand], Any]) -> None:
        hand = self._worker(num_cpus=0, num_gpus=0, strategy=NodeAffinitySchedulingStrategy(node, soft=False))
        hand.node = node
        try:
            await warm(hand)
            self._standbys.setdefault(node, []).append(hand)
        except RayError as error:
            logger.warning("the standby %s did not come up: %s", hand.name, error)
        finally:
            self._coming[node] -= 1

    def _placed_worker(self, cell: str) -> Hand:
        resources, strategy = self._resources, self.placement.strategy(self._at(cell))
        return self._worker(num_cpus=resources.num_cpus, num_gpus=resources.num_gpus, strategy=strategy)

    def _worker(self, *, num_cpus: float, num_gpus: int, strategy: Any) -> Hand:
        name = f"worker-{self._num_started:04d}"
        self._num_started += 1
        actor = _WORKER.options(
            name=f"{self._job.run.name}/{name}",
            num_cpus=num_cpus,
            num_gpus=num_gpus,
            max_restarts=0,
            max_task_retries=0,
            scheduling_strategy=strategy,
        ).remote(name, str(self._plan.files.logs / f"{name}.log"))
        hand = Hand(name=name, actor=actor)
        self._spawn(self._tether(hand))
        return hand

    async def _settle(self, hand: Hand) -> None:
        """Hear from a new worker on which node it is; its death is told by its tether."""
        try:
            told = asyncio.wrap_future(hand.actor.where.remote().future())
            hand.node, hand.accelerators = await asyncio.wait_for(told, UP_S)
        except RayError:
            pass
        except TimeoutError:
            raise RunError(
                f"{hand.name} did not come up within {UP_S:g} s on the place that is reserved for it; see what"
                " ray status says"
            ) from None

    async def _tether(self, hand: Hand) -> None:
        try:
            await hand.actor.tether.options(concurrency_group="tether").remote()
        except RayError as error:
            self._on_death(hand.name, error)

    async def _move(self, cell: str, node: str, no_room: Callable[[str], None]) -> None:
        """Wait for another place for the bundle of ``cell``, which went with ``node``."""
        at = self._at(cell)
        bundle = at.pp, at.dp, at.cp
        if (bundle, node) not in self._moved:  # by another cell of the bundle
            self._moved.add((bundle, node))
            self.placement.move(bundle, live_nodes())
        while (missing := await self.placement.wait(ROOM_S)) is not None:
            no_room(missing)

    def _at(self, cell: str) -> Cell:
        return next(at for at in self._layout.cells() if str(at) == cell)

    def _spawn(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._finished)

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("a task failed", exc_info=error)


def live_nodes() -> set[str]:
    """The ids of the nodes that Ray counts as alive."""
    return {node["NodeID"] for node in ray.nodes() if node["Alive"]}
