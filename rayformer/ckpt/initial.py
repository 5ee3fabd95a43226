"""Weights to start from, without moments and without a place in the data: Hugging Face's, or a checkpoint's."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Protocol

import numpy as np
import numpy.typing as npt

from rayformer.ckpt.hf.config import longest_sequence, section_differences
from rayformer.ckpt.hf.weights import PREFIX, SIDE_FOLDER, HFWeights, copy_side_files, side_config
from rayformer.ckpt.inspect import resolve_checkpoint
from rayformer.ckpt.manifest import check_files, read_manifest
from rayformer.ckpt.reader import Source
from rayformer.ckpt.storage import Folder, folder_at, is_uri, without_keys
from rayformer.config.job import Job
from rayformer.errors import Problem
from rayformer.shards import Box, tensor_name


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


def problems(where: str, job: Job) -> Iterator[Problem]:
    """What keeps ``job`` from starting with the weights at ``where``. Raises CheckpointError if they are not whole."""
    if where.startswith(PREFIX):
        source = HFWeights(where.removeprefix(PREFIX))
        source.check_tied_head()
        config, found = source.config, source.model.model_dump(by_alias=True)
    else:
        folder = resolve_checkpoint(where)
        manifest = read_manifest(folder)
        check_files(folder, manifest)
        config, found = side_config(folder.parent), manifest.job["model"]
    of_whom = f"the weights of checkpoint.init_from={without_keys(where)} are of a model"
    for key, has, asked in section_differences(found, job.dump()["model"]):
        rule = f"{of_whom} with {has!r}"
        yield Problem(keys={f"model.{key}": asked}, rule=rule, fix="set it to that, or start from others")
    window = longest_sequence(config)
    if window is not None and window < job.batch.seq:
        rule = f"{of_whom} in which a token sees {window} tokens at most, and here it sees all before it"
        yield Problem(keys={"batch.seq": job.batch.seq}, rule=rule, fix=f"use at most {window}")


def copy_companions(where: str, directory: Folder) -> None:
    """Copy what lies beside the weights, such as a tokenizer, to ``directory``, for exports."""
    if where.startswith(PREFIX):
        copy_side_files(folder_at(where.removeprefix(PREFIX)), directory / SIDE_FOLDER)
    else:
        copy_side_files(resolve_checkpoint(where).parent / SIDE_FOLDER, directory / SIDE_FOLDER)


class _OfCheckpoint:
    def __init__(self, folder: Folder) -> None:
        self._source = Source(folder, read_manifest(folder))

    def read(self, wanted: Iterable[tuple[str, Box, npt.NDArray[np.float32]]]) -> None:
        self._source.read([(tensor_name(name, "master"), box, array) for name, box, array in wanted], verify=True)
