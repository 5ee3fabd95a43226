"""What a checkpoint holds, looked at without a model: its bytes verified, its hash computed, two compared."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from rayformer.ckpt.hash import box_hash, shown
from rayformer.ckpt.manifest import MANIFEST, Manifest, ShardRecord, find_checkpoints, read_manifest
from rayformer.ckpt.reader import read_shard
from rayformer.ckpt.storage import Folder, folder_at
from rayformer.ckpt.tensorfile import Entry, read_head
from rayformer.ckpt.writer import entry_name
from rayformer.errors import CheckpointError
from rayformer.shards import CoverageError, plan_transfers, whole

Array = npt.NDArray[np.float32]


@dataclass(frozen=True, kw_only=True)
class Difference:
    """A tensor or a key of the manifest that two checkpoints don't share, as either has it."""

    what: str
    first: str
    second: str


def resolve_checkpoint(where: str | Path | Folder) -> Folder:
    """The checkpoint that ``where`` means: itself, or the newest in a folder of them, or in that of a run.

    Raises CheckpointError if there is none.
    """
    path = folder_at(where)
    for folder in (path, path / "checkpoints"):
        if folder.size(MANIFEST) is not None:
            return folder
        if found := find_checkpoints(folder):
            return found[0]
    raise CheckpointError(f"{path}: there is no checkpoint; name one, a folder of them, or the folder of a run")


def num_bytes(manifest: Manifest) -> int:
    """The bytes of all tensors."""
    return sum(shard.num_bytes for shard in manifest.shards)


def problems(folder: Path | Folder, manifest: Manifest, *, on_bytes: Callable[[int], None]) -> Iterator[str]:
    """What is wrong with a checkpoint: bytes and heads of files that changed, holes, a hash that is not the manifest's.

    ``on_bytes`` is told of the bytes of every shard that was read.
    """
    total, is_whole = 0, True
    for shard in _in_place(manifest):
        try:
            total += _hash(shard, read_shard(folder, shard))
        except CheckpointError as error:
            is_whole = False
            yield str(error)
        on_bytes(shard.num_bytes)
    if is_whole:
        yield from _heads(folder_at(folder), manifest)
    yield from _holes(folder, manifest)
    if is_whole and shown(total) != manifest.state_hash:
        yield f"{folder}: its manifest has the state hash {manifest.state_hash}, and its files {shown(total)}"


def state_hash(folder: Path | Folder, manifest: Manifest, *, on_bytes: Callable[[int], None] = lambda _: None) -> str:
    """The state hash, computed from the files. Raises CheckpointError for bytes that changed."""
    return shown(sum(_tensor_hashes(folder, manifest, on_bytes).values()))


def differences(first: Path | Folder, second: Path | Folder) -> Iterator[Difference]:
    """What two checkpoints don't share: keys of their manifests, and tensors with other elements."""
    manifests = read_manifest(first), read_manifest(second)
    for key in ("step", "consumed_samples", "layout", "virtual_ranks", "order", "state_hash", "environment"):
        values = [getattr(manifest, key) for manifest in manifests]
        if values[0] != values[1]:
            yield Difference(what=key, first=_plain(values[0]), second=_plain(values[1]))
    jobs = [dict(_leaves(manifest.job)) for manifest in manifests]
    for key in sorted(jobs[0].keys() | jobs[1].keys()):
        values = [job.get(key, "none") for job in jobs]
        if values[0] != values[1]:
            yield Difference(what=f"job {key}", first=str(values[0]), second=str(values[1]))
    shapes = [manifest.shapes() for manifest in manifests]
    hashes = [_tensor_hashes(folder, manifest, lambda _: None) for folder, manifest in zip((first, second), manifests)]
    for tensor in sorted(shapes[0].keys() | shapes[1].keys()):
        told = [_told(tensor, shape, of) for shape, of in zip(shapes, hashes)]
        if told[0] != told[1]:
            yield Difference(what=tensor, first=told[0], second=told[1])


def _told(tensor: str, shapes: Mapping[str, tuple[int, ...]], hashes: Mapping[str, int]) -> str:
    return f"{list(shapes[tensor])} {shown(hashes[tensor])}" if tensor in shapes else "none"


def _tensor_hashes(folder: Path | Folder, manifest: Manifest, on_bytes: Callable[[int], None]) -> dict[str, int]:
    hashes: defaultdict[str, int] = defaultdict(int)
    for shard in _in_place(manifest):
        hashes[shard.tensor] += _hash(shard, read_shard(folder, shard))
        on_bytes(shard.num_bytes)
    return hashes


def _heads(folder: Folder, manifest: Manifest) -> Iterator[str]:
    """Files whose heads, which others read them by, don't say what the manifest says."""
    told: defaultdict[str, dict[str, Entry]] = defaultdict(dict)
    for shard in manifest.shards:
        entry = Entry(file=shard.file, dtype=shard.dtype, shape=shard.box.shape, offset=shard.offset)
        told[shard.file][entry_name(shard.tensor, shard.box)] = entry
    for file, entries in told.items():
        try:
            if read_head(folder, file) != entries:
                yield f"{folder}/{file}: its head is not the one that was written; use an older checkpoint"
        except CheckpointError as error:
            yield str(error)
        except OSError as error:
            yield f"{folder}/{file}: it can't be read ({error.strerror or error}); use an older checkpoint"


def _holes(folder: Path | Folder, manifest: Manifest) -> Iterator[str]:
    """Tensors of which elements are held twice or not at all."""
    holdings = defaultdict(list)
    for holding in manifest.holdings():
        holdings[holding.tensor].append(holding)
    for tensor, shape in manifest.shapes().items():
        try:
            plan_transfers(holdings[tensor], [(tensor, whole(shape))])
        except CoverageError as error:
            yield f"{folder}: {error}"


def _in_place(manifest: Manifest) -> list[ShardRecord]:
    return sorted(manifest.shards, key=lambda shard: (shard.file, shard.offset))


def _hash(shard: ShardRecord, values: Array) -> int:
    return box_hash(shard.tensor, shard.box, shard.shape, values)


def _leaves(tree: Mapping[str, object], at: str = "") -> Iterator[tuple[str, object]]:
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{at}{key}.")
        else:
            yield f"{at}{key}", value


def _plain(value: object) -> str:
    if isinstance(value, Mapping):
        return " ".join(f"{key}={entry}" for key, entry in value.items())
    return str(value)
