"""Reading a checkpoint into whatever boxes a cell wants, with every checksum verified."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path

import numpy as np
import numpy.typing as npt
import xxhash

from rayformer.ckpt.manifest import Manifest, ShardRecord
from rayformer.errors import CheckpointError
from rayformer.shards import Box, CoverageError, plan_transfers


def read_boxes(folder: Path, manifest: Manifest, wanted: Iterable[tuple[str, Box, npt.NDArray[np.float32]]]) -> None:
    """Fill each wanted array, which is a box of a tensor, from the checkpoint in ``folder``.

    Raises CheckpointError naming the tensor if it is not held or not held whole, and the file if its bytes changed.
    """
    targets = {(tensor, box): array for tensor, box, array in wanted}
    shapes = manifest.shapes()
    for tensor, _ in targets:
        if tensor not in shapes:
            raise CheckpointError(f"{folder}: it holds no {tensor}; is it of another model?")
    try:
        plan = plan_transfers(manifest.holdings(), targets)
    except CoverageError as error:
        raise CheckpointError(f"{folder}: {error}") from None
    source = lru_cache(maxsize=8)(lambda shard: read_shard(folder, shard))
    for transfer in sorted(plan, key=lambda t: (t.source.place.file, t.source.place.offset)):
        values = source(transfer.source.place)
        part = transfer.part
        targets[transfer.tensor, transfer.target][part.slices(transfer.target)] = values[
            part.slices(transfer.source.box)
        ]


def read_shard(folder: Path, shard: ShardRecord) -> npt.NDArray[np.float32]:
    path = folder / shard.file
    try:
        with path.open("rb") as file:
            file.seek(shard.offset)
            data = file.read(shard.num_bytes)
    except OSError as error:
        raise CheckpointError(f"{path}: it can't be read ({error.strerror}); use an older checkpoint") from None
    if len(data) != shard.num_bytes or xxhash.xxh3_64_hexdigest(data) != shard.xxh3:
        raise CheckpointError(
            f"{path}: the {shard.num_bytes} bytes at {shard.offset}, which are {shard.tensor} {shard.box}, are not"
            " those that were written; use an older checkpoint"
        )
    return np.frombuffer(data, dtype="<f4").reshape(shard.box.shape)
