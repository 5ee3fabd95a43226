"""Weights to start from, without moments and without a place in the data: Hugging Face's, or a checkpoint's."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from rayformer.ckpt.hf.weights import PREFIX, SIDE_FOLDER, HFWeights, copy_side_files
from rayformer.ckpt.inspect import resolve_checkpoint
from rayformer.ckpt.manifest import check_files, read_manifest
from rayformer.ckpt.reader import Source
from rayformer.ckpt.storage import Folder, folder_at, is_uri
from rayformer.shards import Box, tensor_name

# What a run may choose anew for the same weights.
_FREE = {"dropout", "attention_dropout", "attention_impl", "compile"}


class Weights(Protocol):
    """Parameters by our names."""

    def read(self, wanted: Iterable[tuple[str, Box, npt.NDArray[np.float32]]]) -> None:
        """Fill each wanted array, a box of a parameter. Raises CheckpointError."""


def weights_at(where: str) -> Weights:
    """What ``checkpoint.init_from`` names."""
    if where.startswith(PREFIX):
        return HFWeights(where.removeprefix(PREFIX))
    return _OfCheckpoint(resolve_checkpoint(where))


def absolute(where: str) -> str:
    """``where`` for processes with other working folders."""
    prefix = PREFIX if where.startswith(PREFIX) else ""
    path = where.removeprefix(prefix)
    return where if is_uri(path) else f"{prefix}{folder_at(path)}"


def differences(where: str, model: Mapping[str, Any]) -> Iterator[tuple[str, object, object]]:
    """Keys of the ``model`` section of which what lies at ``where`` has another value: key, asked for, found.

    Raises CheckpointError if it is not whole.
    """
    if where.startswith(PREFIX):
        source = HFWeights(where.removeprefix(PREFIX))
        source.check()
        found: Mapping[str, Any] = source.model.model_dump(by_alias=True)
    else:
        folder = resolve_checkpoint(where)
        manifest = read_manifest(folder)
        check_files(folder, manifest)
        found = manifest.job["model"]
    plain = _plain(found), _plain(model)
    for key in plain[1] | plain[0]:
        if key not in _FREE and plain[0].get(key) != plain[1].get(key):
            yield key, plain[1].get(key), plain[0].get(key)


def copy_companions(where: str, directory: Folder) -> None:
    """Copy what lies beside the weights, such as a tokenizer, to ``directory``, for exports."""
    if where.startswith(PREFIX):
        copy_side_files(folder_at(where.removeprefix(PREFIX)), directory / SIDE_FOLDER)
    else:
        copy_side_files(resolve_checkpoint(where).parent / SIDE_FOLDER, directory / SIDE_FOLDER)


def _plain(section: Mapping[str, Any]) -> dict[str, Any]:
    """A ``model`` section with what it leaves open, so that two ways to say the same are equal."""
    if "factory" in section:
        return dict(section)
    heads, hidden = section["heads"], section["hidden"]
    bias = section.get("bias") or section.get("qkv_bias")
    open_keys = {"kv_heads": heads, "head_dim": hidden // heads, "qkv_bias": bias}
    return {**section, **{key: section.get(key) or value for key, value in open_keys.items()}}


class _OfCheckpoint:
    def __init__(self, folder: Folder) -> None:
        self._source = Source(folder, read_manifest(folder))

    def read(self, wanted: Iterable[tuple[str, Box, npt.NDArray[np.float32]]]) -> None:
        self._source.read([(tensor_name(name, "master"), box, array) for name, box, array in wanted], verify=True)
