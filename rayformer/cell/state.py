"""A cell's state in model coordinates: hash it, write it to a checkpoint, fill it from one."""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rayformer.cell.build import Cell
from rayformer.cell.origin import shown_job
from rayformer.cell.process import environment
from rayformer.cell.snapshot import slot_index
from rayformer.ckpt.hash import box_hash, shown
from rayformer.ckpt.initial import weights_at
from rayformer.ckpt.manifest import Manifest, ShardRecord, read_manifest, step_folder
from rayformer.ckpt.reader import find_damage, read_boxes
from rayformer.ckpt.share import plan_files
from rayformer.ckpt.slots import IndexEntry, dump_index, load_index
from rayformer.ckpt.storage import Folder, folder_at
from rayformer.ckpt.writer import BoxValue, Written, abandon, commit, file_name, prune, start, write_file
from rayformer.config.job import Job
from rayformer.errors import CheckpointError, DamagedError
from rayformer.events import CheckpointSaved, SaveFailed
from rayformer.optim.scaler import LossScale
from rayformer.shards import KINDS, tensor_name


def state_hash(cell: Cell) -> str:
    """The hash of the whole state, on every cell; each hashes what it alone answers for."""
    mine = 0
    for tensor, box, values in _unique(cell):
        mine += box_hash(tensor, box, cell.specs[tensor.rpartition("@")[0]].shape, values)
    return shown(sum(cell.groups.world.gather_values(mine % 2**64)))


def make_manifest(
    job: Job,
    *,
    step: int,
    extra: Mapping[str, Any],
    found: Mapping[str, object],
    records: list[ShardRecord],
    state_hash: str,
) -> Manifest:
    """The manifest of a checkpoint of ``job``: ``extra`` are a snapshot's small values, ``found`` the environment."""
    degrees = job.layout.degrees
    return Manifest(
        step=step,
        consumed_samples=extra["consumed_samples"],
        layout={axis: degrees.size(axis) for axis in ("tp", "cp", "dp", "pp", "ep", "etp")},
        virtual_ranks=job.batch.num_virtual_ranks,
        order=job.data.order,
        job=shown_job(job),
        environment=found,
        state_hash=state_hash,
        shards=records,
        extra={key: extra[key] for key in ("updates", "loss_scale", "samples")},
    )


def save_checkpoint(
    cell: Cell, directory: Path | Folder, *, step: int, consumed_samples: int
) -> CheckpointSaved | SaveFailed:
    """Write the state as step ``step`` of ``directory``; every cell of the run must call it.

    Each cell writes its share, and the first one the manifest when all are done; older checkpoints are dropped as the
    job says. When this returns, the checkpoint exists, and on every cell, unless a storage refused to take it.
    """
    started = time.monotonic()
    directory = folder_at(directory)
    folder, world = directory / step_folder(step), cell.groups.world
    refused = None
    if world.rank == 0:
        refused = _refusal(lambda: start(folder))
    indexes = world.gather_values((str(cell.groups.cell), dump_index(slot_index(cell)).decode(), refused))
    held = {name: load_index(text.encode()) for name, text, _ in indexes}
    written: list[Written] = []
    refused = indexes[0][2] or _refusal(lambda: written.extend(_write_share(cell, folder, held)))
    told = world.gather_values(
        {
            "records": [(r.tensor, r.shape, r.dtype, r.to_json()) for of_file in written for r in of_file.records],
            "hash": sum(of_file.hash for of_file in written) % 2**64,
            "samples": None if cell.training is None else cell.training.num_samples,
            "refused": refused,
        }
    )
    refused = next((of_cell["refused"] for of_cell in told if of_cell["refused"]), None)
    found = shown(sum(of_cell["hash"] for of_cell in told))
    if world.rank == 0 and refused is None:
        manifest = make_manifest(
            cell.job,
            step=step,
            extra={
                "consumed_samples": consumed_samples,
                "updates": cell.optimizer.num_updates,
                "loss_scale": asdict(cell.optimizer.loss_scale),
                "samples": next((of_cell["samples"] for of_cell in told if of_cell["samples"]), None),
            },
            found=environment(cell.groups.device),
            records=[ShardRecord.from_json(*record) for of_cell in told for record in of_cell["records"]],
            state_hash=found,
        )
        refused = _refusal(lambda: commit(directory, folder, manifest))
    refused = world.gather_values(refused)[0]
    generation = cell.groups.generation
    if refused is not None:
        if world.rank == 0:
            abandon(folder)
        return SaveFailed(generation=generation, step=step, message=refused)
    if world.rank == 0:
        prune_for(cell.job, directory)
    seconds = time.monotonic() - started
    return CheckpointSaved(generation=generation, step=step, path=str(folder), state_hash=found, seconds=seconds)


def load_checkpoint(cell: Cell, folder: Path | Folder) -> Manifest:
    """Fill the cell from the checkpoint in ``folder``, whatever layout wrote it, and verify the hash of the whole.

    Raises CheckpointError if the model differs, and DamagedError if bytes were changed.
    """
    folder = folder_at(folder)
    manifest = read_manifest(folder)
    _check_tensors(cell, folder, manifest)
    samples = manifest.extra.get("samples")
    if cell.training is not None and samples not in (None, cell.training.num_samples):
        raise CheckpointError(
            f"{folder}: its run trained on a corpus of {samples} samples, {cell.job.data.train[0].path} has"
            f" {cell.training.num_samples}, so the order of samples would not go on; use the corpus it was trained on"
        )
    cell.position.is_whole = False
    with _arrays(cell) as wanted:
        read_boxes(folder, manifest, wanted)
    cell.optimizer.num_updates = manifest.extra.get("updates", manifest.step)
    if "loss_scale" in manifest.extra:
        cell.optimizer.loss_scale = LossScale(**manifest.extra["loss_scale"])
    cell.optimizer.start_gather()
    cell.optimizer.await_parameters()
    loaded = state_hash(cell)
    if loaded != manifest.state_hash:
        raise DamagedError(f"{folder}: {_damage(cell, folder, manifest, loaded)}")
    cell.position.move_to(manifest.step, consumed_samples=manifest.consumed_samples)
    return manifest


def load_weights(cell: Cell, where: str) -> None:
    """Start the cell from the weights of ``where``, as ``checkpoint.init_from`` has it; its moments stay as they are.

    Raises CheckpointError if they are not of this model.
    """
    with _arrays(cell, kinds=("master",)) as wanted:
        weights_at(where).read([(tensor.rpartition("@")[0], box, array) for tensor, box, array in wanted])
    cell.optimizer.start_gather()
    cell.optimizer.await_parameters()


def prune_for(job: Job, directory: Folder) -> None:
    """Drop old checkpoints as ``job`` says; the one that it names to start from stays."""
    section = job.checkpoint
    prune(directory, keep=section.keep, keep_every=section.keep_every, used={section.resume.rpartition("/")[2]})


def _check_tensors(cell: Cell, folder: Folder, manifest: Manifest) -> None:
    """The checkpoint's tensors that this cell's model has must have the model's shapes, and all the same kinds."""
    shapes = manifest.shapes()
    for name, spec in cell.specs.items():
        for kind in KINDS:
            found = shapes.get(tensor_name(name, kind))
            if found is None:
                raise CheckpointError(f"{folder}: it holds no {tensor_name(name, kind)}; is it of another model?")
            if found != spec.shape:
                raise CheckpointError(
                    f"{folder}: {tensor_name(name, kind)} has shape {list(found)}, the model's is {list(spec.shape)}"
                )
    known = {name for names in cell.groups.world.gather_values(sorted(cell.specs)) for name in names}
    for tensor in shapes:
        if tensor.rpartition("@")[0] not in known:
            raise CheckpointError(f"{folder}: it holds {tensor}, which the model has not; is it of another model?")


@contextmanager
def _arrays(cell: Cell, kinds: Collection[str] = KINDS) -> Iterator[list[BoxValue]]:
    """The memory of what the cell owns, to be filled; on an accelerator, a copy that is then moved there."""
    shards = [shard for shard in cell.optimizer.owned_state() if shard.tensor.rpartition("@")[2] in kinds]
    if cell.groups.device.type == "cpu":
        yield [(shard.tensor, shard.box, shard.value.numpy()) for shard in shards]
        return
    arrays = [np.empty(shard.box.shape, dtype=np.float32) for shard in shards]
    yield [(shard.tensor, shard.box, array) for shard, array in zip(shards, arrays)]
    for shard, array in zip(shards, arrays):
        shard.value.copy_(torch.from_numpy(array))


def _damage(cell: Cell, folder: Folder, manifest: Manifest, loaded: str) -> str:
    """What is wrong with files whose state hash is ``loaded``: each cell reads a part of them with their checksums."""
    world = cell.groups.world
    mine = find_damage(folder, manifest.shards[world.rank :: world.size])
    found = next((told for told in world.gather_values(mine) if told), None)
    return found or f"its state hash is {manifest.state_hash}, what was loaded has {loaded}"


def _write_share(cell: Cell, folder: Folder, held: Mapping[str, list[IndexEntry]]) -> Iterator[Written]:
    name = str(cell.groups.cell)
    flats = cell.optimizer.flat_state()
    starts = [0, *accumulate(flat.numel() for flat in flats)]
    shapes = {tensor_name(param, kind): spec.shape for param, spec in cell.specs.items() for kind in KINDS}

    def value(entry: IndexEntry) -> BoxValue:
        i = bisect_right(starts, entry.start) - 1
        at = entry.start - starts[i]
        values = flats[i][at : at + entry.box.numel].view(entry.box.shape)
        return entry.tensor, entry.box, values.cpu().numpy()

    files = plan_files(held, max_file_bytes=cell.job.checkpoint.max_file_bytes)[name]
    for number, entries in enumerate(files):
        yield write_file(folder, file_name(name, number), [value(entry) for entry in entries], shapes)


def _refusal(write: Callable[[], None]) -> str | None:
    """What a storage had to say against it, if it had."""
    try:
        write()
    except (CheckpointError, OSError) as error:
        return str(error)
    return None


def _unique(cell: Cell) -> Iterator[BoxValue]:
    for shard in cell.optimizer.unique_state():
        yield shard.tensor, shard.box, shard.value.cpu().numpy()
