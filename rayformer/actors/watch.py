"""The watch: looks at every cell from outside, again and again, and tells of those that stall or straggle."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ray.exceptions import RayError

from rayformer.actors.crew import Crew, Hand
from rayformer.actors.holder import Sight
from rayformer.control.messages import CellStalled
from rayformer.control.stall import Seen, Stall, StallJudge
from rayformer.control.states import Draining, Restoring, Running, Starting, State
from rayformer.control.straggle import Straggler, StragglerJudge
from rayformer.events import CellError, JournalEntry

LOOK_EVERY_S = 0.2
ANSWER_S = 1.0
START_S = 600.0  # until a process that nothing is seen of counts like the others
NO_ANSWER = object()


class Watch:
    """Looks at the cells of ``crew`` through the holders of their nodes.

    ``journal`` gets what is found, ``tell`` a line for people, ``stalled`` the cell that is to be replaced.
    """

    def __init__(
        self,
        crew: Crew,
        logs: Path,
        *,
        stall_s: float | None,
        journal: Callable[[JournalEntry], None],
        tell: Callable[[str], None],
        stalled: Callable[[CellStalled], None],
    ) -> None:
        self._crew, self._logs = crew, logs
        self._journal, self._tell, self._stalled = journal, tell, stalled
        self._stalls, self._stragglers = StallJudge(stall_s), StragglerJudge()
        self._all_seen = time.monotonic()  # when every cell had a process that had come as far as its first word
        self.stalled_since: float | None = None  # Unix time since when the last one had not moved

    def start_generation(self) -> None:
        """The cells have come to run again."""
        self._stalls.start_generation()
        self._stragglers.start_generation()

    def note_step(self, step_s: float) -> None:
        """A step took so long."""
        self._stalls.note_step(step_s)

    async def look_forever(self, state: Callable[[], State]) -> None:
        """Look, as long as there is something to see in the machine's ``state``."""
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            now = state()
            awaited = _awaited(now)
            if awaited:
                sights = await self._look()
                await self._judge(now, {cell: sights[cell] for cell in sights.keys() & awaited}, awaited, state)

    async def _look(self) -> dict[str, Sight]:
        sights: dict[str, Sight] = {}
        for holder in list(self._crew.holders.values()):
            found = await answer(holder.look.remote(), ANSWER_S)
            sights.update({} if found is NO_ANSWER else found)
        return sights

    async def _judge(
        self, now: State, sights: Mapping[str, Sight], awaited: frozenset[str], state: Callable[[], State]
    ) -> None:
        seen = {cell: _seen(sight) for cell, sight in sights.items()}
        if seen.keys() == awaited:
            self._all_seen = time.monotonic()
        is_starting = time.monotonic() - self._all_seen < START_S and seen.keys() != awaited  # the others wait for it
        if isinstance(now, Draining) or is_starting:  # who works in Draining has its own deadline
            seen = {cell: sight for cell, sight in seen.items() if sight.is_stopped}
        silent = await self._silent() if self._stalls.is_suspicious(seen) else frozenset()
        stall = self._stalls.judge(seen, silent=silent)
        if state() is not now:
            return
        if stall is not None:
            await self._tell_stall(stall, now.generation)
        elif isinstance(now, Running):
            for straggler in self._stragglers.judge({cell: sight.worked for cell, sight in sights.items()}):
                self._tell_straggler(straggler, now.generation)

    async def _silent(self) -> frozenset[str]:
        """The cells that don't answer within a second."""

        async def is_silent(hand: Hand) -> bool:
            return await answer(hand.actor.ping.remote(), ANSWER_S) is NO_ANSWER

        owners = dict(self._crew.owners)
        silent = await asyncio.gather(*map(is_silent, owners.values()))
        return frozenset(cell for cell, mute in zip(owners, silent) if mute)

    async def _tell_stall(self, stall: Stall, generation: int) -> None:
        """Write what is known of a stall before anything is killed, with the stacks of those that can still answer."""
        values = {
            "cell": stall.cell,
            "instruction": stall.seen.instruction or stall.seen.phase,
            "microbatch": stall.seen.number,
            "step": stall.seen.step,
            "waiters": stall.waiters,
            "reason": stall.reason,
        }
        self._journal(JournalEntry(kind="stall", generation=generation, values=values))
        self._tell(f"stall: cell {stall.cell}: {stall.message}")
        hand = self._crew.owners[stall.cell]
        if not stall.seen.is_stopped:
            for cell in (stall.cell, *stall.waiters):
                text = await answer(self._crew.owners[cell].actor.stacks.remote(), ANSWER_S)
                if text is not NO_ANSWER:
                    path = self._logs / f"stall-g{generation}-{cell}.txt"
                    await asyncio.to_thread(path.write_text, text)
        self.stalled_since = time.time() - stall.seen.age_s
        error = CellError(cell=stall.cell, worker=hand.name, kind="silent", message=stall.message)
        self._stalled(CellStalled(generation=generation, error=error))

    def _tell_straggler(self, straggler: Straggler, generation: int) -> None:
        values = {
            "cell": straggler.cell,
            "step": straggler.step,
            "compute_s": straggler.compute_s,
            "peers_s": straggler.peers_s,
        }
        self._journal(JournalEntry(kind="straggler", generation=generation, values=values))
        self._tell(f"straggler: {straggler.message}")


async def answer(reference: Any, seconds: float) -> Any:
    """The result of a call, or ``NO_ANSWER`` if it failed or took longer."""
    try:
        return await asyncio.wait_for(asyncio.wrap_future(reference.future()), seconds)
    except (RayError, TimeoutError):
        return NO_ANSWER


def _awaited(state: State) -> frozenset[str]:
    """The cells that have something to do."""
    match state:
        case Running():
            return frozenset(state.members.keys() - state.done.keys())
        case Starting() | Restoring():
            return frozenset(set(state.cells) - state.members.keys())
        case Draining():
            return state.pending
    return frozenset()


def _seen(sight: Sight) -> Seen:
    word = sight.word
    return Seen(
        step=word.step,
        phase=word.phase,
        instruction=word.instruction,
        number=word.number,
        count=word.count,
        age_s=sight.age_s,
        is_stopped=sight.is_stopped,
    )
