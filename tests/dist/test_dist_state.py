"""State that is written, read and hashed: the same number and the same curve, whatever layout holds it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from cells import SMALL_BUCKETS, advance, job_tree, open_cell, the_same_on_all, train_curve, train_events, world_of

from rayformer.cell.state import load_checkpoint, save_checkpoint, state_hash
from rayformer.ckpt.storage import folder_at
from rayformer.ckpt.manifest import find_checkpoints, read_manifest, step_folder
from rayformer.errors import CheckpointError

VIRTUAL = {"virtual_ranks": 4, "micro": 1}


def hashes_around_a_flipped_bit(member, tree, rank, kind, bit):
    """The state hash, with one bit of one element of one cell flipped, and with it flipped back."""
    with open_cell(member, tree) as cell:
        advance(cell, 2)
        shards = [shard for shard in cell.optimizer.unique_state() if shard.tensor.endswith(kind)]
        bits = shards[-1].value.reshape(-1)[-1:].view(torch.int32)
        found = []
        for _ in range(3):
            found.append(state_hash(cell))
            if member.rank == rank:
                bits ^= 1 << bit
        return found


@pytest.mark.parametrize(
    ("layout", "rank", "kind", "bit"),
    [({"dp": 2}, 1, "@exp_avg", 0), ({"tp": 2, "pp": 2}, 3, "@exp_avg_sq", 0), ({"pp": 2}, 0, "@master", 30)],
)
def test_one_flipped_bit_changes_the_hash(run_cells, corpus, layout, rank, kind, bit):
    tree = job_tree(corpus, layout=layout)
    found = run_cells(world_of(tree), hashes_around_a_flipped_bit, tree, rank, kind, bit)
    before, flipped, back = the_same_on_all(found)
    assert before == back != flipped


def save_after(member, tree, folder, steps):
    """Train and save; returns the curve and the hash."""
    with open_cell(member, tree, bucket_elements=SMALL_BUCKETS) as cell:
        curve = advance(cell, steps)
        saved = save_checkpoint(cell, Path(folder), step=steps, consumed_samples=8 * steps)
        return curve, saved.state_hash


def go_on(member, tree, folder, done, steps):
    """Load, train further, and return the new part of the curve and the hash before and after it."""
    with open_cell(member, tree) as cell:
        manifest = load_checkpoint(cell, Path(folder) / step_folder(done))
        assert (manifest.step, manifest.consumed_samples) == (done, 8 * done)
        loaded = state_hash(cell)
        return advance(cell, steps, done=done), loaded, state_hash(cell)


def load_error(member, tree, folder):
    """The message with which every cell refuses the checkpoint."""
    with open_cell(member, tree) as cell:
        with pytest.raises(CheckpointError) as refusal:
            load_checkpoint(cell, Path(folder))
        return str(refusal.value)


@pytest.fixture(scope="module")
def saved(run_cells, corpus, tmp_path_factory):
    """A checkpoint after 6 steps on 2 stages of 2 replicas: its directory, and curve and hash then."""
    folder = tmp_path_factory.mktemp("saved")
    tree = job_tree(corpus, layout={"pp": 2, "dp": 2}, batch=VIRTUAL)
    return folder, *the_same_on_all(run_cells(4, save_after, tree, str(folder), 6))


@pytest.mark.parametrize("layout", [{"tp": 2, "pp": 2}, {"pp": 2, "dp": 2}], ids=str)
def test_stopped_and_resumed_run_has_the_bits_of_one_in_one_go(run_cells, corpus, tmp_path, layout):
    tree = job_tree(corpus, layout=layout, batch={"micro": 2, "virtual_ranks": 2})
    steps = 20 if "tp" not in layout else 10
    curve, final = the_same_on_all(run_cells(4, train_curve, tree, steps))
    first, _ = the_same_on_all(run_cells(4, save_after, tree, str(tmp_path), steps // 2))
    second, _, resumed = the_same_on_all(run_cells(4, go_on, tree, str(tmp_path), steps // 2, steps // 2))
    assert (first + second, resumed) == (curve, final)


def test_training_loop_resumes_with_the_same_reports(run_cells, corpus, tmp_path):
    options = {
        "layout": {"pp": 2, "dp": 2},
        "batch": {"micro": 2},
        "eval": {"every": 3, "batches": 1},
        "checkpoint": {"every": 4, "keep": 2},
    }
    tree = job_tree(corpus, **options)

    def reports(folder, done, until):
        by_cell = run_cells(4, train_events, tree, str(folder), done, until)
        steps = [[{**e, "step_s": 0, "phase_s": None} for e in events if "loss" in e] for events in by_cell]
        assert [event["outcome"] for events in by_cell for event in events if "outcome" in event] == ["stopped"] * 4
        return the_same_on_all(steps)

    whole = reports(tmp_path / "whole", 0, 8)
    parts = reports(tmp_path / "parts", 0, 4) + reports(tmp_path / "parts", 4, 8)
    assert parts == whole and len(whole) == 8
    assert [report["step"] for report in whole if report["eval_loss"]] == [3, 6]
    assert [path.name for path in find_checkpoints(tmp_path / "parts")] == ["step-000000008", "step-000000004"]


@pytest.mark.parametrize(
    ("layout", "zero"),
    [({}, 1), ({"dp": 3}, 1), ({"dp": 4}, 0), ({"pp": 4}, 1), ({"dp": 4, "pp": 2}, 1)],
    ids=str,
)
def test_checkpoint_goes_on_bit_for_bit_over_other_dp_and_pp(run_cells, reference, corpus, saved, layout, zero):
    folder, first, saved_hash = saved
    tree = job_tree(corpus, layout=layout, batch=VIRTUAL, optim={"zero": zero})
    second, loaded, final = the_same_on_all(run_cells(world_of(tree), go_on, tree, str(folder), 6, 4))
    assert loaded == saved_hash
    assert (first + second, final) == reference(job_tree(corpus, batch=VIRTUAL), 10)


def test_state_survives_a_chain_of_layouts(run_cells, corpus, saved, tmp_path):
    folder, _, expected = saved
    chain = [{"tp": 2}, {"dp": 2, "tp": 2}, {"pp": 2}, {"dp": 4}, {"tp": 2, "pp": 2}, {}]
    for i, layout in enumerate(chain):
        tree = job_tree(corpus, layout=layout, batch=VIRTUAL)
        found = run_cells(world_of(tree), copy_checkpoint, tree, str(folder), str(tmp_path / str(i)))
        assert the_same_on_all(found) == expected
        folder = tmp_path / str(i)


def copy_checkpoint(member, tree, source, target):
    """Load step 6 from one folder and save it to another; the hash that was saved."""
    with open_cell(member, tree) as cell:
        load_checkpoint(cell, Path(source) / step_folder(6))
        return save_checkpoint(cell, Path(target), step=6, consumed_samples=48).state_hash


def test_short_script_without_rayformer_recomputes_the_hash(saved):
    script = Path(__file__).with_name("recompute_hash.py")
    text = script.read_text()
    assert "rayformer" not in text.split('"""')[2] and len(text.splitlines()) <= 30
    command = [sys.executable, "-I", str(script), str(saved[0] / step_folder(6))]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    recomputed, recorded = done.stdout.split()
    assert recomputed == recorded == saved[2]


def copied(source, target):
    """A copy of a checkpoint that a test may damage."""
    target.mkdir()
    for path in source.iterdir():
        (target / path.name).write_bytes(path.read_bytes())
    return target


def test_flipped_byte_is_refused_with_the_name_of_its_file(run_cells, corpus, saved, tmp_path):
    folder = copied(saved[0] / step_folder(6), tmp_path / "damaged")
    shard = next(s for s in read_manifest(folder).shards if s.tensor == "layers.3.mlp.down.weight@exp_avg_sq")
    path = folder / shard.file
    data = bytearray(path.read_bytes())
    data[shard.offset + shard.num_bytes - 1] ^= 1
    path.write_bytes(data)
    (message,) = run_cells(1, load_error, job_tree(corpus, batch=VIRTUAL), str(folder))
    assert str(path) in message and shard.tensor in message and "are not those that were written" in message


def test_folder_without_manifest_is_no_checkpoint(run_cells, corpus, saved, tmp_path):
    folder = copied(saved[0] / step_folder(6), tmp_path / step_folder(6))
    assert find_checkpoints(tmp_path) == [folder_at(folder)]
    (folder / "manifest.json").unlink()
    assert find_checkpoints(tmp_path) == []
    (message,) = run_cells(1, load_error, job_tree(corpus, batch=VIRTUAL), str(folder))
    assert f"{folder}: there is no manifest.json, so this is no checkpoint" in message


@pytest.mark.parametrize("change", ["missing file", "short file", "missing tensor", "overlap", "other hash"])
def test_incomplete_checkpoint_is_refused(run_cells, corpus, saved, tmp_path, change):
    folder = copied(saved[0] / step_folder(6), tmp_path / "damaged")
    manifest = json.loads((folder / "manifest.json").read_text())
    tensor = "layers.2.attention.out.weight@master"
    shards = manifest["tensors"][tensor]["shards"]
    path = folder / shards[0]["file"]
    match change:
        case "missing file":
            path.unlink()
        case "short file":
            path.write_bytes(path.read_bytes()[:100])
        case "missing tensor":
            del manifest["tensors"][tensor]
        case "overlap":
            shards.append(shards[0])
        case "other hash":
            manifest["state_hash"] = "0" * 16
    (folder / "manifest.json").write_text(json.dumps(manifest))
    (message,) = run_cells(1, load_error, job_tree(corpus, batch=VIRTUAL), str(folder))
    expected = {"missing tensor": tensor, "overlap": tensor, "other hash": "0" * 16}.get(change, str(path))
    assert expected in message and str(folder) in message
