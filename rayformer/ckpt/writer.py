"""Writing a checkpoint: first all files, then the manifest, which makes it one, and the oldest are dropped last."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
import numpy.typing as npt
import xxhash

from rayformer.ckpt.hash import box_hash
from rayformer.ckpt.manifest import MANIFEST, Manifest, ShardRecord, find_checkpoints, step_folders, step_of
from rayformer.ckpt.storage import Buffer, Folder
from rayformer.ckpt.tensorfile import make_head
from rayformer.errors import CheckpointError
from rayformer.shards import Box

logger = logging.getLogger("rayformer.ckpt")
LATEST = "latest"

BoxValue = tuple[str, Box, npt.NDArray[np.float32]]


@dataclass(frozen=True, kw_only=True)
class Written:
    """What was written: where each box lies, and what it adds to the state hash."""

    records: tuple[ShardRecord, ...]
    hash: int


def file_name(writer: str, number: int) -> str:
    """The name of one of the files of a writer."""
    return f"{writer}-{number:04d}.safetensors"


def entry_name(tensor: str, box: Box) -> str:
    """What a box is called in its file, for whoever opens that as safetensors."""
    ranges = ",".join(f"{lo}:{hi}" for lo, hi in zip(box.lo, box.hi))
    return f"{tensor}[{ranges}]"


def write_file(folder: Folder, name: str, values: Sequence[BoxValue], shapes: Mapping[str, tuple[int, ...]]) -> Written:
    """Write boxes to one safetensors file, durably, straight from where they lie in memory.

    ``shapes`` are those of the whole tensors. Raises CheckpointError if the storage refuses.
    """
    header, offsets = make_head([(entry_name(tensor, box), "F32", value.shape) for tensor, box, value in values])
    records: list[ShardRecord] = []
    total = 0

    def parts() -> Iterator[Buffer]:
        nonlocal total
        yield header
        for (tensor, box, value), offset in zip(values, offsets):
            assert value.flags.c_contiguous and value.dtype == np.float32
            total += box_hash(tensor, box, shapes[tensor], value)
            records.append(
                ShardRecord(
                    tensor=tensor,
                    shape=tuple(shapes[tensor]),
                    dtype="F32",
                    box=box,
                    file=name,
                    offset=offset,
                    num_bytes=value.nbytes,
                    xxh3=xxhash.xxh3_64_hexdigest(value.data),
                )
            )
            yield value.reshape(-1).data

    folder.write(name, parts())
    return Written(records=tuple(records), hash=total)


def start(folder: Folder) -> None:
    """Make ``folder`` no checkpoint before it is written anew: an old manifest would vouch for half-written files.

    Raises CheckpointError if the storage refuses.
    """
    if folder.size(MANIFEST) is not None:
        folder.rename(MANIFEST, f"{MANIFEST}.old")
        folder.settle()


def commit(directory: Folder, folder: Folder, manifest: Manifest) -> None:
    """Make the checkpoint in ``folder``, whose files are all written, exist. Raises CheckpointError.

    Later steps that lie beside it in ``directory`` are of an attempt that this one went back from; they stop being
    checkpoints.
    """
    _check_whole(folder, manifest)
    for other in find_checkpoints(directory):
        if step_of(other) > manifest.step:
            other.rename(MANIFEST, f"{MANIFEST}.superseded")
            other.settle()
    folder.settle()
    folder.write(MANIFEST, [manifest.dumps().encode()])
    folder.settle()
    directory.settle()
    try:
        directory.write(LATEST, [f"{folder.name}\n".encode()])
    except CheckpointError as error:
        logger.warning("%s", error)  # a hint for people; readers look at the manifests


def abandon(folder: Folder) -> None:
    """Remove what a failed save has left, which no manifest makes a checkpoint. What can't be removed stays."""
    try:
        if folder.size(MANIFEST) is None:
            folder.remove()
    except CheckpointError as error:
        logger.warning("could not remove what is left of %s: %s", folder, error)


def prune(directory: Folder, *, keep: int, keep_every: int = 0, used: Collection[str] = ()) -> None:
    """Drop all but the ``keep`` newest checkpoints, each one's manifest first; 0 keeps all.

    Those whose step is a multiple of ``keep_every`` stay, and the folders named in ``used``. Unfinished ones from
    before the newest go too. What can't be deleted is left for the next time.
    """
    if not keep:
        return
    try:
        found, folders = find_checkpoints(directory), step_folders(directory)
    except CheckpointError as error:
        logger.warning("could not drop old checkpoints: %s", error)
        return
    stays = {folder.name for folder in found[:keep]} | set(used)
    stays |= {folder.name for folder in found if keep_every and step_of(folder) % keep_every == 0}
    for folder in folders:
        if not found or folder.name in stays or step_of(folder) > step_of(found[0]):
            continue
        try:
            start(folder)
            folder.remove()
        except CheckpointError as error:
            logger.warning("could not drop the old checkpoint %s: %s", folder, error)


def _check_whole(folder: Folder, manifest: Manifest) -> None:
    """Every tensor's boxes must have as many elements as it, none twice."""
    found: Counter[str] = Counter()
    boxes: set[tuple[str, Box]] = set()
    for shard in manifest.shards:
        if (shard.tensor, shard.box) in boxes:
            raise CheckpointError(f"{folder}: {shard.tensor} {shard.box} was written twice; it is not committed")
        boxes.add((shard.tensor, shard.box))
        found[shard.tensor] += shard.box.numel
    for tensor, shape in manifest.shapes().items():
        if found[tensor] != prod(shape):
            raise CheckpointError(
                f"{folder}: of {tensor} {found[tensor]} of {prod(shape)} elements were written; it is not committed"
            )
