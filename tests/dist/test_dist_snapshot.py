"""Snapshots: a cell made anew goes on from the slots of the one before it with the same bits, in any layout."""

import mmap
import os
import tempfile
from dataclasses import asdict
from pathlib import Path

import pytest
from cells import SMALL_BUCKETS, advance, job_tree, open_cell, the_same_on_all, world_of

from rayformer.cell.progress import ProgressWord, read_word
from rayformer.cell.snapshot import Snapshots, restore, slot_bytes
from rayformer.ckpt.slots import SlotFile, map_memory
from rayformer.cell.state import state_hash
from rayformer.cell.step import StepRunner


def own_file(folder, member):
    return Path(folder) / f"cell-{member.rank}"


def train_with_snapshots(member, tree, folder, steps):
    """A task: snapshots of all steps; the (loss, norm) of each, and the hash of the state."""
    with open_cell(member, tree, bucket_elements=SMALL_BUCKETS) as cell:
        path = own_file(folder, member)
        with path.open("wb") as file:
            file.truncate(slot_bytes(cell, is_copied=False))
        snapshots, runner, curve = Snapshots(cell, map_memory(path), every=1), StepRunner(cell), []
        for step in range(steps):
            curve += advance(cell, 1, done=step, runner=runner)
            snapshots.take()
        return curve, state_hash(cell)


def go_on(member, tree, folder, step, until, sources):
    """A task: a new cell, filled from the slots of ``sources`` after ``step``; the rest of the curve, and the hash."""
    with open_cell(member, tree, bucket_elements=SMALL_BUCKETS) as cell:
        files = [SlotFile(map_memory(Path(folder) / f"cell-{source}")) for source in sources]
        moved = restore(cell, [(file.index_text, file.read(step)) for file in files])
        assert moved == sum(4 * shard.value.numel() for shard in cell.optimizer.owned_state())
        assert (cell.position.step, cell.position.consumed_samples) == (step, step * cell.job.batch.global_)
        assert cell.position.is_whole
        cell.optimizer.start_gather()
        return advance(cell, until - step, done=step), state_hash(cell), asdict(cell.optimizer.loss_scale)


LAYOUTS = [{"dp": 2}, {"pp": 2}, {"tp": 2}, {"dp": 2, "pp": 2}]


@pytest.mark.parametrize("params", ["fp32", "fp16"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_new_cells_go_on_from_the_slots_of_the_old_ones(run_cells, corpus, tmp_path, layout, params):
    tree = job_tree(corpus, layout=layout, batch={"virtual_ranks": 2}, precision={"params": params})
    world = world_of(tree)
    curve, final = the_same_on_all(run_cells(world, train_with_snapshots, tree, str(tmp_path), 5))
    for step in (3, 4):
        rest, found, _ = the_same_on_all(run_cells(world, go_on_from_own, tree, str(tmp_path), step, 5))
        assert (rest, found) == (curve[step:], final)


def go_on_from_own(member, tree, folder, step, until):
    return go_on(member, tree, folder, step, until, [member.rank])


def test_slots_of_two_replicas_fill_one_that_is_alone(run_cells, corpus, tmp_path):
    batch = {"virtual_ranks": 2}
    wide, alone = (job_tree(corpus, layout={"dp": dp}, batch=batch) for dp in (2, 1))
    curve, final = the_same_on_all(run_cells(2, train_with_snapshots, wide, str(tmp_path), 5))
    ((rest, found, _),) = run_cells(1, go_on, alone, str(tmp_path), 3, 5, [0, 1])
    assert (rest, found) == (curve[3:], final)


def test_the_progress_word_is_read_from_outside():
    with tempfile.TemporaryFile() as file:
        os.ftruncate(file.fileno(), 8192)
        memory, other = (mmap.mmap(file.fileno(), 0) for _ in range(2))
        assert read_word(other).count == 0
        word = ProgressWord(memory)
        word.at("backward", 7, "RecvGrad", 3)
        found = read_word(other)
        assert (found.step, found.phase, found.instruction) == (7, "backward", "RecvGrad")
        assert (found.number, found.count) == (3, 1)
