"""When the slots of a step's cells are let go, of the real memory and a clock of asyncio; Ray's actors are played."""

import asyncio
import mmap
from types import SimpleNamespace

import pytest

from rayformer.actors.saves import Saves
from rayformer.ckpt.slots import Cadence, IndexEntry, SlotFile
from rayformer.events import CheckpointSaved, SaveDue
from rayformer.shards import whole

STEP = 50
CELLS = ("pp0.dp0.cp0.tp0", "pp1.dp0.cp0.tp0")


class Remote:
    """A method of an actor."""

    def __init__(self, function):
        self.function = function

    async def remote(self, *arguments):
        await asyncio.sleep(0)
        return self.function(*arguments)


def slots():
    index = [IndexEntry(tensor="w@master", box=whole((4,)), start=0)]
    file = SlotFile(mmap.mmap(-1, SlotFile.bytes_needed(16, 200, 3)))
    file.prepare(index, 16, 3, Cadence(every=1))
    file.commit(file.begin(STEP), step=STEP, generation=1, extra={})
    return file


@pytest.fixture
def cells():
    return {cell: slots() for cell in CELLS}


def saves_of(cells, told):
    def have_pinned(names, step, generation):
        return all(cells[name].is_pinned(step, generation=generation) for name in names)

    def unpin():
        for file in cells.values():
            file.unpin()

    holder = SimpleNamespace(have_pinned=Remote(have_pinned), unpin=Remote(unpin))
    crew = SimpleNamespace(owners={cell: SimpleNamespace(node="n") for cell in CELLS}, holders={"n": holder})
    return Saves(None, crew, lambda ended, report: told.append(ended))


def saved(generation):
    return CheckpointSaved(generation=generation, step=STEP, path="there", state_hash="0" * 16, seconds=0.1)


def test_a_step_that_was_saved_before_is_let_go_only_when_every_cell_has_pinned_it_again(cells):
    first, second = cells.values()

    async def story():
        told = []
        saves = saves_of(cells, told)
        saves._last = saved(1)
        working = asyncio.create_task(saves.work())
        first.pin(STEP, 2)
        second.pin(STEP, 1)  # what an earlier generation left says nothing
        saves.due(SaveDue(generation=2, step=STEP))
        await asyncio.sleep(0.2)
        assert first.pinned() == (STEP,) and not told
        second.pin(STEP, 2)
        await asyncio.wait_for(saves.settle(), 10)
        assert first.pinned() == second.pinned() == () and told == [saved(1)]
        working.cancel()

    asyncio.run(story())


def test_a_generation_that_pins_while_a_save_is_written_is_waited_for(cells):
    first, second = cells.values()

    async def story():
        told, written = [], asyncio.Event()
        saves = saves_of(cells, told)

        async def save(due):
            await written.wait()
            return saved(due.generation)

        saves._save = save
        working = asyncio.create_task(saves.work())
        for file in (first, second):
            file.pin(STEP, 1)
        saves.due(SaveDue(generation=1, step=STEP))
        await asyncio.sleep(0.05)
        first.pin(STEP, 2)  # a cell was lost, and all go on from the step that is being saved
        saves.due(SaveDue(generation=2, step=STEP))
        written.set()
        await asyncio.sleep(0.2)
        assert first.pinned() == (STEP,) and not told
        second.pin(STEP, 2)
        await asyncio.wait_for(saves.settle(), 10)
        assert first.pinned() == second.pinned() == () and told == [saved(1)]
        working.cancel()

    asyncio.run(story())


def test_what_is_found_pinned_of_a_saved_step_is_let_go_without_waiting_for_others(cells):
    first, second = cells.values()

    async def story():
        told = []
        saves = saves_of(cells, told)
        saves._last = saved(1)
        working = asyncio.create_task(saves.work())
        first.pin(STEP, 1)
        saves.found_pinned(2, STEP)
        await asyncio.wait_for(saves.settle(), 10)
        assert first.pinned() == second.pinned() == ()
        working.cancel()

    asyncio.run(story())
