"""Writing a checkpoint: every cell its shards, then one of them the manifest, and the oldest are dropped last."""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt
import xxhash
from safetensors.numpy import save_file

from rayformer.ckpt.manifest import MANIFEST, Manifest, ShardRecord, find_checkpoints, step_of
from rayformer.shards import Box

logger = logging.getLogger("rayformer.ckpt")

BoxValue = tuple[str, Box, npt.NDArray[np.float32]]


def write_shards(
    folder: Path, writer: str, values: Iterable[BoxValue], shapes: Mapping[str, tuple[int, ...]]
) -> list[ShardRecord]:
    """Write one cell's boxes to ``<writer>.safetensors`` in ``folder``, durably, and say where each lies.

    ``shapes`` are those of the whole tensors.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{writer}.safetensors"
    boxes = {_entry(tensor, box): (tensor, box, np.ascontiguousarray(value)) for tensor, box, value in values}
    temporary = path.with_suffix(".tmp")
    save_file({entry: value for entry, (_, _, value) in boxes.items()}, temporary)
    offsets = _offsets(temporary)
    _sync(temporary)
    os.replace(temporary, path)
    return [
        ShardRecord(
            tensor=tensor,
            shape=shapes[tensor],
            dtype="F32",
            box=box,
            file=path.name,
            offset=offsets[entry],
            num_bytes=value.nbytes,
            xxh3=xxhash.xxh3_64_hexdigest(value.data),
        )
        for entry, (tensor, box, value) in boxes.items()
    ]


def commit(folder: Path, manifest: Manifest) -> None:
    """Make the checkpoint in ``folder`` exist: its manifest is written, made durable and renamed into place.

    Later steps that lie beside it are of an attempt that this one went back from; they stop being checkpoints.
    """
    for other in find_checkpoints(folder.parent):
        if step_of(other) > manifest.step:
            (other / MANIFEST).rename(other / f"{MANIFEST}.superseded")
    temporary = folder / f"{MANIFEST}.tmp"
    temporary.write_text(manifest.dumps(), encoding="utf-8")
    _sync(temporary)
    _sync(folder)
    os.replace(temporary, folder / MANIFEST)
    _sync(folder)
    _sync(folder.parent)


def prune(directory: Path, keep: int) -> None:
    """Drop all but the ``keep`` newest checkpoints, each one's manifest first; 0 keeps all.

    What can't be deleted is left for the next time.
    """
    for folder in find_checkpoints(directory)[keep:] if keep else []:
        try:
            (folder / MANIFEST).unlink()
            shutil.rmtree(folder)
        except OSError as error:
            logger.warning("could not drop the old checkpoint %s: %s", folder, error)


def _entry(tensor: str, box: Box) -> str:
    ranges = ",".join(f"{lo}:{hi}" for lo, hi in zip(box.lo, box.hi))
    return f"{tensor}[{ranges}]"


def _offsets(path: Path) -> dict[str, int]:
    """Where each tensor starts in a safetensors file, counted from the beginning of the file."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    return {name: 8 + length + entry["data_offsets"][0] for name, entry in header.items() if name != "__metadata__"}


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
