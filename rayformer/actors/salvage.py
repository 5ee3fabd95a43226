"""A checkpoint of what holders have, written without the cells: for a run that finds nothing to repair itself with."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from rayformer.actors.holder import Copy
from rayformer.cell.plan import RunPlan
from rayformer.cell.process import environment
from rayformer.ckpt.hash import box_hash, shown
from rayformer.ckpt.manifest import Manifest, step_folder
from rayformer.ckpt.slots import holdings_of
from rayformer.ckpt.writer import commit, prune, write_shards
from rayformer.events import CheckpointSaved
from rayformer.shards import Box


def save_copies(plan: RunPlan, copies: Mapping[str, Copy], *, generation: int) -> CheckpointSaved:
    """Write the snapshots of all cells, of one step, as the checkpoint of that step."""
    (step,) = {copy.step for copy in copies.values()}
    boxes: dict[tuple[str, Box], npt.NDArray[np.float32]] = {}
    for copy in copies.values():
        for holding in holdings_of(copy.index, copy.snapshot):
            snapshot, start = holding.place
            values = snapshot.payload[start : start + holding.box.numel].reshape(holding.box.shape)
            boxes.setdefault((holding.tensor, holding.box), values)  # replicas hold the same
    shapes: dict[str, tuple[int, ...]] = {}
    for tensor, box in boxes:
        shapes[tensor] = tuple(map(max, box.hi, shapes.get(tensor, box.hi)))
    folder = plan.checkpoints / step_folder(step)
    values = [(tensor, box, array) for (tensor, box), array in boxes.items()]
    records = write_shards(folder, "holders", values, shapes)
    found = shown(sum(box_hash(tensor, box, shapes[tensor], array) for tensor, box, array in values))
    job, degrees = plan.job, plan.job.layout.degrees
    extra = next(iter(copies.values())).extra
    manifest = Manifest(
        step=step,
        consumed_samples=extra["consumed_samples"],
        layout={axis: degrees.size(axis) for axis in ("tp", "cp", "dp", "pp", "ep", "etp")},
        virtual_ranks=job.batch.num_virtual_ranks,
        order=job.data.order,
        job=job.dump(),
        environment=environment(torch.device("cpu")),
        state_hash=found,
        shards=records,
        extra={"updates": extra["updates"], "loss_scale": extra["loss_scale"], "samples": None},
    )
    commit(folder, manifest)
    prune(Path(plan.checkpoints), job.checkpoint.keep)
    return CheckpointSaved(generation=generation, step=step, path=str(folder), state_hash=found, seconds=0.0)
