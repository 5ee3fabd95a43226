"""Looking at a checkpoint: what is whole is found whole, and every way to spoil it is told by name."""

import json

import numpy as np
import pytest

from rayformer.ckpt import inspect
from rayformer.ckpt.hash import shown
from rayformer.ckpt.manifest import MANIFEST, Manifest, read_manifest, step_folder
from rayformer.ckpt.storage import folder_at
from rayformer.ckpt.writer import file_name, write_file
from rayformer.errors import CheckpointError
from rayformer.shards import Box

SHAPES = {"w@master": (6, 4), "b@master": (5,)}
BOXES = {"a": [("w@master", Box(lo=(0, 0), hi=(3, 4)))], "b": [("w@master", Box(lo=(3, 0), hi=(6, 4)))]}
BOXES["b"].append(("b@master", Box(lo=(0,), hi=(5,))))


def value_of(tensor, seed):
    return np.random.default_rng([seed, len(tensor)]).standard_normal(SHAPES[tensor]).astype(np.float32)


def write(folder, *, step=7, seed=0, boxes=BOXES, state_hash=None, **job):
    """A checkpoint of two files."""
    path = folder / step_folder(step)
    records, total = [], 0
    for writer, of_writer in boxes.items():
        values = [(t, box, value_of(t, seed)[tuple(map(slice, box.lo, box.hi))]) for t, box in of_writer]
        written = write_file(folder_at(path), file_name(writer, 0), values, SHAPES)
        records += written.records
        total += written.hash
    manifest = Manifest(
        step=step, consumed_samples=8 * step, layout={"tp": 1, "dp": 2}, virtual_ranks=2, order="keyed",
        job={"run": {"name": "r"}, **job}, environment={}, state_hash=state_hash or shown(total), shards=records,
    )  # fmt: skip
    folder_at(path).write(MANIFEST, [manifest.dumps().encode()])  # a commit would refuse what has holes
    return path


def problems_of(path):
    read = []
    found = list(inspect.problems(path, read_manifest(path), on_bytes=read.append))
    assert sum(read) == inspect.num_bytes(read_manifest(path)), "all of it was read, whatever was found"
    return found


def test_a_whole_checkpoint_has_no_problems_and_its_hash_is_computed_from_its_files(tmp_path):
    path = write(tmp_path)
    assert problems_of(path) == []
    assert inspect.state_hash(path, read_manifest(path)) == read_manifest(path).state_hash


@pytest.mark.parametrize("at", range(3))
def test_a_flipped_bit_is_found_and_named_with_its_file_and_tensor(tmp_path, at):
    path = write(tmp_path)
    shard = sorted(read_manifest(path).shards, key=lambda s: (s.file, s.offset))[at]
    data = bytearray((path / shard.file).read_bytes())
    data[shard.offset + shard.num_bytes - 1] ^= 0x10
    (path / shard.file).write_bytes(data)
    (told,) = problems_of(path)
    assert shard.file in told and f"{shard.tensor} {shard.box}" in told


def test_a_missing_and_a_short_file_are_named(tmp_path):
    path = write(tmp_path)
    (path / "a-0000.safetensors").unlink()
    file = path / "b-0000.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    told = problems_of(path)
    assert any("a-0000.safetensors: it is missing" in line for line in told)
    assert any("b-0000.safetensors: it ends at byte" in line and "is not whole" in line for line in told)


def test_a_hole_and_what_is_held_twice_are_named(tmp_path):
    hole = write(tmp_path / "hole", boxes={"b": BOXES["b"]})
    assert ["w@master" in line for line in problems_of(hole)] == [True]
    twice = {"a": [("w@master", Box(lo=(0, 0), hi=(6, 4)))], "b": BOXES["b"]}
    (told,) = problems_of(write(tmp_path / "twice", boxes=twice))
    assert "w@master: the holdings [0:6, 0:4] and [3:6, 0:4] overlap" in told


def test_a_state_hash_that_the_files_do_not_have_is_told(tmp_path):
    (told,) = problems_of(write(tmp_path, state_hash="0" * 16))
    assert f"the state hash {'0' * 16}" in told


def test_a_folder_of_checkpoints_or_a_run_means_its_newest(tmp_path):
    newest = [write(tmp_path / "checkpoints", step=step) for step in (7, 9)][1]
    for path in (newest, tmp_path / "checkpoints", tmp_path):
        assert inspect.resolve_checkpoint(path) == folder_at(newest)
    with pytest.raises(CheckpointError, match="there is no checkpoint; name one"):
        inspect.resolve_checkpoint(tmp_path / "nothing")


def test_two_checkpoints_differ_in_what_they_hold_and_say_however_they_are_cut(tmp_path):
    first = write(tmp_path / "a", optim={"lr": 1.0})
    whole = {"all": [(tensor, Box(lo=(0,) * len(shape), hi=shape)) for tensor, shape in SHAPES.items()]}
    assert list(inspect.differences(first, write(tmp_path / "b", boxes=whole, optim={"lr": 1.0}))) == []
    other = write(tmp_path / "c", step=8, seed=1, optim={"lr": 2.0})
    found = {difference.what: difference for difference in inspect.differences(first, other)}
    assert set(found) == {"step", "consumed_samples", "state_hash", "job optim.lr", "w@master", "b@master"}
    assert (found["step"].first, found["job optim.lr"].second) == ("7", "2.0")
    assert found["b@master"].first.startswith("[5] ")


def test_a_tensor_that_one_lacks_is_told(tmp_path):
    first, second = write(tmp_path / "a"), write(tmp_path / "b", boxes={"b": BOXES["b"][1:]})
    (told,) = [d for d in inspect.differences(first, second) if d.what == "w@master"]
    assert told.first.startswith("[6, 4]") and told.second == "none"


def test_a_manifest_that_points_outside_is_refused(tmp_path):
    path = write(tmp_path)
    tree = json.loads((path / MANIFEST).read_text())
    tree["tensors"]["b@master"]["shards"][0]["file"] = "../b.safetensors"
    (path / MANIFEST).write_text(json.dumps(tree))
    with pytest.raises(CheckpointError, match="outside of the checkpoint's folder"):
        inspect.resolve_checkpoint(path) and read_manifest(path)
