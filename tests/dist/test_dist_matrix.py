"""Every layout loads what every other wrote: the same state, and the curve goes on.

Worlds of up to eight cells run; larger ones are built cell by cell in this process, without connections, so that what
each owns is filled from files, and written to files, by the code that a run has.
"""

from pathlib import Path

import numpy as np
import pytest
import torch
from cells import SMALL_BUCKETS, advance, job_tree, open_cell, the_same_on_all, world_of

from rayformer.cell.build import build_cell
from rayformer.cell.process import environment
from rayformer.cell.snapshot import slot_index
from rayformer.cell.state import load_checkpoint, make_manifest, save_checkpoint, state_hash
from rayformer.ckpt.hash import box_hash, shown
from rayformer.ckpt.manifest import read_manifest, step_folder
from rayformer.ckpt.reader import Source
from rayformer.ckpt.share import plan_files, shapes_of
from rayformer.ckpt.storage import folder_at
from rayformer.ckpt.writer import commit, file_name, write_file
from rayformer.config.job import resolve
from rayformer.config.load import job_from_tree
from rayformer.groups import Groups

DONE, MORE = 3, 5
SOURCES = {
    "one": {},
    "tp2": {"tp": 2},
    "pp2-dp2": {"pp": 2, "dp": 2},
    "dp3": {"dp": 3},
    "dp4-zero0": {"dp": 4, "zero": 0},
    "tp4": {"tp": 4},
    "pp4-dp2": {"pp": 4, "dp": 2},
    "tp2-pp2-dp2-zero0": {"tp": 2, "pp": 2, "dp": 2, "zero": 0},
}
TARGETS = {
    **{name: SOURCES[name] for name in ("one", "dp4-zero0", "pp4-dp2", "tp2-pp2-dp2-zero0")},
    "dp2-zero0": {"dp": 2, "zero": 0},
    "dp3-pp2": {"dp": 3, "pp": 2},
    "tp2-dp3": {"tp": 2, "dp": 3},
    "tp4-pp2": {"tp": 4, "pp": 2},
    "tp2-pp4": {"tp": 2, "pp": 4},
}
LARGE = {
    "tp4-pp4-dp4": {"tp": 4, "pp": 4, "dp": 4},
    "tp4-pp4-dp3-zero0": {"tp": 4, "pp": 4, "dp": 3, "zero": 0},
    "tp2-pp4-dp4-zero0": {"tp": 2, "pp": 4, "dp": 4, "zero": 0},
    "tp1-pp4-dp4": {"pp": 4, "dp": 4},
    "tp4-pp2-dp4": {"tp": 4, "pp": 2, "dp": 4},
}


def tree_of(corpus, layout, **options):
    """A model with tied embeddings, grouped heads, biases on queries, keys and values, and fused matrices."""
    layout = dict(layout)
    return job_tree(
        corpus,
        model={"kv_heads": 4, "heads": 8, "tie_embeddings": True, "qkv_bias": True},
        batch={"virtual_ranks": 4},
        optim={"zero": layout.pop("zero", 1)},
        layout=layout,
        **options,
    )


def save_here(member, tree, folder):
    """Train, save, and go on: the hash that was saved, and the curve after it."""
    with open_cell(member, tree, bucket_elements=SMALL_BUCKETS) as cell:
        advance(cell, DONE)
        saved = save_checkpoint(cell, Path(folder), step=DONE, consumed_samples=8 * DONE)
        return saved.state_hash, advance(cell, MORE, done=DONE)


def load_each(member, tree, folders):
    """Load one checkpoint after the other and go on from each: the hash that was found in memory, and the curve."""
    with open_cell(member, tree) as cell:
        found = []
        for folder in folders:
            manifest = load_checkpoint(cell, Path(folder) / step_folder(DONE))
            assert (manifest.step, cell.position.step) == (DONE, DONE)
            found.append((state_hash(cell), advance(cell, MORE, done=DONE)))
        return found


@pytest.fixture(scope="module")
def sources(run_cells, corpus, tmp_path_factory):
    """By layout: the folder, the hash of what was saved, and the curve after it."""
    made = {}
    for name, layout in SOURCES.items():
        tree, folder = tree_of(corpus, layout), tmp_path_factory.mktemp(name)
        made[name] = folder, *the_same_on_all(run_cells(world_of(tree), save_here, tree, str(folder)))
    return made


@pytest.mark.parametrize("target", TARGETS)
def test_every_layout_is_loaded_and_goes_on(run_cells, corpus, sources, target):
    """Bit for bit where tp is the same, since virtual ranks make dp and pp no difference; else to rounding."""
    tree = tree_of(corpus, TARGETS[target])
    folders = [str(folder) for folder, _, _ in sources.values()]
    found = the_same_on_all(run_cells(world_of(tree), load_each, tree, folders))
    for (name, (_, saved, curve)), (loaded, after) in zip(sources.items(), found):
        assert loaded == saved, name
        if SOURCES[name].get("tp", 1) == TARGETS[target].get("tp", 1):
            assert after == curve, name
        else:
            np.testing.assert_allclose(after, curve, rtol=1e-5, err_msg=name)
    assert len(SOURCES) * len(TARGETS) >= 64


def test_another_dp_needs_no_virtual_ranks_to_stay_on_the_curve(run_cells, corpus, tmp_path):
    tree = tree_of(corpus, {"dp": 2})
    tree["batch"] = {"global": 8, "micro": 1, "seq": 16}
    _, curve = the_same_on_all(run_cells(2, save_here, tree, str(tmp_path)))
    for dp in (4, 1):
        other = {**tree, "layout": {"dp": dp}}
        ((_, after),) = the_same_on_all(run_cells(dp, load_each, other, [str(tmp_path)]))
        np.testing.assert_allclose(after, curve, rtol=1e-5)


class Unconnected:
    """All cells of a layout in this process: what they own, without a word between them."""

    def __init__(self, tree):
        job = job_from_tree(tree)
        self.job = resolve(job, dp=job.layout.dp, recorded={})
        degrees = self.job.layout.degrees
        device = torch.device("cpu")
        self.cells = [
            build_cell(
                self.job, Groups.unconnected(layout=degrees, rank=rank, device=device), corpus_cache=Path("unused")
            )
            for rank in range(degrees.world)
        ]

    def load(self, folder):
        """Fill all that every cell owns, and give the hash of what they answer for."""
        source, total = Source(folder, read_manifest(folder)), 0
        for cell in self.cells:
            for shard in cell.optimizer.owned_state():
                shard.value.fill_(float("nan"))
            source.read([(s.tensor, s.box, s.value.numpy()) for s in cell.optimizer.owned_state()])
            for s in cell.optimizer.unique_state():
                shape = cell.specs[s.tensor.rpartition("@")[0]].shape
                total += box_hash(s.tensor, s.box, shape, s.value.numpy())
        return shown(total)

    def save(self, directory):
        """Write what the cells own as savers do."""
        held = {str(cell.groups.cell): slot_index(cell) for cell in self.cells}
        flats = {str(cell.groups.cell): torch.cat(cell.optimizer.flat_state()).numpy() for cell in self.cells}
        folder, shapes, written = directory / step_folder(DONE), shapes_of(held.values()), []
        for name, files in plan_files(held, max_file_bytes=30_000).items():
            for number, entries in enumerate(files):
                values = [
                    (e.tensor, e.box, flats[name][e.start : e.start + e.box.numel].reshape(e.box.shape)) for e in entries
                ]
                written.append(write_file(folder, file_name(name, number), values, shapes))
        extra = {"consumed_samples": 8 * DONE, "updates": DONE, "loss_scale": {"scale": 1.0, "good_steps": 0}}
        manifest = make_manifest(
            self.job,
            step=DONE,
            extra={**extra, "samples": None},
            found=environment(torch.device("cpu")),
            records=[record for of_file in written for record in of_file.records],
            state_hash=shown(sum(of_file.hash for of_file in written)),
        )
        commit(directory, folder, manifest)
        return folder


@pytest.mark.timeout(600)
def test_layouts_that_are_too_large_to_run_load_and_write_the_same_state(corpus, sources, tmp_path):
    source, saved, _ = sources["tp2-pp2-dp2-zero0"]
    folders = {"small": folder_at(source / step_folder(DONE))}
    for name, layout in LARGE.items():
        cells = Unconnected(tree_of(corpus, layout))
        assert {other: cells.load(folder) for other, folder in folders.items()} == dict.fromkeys(folders, saved), name
        folders[name] = cells.save(folder_at(tmp_path / name))
        assert read_manifest(folders[name]).state_hash == saved
    first = Unconnected(tree_of(corpus, {"tp": 2, "pp": 2}))
    assert {first.load(folder) for folder in folders.values()} == {saved}
