"""A cell's state in model coordinates: hash it, write it to a checkpoint, fill it from one."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch

from rayformer.cell.build import Cell
from rayformer.cell.process import environment
from rayformer.ckpt.hash import box_hash, shown
from rayformer.ckpt.manifest import MANIFEST, Manifest, ShardRecord, read_manifest, step_folder
from rayformer.ckpt.reader import read_boxes
from rayformer.ckpt.writer import BoxValue, commit, prune, write_shards
from rayformer.errors import CheckpointError
from rayformer.events import CheckpointSaved
from rayformer.optim.scaler import LossScale
from rayformer.shards import KINDS, tensor_name


def state_hash(cell: Cell) -> str:
    """The hash of the whole state, on every cell; each hashes what it alone answers for."""
    mine = 0
    for tensor, box, values in _unique(cell):
        mine += box_hash(tensor, box, cell.specs[tensor.rpartition("@")[0]].shape, values)
    return shown(sum(cell.groups.world.gather_values(mine % 2**64)))


def save_checkpoint(cell: Cell, directory: Path, *, step: int, consumed_samples: int, keep: int) -> CheckpointSaved:
    """Write the state as step ``step`` of ``directory``; every cell of the run must call it.

    Each cell writes its shards, and the first one the manifest when all are done. When this returns, the checkpoint
    exists, and on every cell.
    """
    started = time.monotonic()
    folder = directory / step_folder(step)
    world = cell.groups.world
    if world.rank == 0:
        (folder / MANIFEST).unlink(missing_ok=True)  # one of an earlier attempt would vouch for half-written files
    world.barrier()
    records = write_shards(folder, str(cell.groups.cell), _unique(cell), _shapes(cell))
    found = state_hash(cell)
    gathered = world.gather_values([(r.tensor, r.shape, r.dtype, r.to_json()) for r in records])
    if world.rank == 0:
        job, degrees = cell.job, cell.groups.layout
        manifest = Manifest(
            step=step,
            consumed_samples=consumed_samples,
            layout={axis: degrees.size(axis) for axis in ("tp", "cp", "dp", "pp", "ep", "etp")},
            virtual_ranks=job.batch.num_virtual_ranks,
            order=job.data.order,
            job=job.dump(),
            environment=environment(cell.groups.device),
            state_hash=found,
            shards=[ShardRecord.from_json(*record) for part in gathered for record in part],
            extra={
                "updates": cell.optimizer.num_updates,
                "loss_scale": asdict(cell.optimizer.loss_scale),
                "samples": None if cell.training is None else cell.training.num_samples,
            },
        )
        commit(folder, manifest)
        prune(directory, keep)
    world.barrier()
    return CheckpointSaved(
        generation=cell.groups.generation,
        step=step,
        path=str(folder),
        state_hash=found,
        seconds=time.monotonic() - started,
    )


def load_checkpoint(cell: Cell, folder: Path) -> Manifest:
    """Fill the cell from the checkpoint in ``folder``, whatever layout wrote it, and verify the hash of the whole.

    Raises CheckpointError if the model differs, bytes were changed, or the hash is not the manifest's.
    """
    manifest = read_manifest(folder)
    shapes = manifest.shapes()
    for name, spec in cell.specs.items():
        found = shapes.get(f"{name}@master")
        if found is not None and found != spec.shape:
            raise CheckpointError(f"{folder}: {name} has shape {list(found)}, the model's is {list(spec.shape)}")
    samples = manifest.extra.get("samples")
    if cell.training is not None and samples not in (None, cell.training.num_samples):
        raise CheckpointError(
            f"{folder}: its run trained on a corpus of {samples} samples, {cell.job.data.train[0].path} has"
            f" {cell.training.num_samples}, so the order of samples would not go on; use the corpus it was trained on"
        )
    cell.position.is_whole = False
    wanted = [(shard, np.empty(shard.box.shape, dtype=np.float32)) for shard in cell.optimizer.owned_state()]
    read_boxes(folder, manifest, [(shard.tensor, shard.box, array) for shard, array in wanted])
    for shard, array in wanted:
        shard.value.copy_(torch.from_numpy(array))
    cell.optimizer.num_updates = manifest.extra.get("updates", manifest.step)
    if "loss_scale" in manifest.extra:
        cell.optimizer.loss_scale = LossScale(**manifest.extra["loss_scale"])
    cell.optimizer.start_gather()
    cell.optimizer.await_parameters()
    loaded = state_hash(cell)
    if loaded != manifest.state_hash:
        raise CheckpointError(f"{folder}: its state hash is {manifest.state_hash}, what was loaded has {loaded}")
    cell.position.move_to(manifest.step, consumed_samples=manifest.consumed_samples)
    return manifest


def _shapes(cell: Cell) -> dict[str, tuple[int, ...]]:
    return {tensor_name(name, kind): spec.shape for name, spec in cell.specs.items() for kind in KINDS}


def _unique(cell: Cell) -> Iterator[BoxValue]:
    for shard in cell.optimizer.unique_state():
        yield shard.tensor, shard.box, shard.value.cpu().numpy()
