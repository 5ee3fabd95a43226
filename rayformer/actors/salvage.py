"""A checkpoint of what holders have, written without the cells: for a run that finds nothing to repair itself with."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from rayformer.actors.holder import Copy
from rayformer.cell.plan import RunPlan
from rayformer.cell.state import make_manifest, prune_for
from rayformer.ckpt.hash import shown
from rayformer.ckpt.manifest import step_folder
from rayformer.ckpt.share import plan_files, shapes_of
from rayformer.ckpt.slots import IndexEntry, load_index
from rayformer.ckpt.writer import commit, file_name, start, write_file
from rayformer.events import CheckpointSaved


def save_copies(plan: RunPlan, copies: Mapping[str, Copy], *, generation: int) -> CheckpointSaved:
    """Write the snapshots of all cells, of one step, as the checkpoint of that step."""
    (step,) = {copy.step for copy in copies.values()}
    held = {cell: load_index(copy.index) for cell, copy in copies.items()}
    shares = plan_files(held, max_file_bytes=plan.job.checkpoint.max_file_bytes)
    files = [(cell, entries) for cell, of_cell in shares.items() for entries in of_cell]
    shapes = shapes_of(held.values())
    folder, job = plan.checkpoints / step_folder(step), plan.job
    start(folder)
    written = []
    for number, (cell, entries) in enumerate(files):
        values = [(entry.tensor, entry.box, _value(copies[cell], entry)) for entry in entries]
        written.append(write_file(folder, file_name("holders", number), values, shapes))
    found = shown(sum(of_file.hash for of_file in written))
    extras = [copy.extra for copy in copies.values()]
    manifest = make_manifest(
        job,
        step=step,
        extra=next((extra for extra in extras if extra["samples"]), extras[0]),
        records=[record for of_file in written for record in of_file.records],
        state_hash=found,
    )
    commit(plan.checkpoints, folder, manifest)
    prune_for(job, plan.checkpoints)
    return CheckpointSaved(generation=generation, step=step, path=str(folder), state_hash=found, seconds=0.0)


def _value(copy: Copy, entry: IndexEntry) -> npt.NDArray[np.float32]:
    return copy.payload[entry.start : entry.start + entry.box.numel].reshape(entry.box.shape)
