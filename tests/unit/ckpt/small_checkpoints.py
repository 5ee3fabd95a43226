"""Checkpoints of 17 elements in several files, saved as a run saves and found as a run finds them.

As a script it saves one after the other into a folder until it is killed.
"""

import os
import sys
from pathlib import Path

import numpy as np

from rayformer.ckpt import inspect
from rayformer.ckpt.hash import box_hash, shown
from rayformer.ckpt.manifest import Manifest, check_files, find_checkpoints, read_manifest, step_folder, step_of
from rayformer.ckpt.share import plan_files, shapes_of
from rayformer.ckpt.slots import IndexEntry
from rayformer.ckpt.storage import LocalFolder
from rayformer.ckpt.writer import abandon, commit, file_name, prune, start, write_file
from rayformer.errors import CheckpointError, DamagedError
from rayformer.shards import Box, whole

SHAPES = {"w@master": (4, 3), "b@master": (5,)}
W, B = (
    IndexEntry(tensor="w@master", box=whole((4, 3)), start=0),
    IndexEntry(tensor="b@master", box=Box(lo=(0,), hi=(5,)), start=12),
)
HELD = {"dp0": [W, B], "dp1": [W]}
MAX_FILE_BYTES = 40


def state(step, attempt=0):
    return np.random.default_rng([step, attempt]).standard_normal(17).astype(np.float32)


def hash_of(step, attempt=0):
    values = {"w@master": state(step, attempt)[:12].reshape(4, 3), "b@master": state(step, attempt)[12:]}
    return shown(sum(box_hash(name, whole(SHAPES[name]), SHAPES[name], value) for name, value in values.items()))


def save(directory, step, *, keep, attempt=0, on_commit=lambda step: None):
    """Save as a run does it: what a failed one has left is removed."""
    folder, payload, records, total = directory / step_folder(step), state(step, attempt), [], 0
    try:
        start(folder)
        for writer, files in plan_files(HELD, max_file_bytes=MAX_FILE_BYTES).items():
            for number, entries in enumerate(files):
                values = [
                    (e.tensor, e.box, payload[e.start : e.start + e.box.numel].reshape(e.box.shape)) for e in entries
                ]
                written = write_file(folder, file_name(writer, number), values, shapes_of(HELD.values()))
                records += written.records
                total += written.hash
        manifest = Manifest(
            step=step, consumed_samples=8 * step, layout={"dp": 2}, virtual_ranks=2, order="keyed",
            job={"optim": {"lr": 1e-05}}, environment={}, state_hash=shown(total), shards=records,
        )  # fmt: skip
        commit(directory, folder, manifest)
    except CheckpointError:
        abandon(folder)
        raise
    on_commit(step)
    prune(directory, keep=keep)


def resumed(directory):
    """The manifest that a run goes on from, found as ``find_origin`` does. What it finds must be whole."""
    for folder in find_checkpoints(directory):
        try:
            manifest = read_manifest(folder)
            check_files(folder, manifest)
        except DamagedError:
            continue
        check_whole(folder)
        return manifest
    return None


def check_whole(folder):
    manifest = read_manifest(folder)
    assert list(inspect.problems(folder, manifest, on_bytes=lambda _: None)) == []
    assert manifest.step == step_of(folder)
    assert manifest.state_hash in (hash_of(manifest.step), hash_of(manifest.step, attempt=1))


def save_for_ever(directory):
    """Save one step after the other, and tell each that is committed."""
    found = resumed(directory)
    first = found.step + 1 if found else 1
    for step in range(first, first + 100_000):
        save(LocalFolder(directory), step, keep=2, on_commit=lambda step: os.write(1, b"%d\n" % step))


if __name__ == "__main__":
    save_for_ever(Path(sys.argv[1]))
