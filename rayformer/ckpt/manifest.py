"""The manifest: what a checkpoint holds and where each box of it lies. Without one there is no checkpoint."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import xxhash

from rayformer.ckpt.storage import Folder, folder_at, is_plain_name
from rayformer.errors import CheckpointError, DamagedError
from rayformer.shards import Box, Holding

FORMAT = 1
MANIFEST = "manifest.json"
_KEYS = ("step", "consumed_samples", "layout", "virtual_ranks", "order", "job", "environment", "extra", "state_hash")
_SEAL = ',\n "xxh3": "'  # what is before it in the file is what the checksum covers


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardRecord:
    """One box of one tensor: ``bytes`` bytes at ``offset`` of ``file``, their xxh3_64 in hex."""

    tensor: str
    shape: tuple[int, ...]
    dtype: str
    box: Box
    file: str
    offset: int
    num_bytes: int
    xxh3: str

    def to_json(self) -> dict[str, Any]:
        return {
            "lo": list(self.box.lo),
            "hi": list(self.box.hi),
            "file": self.file,
            "offset": self.offset,
            "bytes": self.num_bytes,
            "xxh3": self.xxh3,
        }

    @classmethod
    def from_json(cls, tensor: str, shape: Sequence[int], dtype: str, shard: Mapping[str, Any]) -> ShardRecord:
        return cls(
            tensor=tensor,
            shape=tuple(shape),
            dtype=dtype,
            box=Box(lo=tuple(shard["lo"]), hi=tuple(shard["hi"])),
            file=str(shard["file"]),
            offset=shard["offset"],
            num_bytes=shard["bytes"],
            xxh3=shard["xxh3"],
        )


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Everything a checkpoint says of itself. ``layout`` maps axes to degrees, ``job`` is the resolved job."""

    step: int
    consumed_samples: int
    layout: Mapping[str, int]
    virtual_ranks: int
    order: str
    job: Mapping[str, Any]
    environment: Mapping[str, Any]
    state_hash: str
    shards: Sequence[ShardRecord]
    extra: Mapping[str, Any] = field(default_factory=dict)

    def holdings(self) -> list[Holding[ShardRecord]]:
        """What the checkpoint holds, for a plan of transfers."""
        return [Holding(tensor=shard.tensor, box=shard.box, place=shard) for shard in self.shards]

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The global shape of every tensor."""
        return {shard.tensor: shard.shape for shard in self.shards}

    def dumps(self) -> str:
        tensors: dict[str, dict[str, Any]] = {}
        for shard in sorted(self.shards, key=lambda s: (s.tensor, s.box.lo)):
            entry = tensors.setdefault(shard.tensor, {"shape": list(shard.shape), "dtype": shard.dtype, "shards": []})
            entry["shards"].append(shard.to_json())
        head = {
            "format": FORMAT,
            "step": self.step,
            "consumed_samples": self.consumed_samples,
            "layout": dict(self.layout),
            "virtual_ranks": self.virtual_ranks,
            "order": self.order,
            "job": dict(self.job),
            "environment": dict(self.environment),
            "extra": dict(self.extra),
            "state_hash": self.state_hash,
            "tensors": tensors,
        }
        text = json.dumps(head, indent=1).removesuffix("\n}")
        return f'{text}{_SEAL}{xxhash.xxh3_64_hexdigest(text.encode())}"\n}}'


def read_manifest(folder: Path | Folder) -> Manifest:
    """The manifest in ``folder``. Raises CheckpointError if it is missing, damaged, or of another format."""
    folder = folder_at(folder)
    path = f"{folder}/{MANIFEST}"
    try:
        content = folder.read(MANIFEST)
        tree = json.loads(content.decode())
    except FileNotFoundError:
        raise CheckpointError(f"{folder}: there is no {MANIFEST}, so this is no checkpoint; name another one") from None
    except OSError as error:
        raise CheckpointError(f"{path}: it can't be read ({error}); use an older checkpoint") from None
    except ValueError as error:
        raise DamagedError(f"{path}: it is no JSON ({error}); use an older checkpoint") from None
    if not isinstance(tree, dict) or tree.get("format") != FORMAT:
        found = tree.get("format") if isinstance(tree, dict) else type(tree).__name__
        raise CheckpointError(f"{path}: expected format {FORMAT}, found {found!r}; use the rayformer that wrote it")
    try:
        manifest = Manifest(
            **{key: tree[key] for key in _KEYS},
            shards=[
                _shard(path, name, entry, shard) for name, entry in tree["tensors"].items() for shard in entry["shards"]
            ],
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise DamagedError(f"{path}: it lacks or misstates {error}; use an older checkpoint") from None
    _check_seal(path, content, tree)
    return manifest


def _check_seal(path: str, content: bytes, tree: Mapping[str, Any]) -> None:
    """A manifest as we lay it out must be what was written; one that another program wrote is not held to that."""
    if unknown := sorted(tree.keys() - {"format", "tensors", "xxh3", *_KEYS}):
        raise DamagedError(f"{path}: it has {unknown[0]!r}, which no manifest has; use an older checkpoint")
    is_ours = content.count(b"\n") == json.dumps(tree, indent=1).count("\n")
    covered = content.rpartition(_SEAL.encode())[0]
    if "xxh3" in tree and is_ours and tree["xxh3"] != xxhash.xxh3_64_hexdigest(covered):
        raise DamagedError(
            f"{path}: it is not what was written; use an older checkpoint, or take its line xxh3 out if you changed it"
        )


def check_files(folder: Folder, manifest: Manifest) -> None:
    """See that every file is there and long enough, without reading it. Raises DamagedError naming one that is not."""
    needed: dict[str, int] = {}
    for shard in manifest.shards:
        needed[shard.file] = max(needed.get(shard.file, 0), shard.offset + shard.num_bytes)
    for file, num_bytes in needed.items():
        found = folder.size(file)
        if found is None:
            raise DamagedError(f"{folder}/{file}: it is missing; use an older checkpoint")
        if found < num_bytes:
            raise DamagedError(f"{folder}/{file}: it has {found} of {num_bytes} bytes; use an older checkpoint")


def _shard(path: str, tensor: str, entry: Mapping[str, Any], shard: Mapping[str, Any]) -> ShardRecord:
    if not is_plain_name(shard["file"]):
        raise DamagedError(f"{path}: {tensor} lies in {shard['file']!r}, outside of the checkpoint's folder; refuse it")
    record = ShardRecord.from_json(tensor, entry["shape"], entry["dtype"], shard)
    if record.dtype != "F32" or record.num_bytes != 4 * prod(record.box.shape):
        raise DamagedError(f"{path}: {tensor} has {record.num_bytes} bytes of {record.dtype} for {record.box}")
    return record


def step_folder(step: int) -> str:
    """The name of the folder of step ``step``."""
    return f"step-{step:09d}"


def step_of(folder: Path | Folder) -> int:
    """The step that a folder is named after."""
    return int(folder.name.removeprefix("step-"))


def step_folders(directory: Path | Folder) -> list[Folder]:
    """The folders in ``directory`` that are named after a step, with a manifest or without, the newest first."""
    directory = folder_at(directory)
    named = [directory / name for name in directory.names() if re.fullmatch(r"step-\d{9,}", name)]
    return sorted(named, key=step_of, reverse=True)


def find_checkpoints(directory: Path | Folder) -> list[Folder]:
    """The folders in ``directory`` that have a manifest, the newest first."""
    return [folder for folder in step_folders(directory) if folder.size(MANIFEST) is not None]
