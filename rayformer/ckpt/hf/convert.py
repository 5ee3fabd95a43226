"""Whole models in and out, one tensor at a time: a checkpoint of any layout from and to a folder of Hugging Face's."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt
from pydantic import ValidationError

from rayformer.ckpt.hash import shown
from rayformer.ckpt.hf.config import family_of, hf_config, model_section, section_differences
from rayformer.ckpt.hf.mapping import HFTensor, hf_tensors
from rayformer.ckpt.hf.weights import (
    CONFIG,
    INDEX,
    SIDE_FILES,
    SIDE_FOLDER,
    SINGLE,
    HFWeights,
    copy_side_files,
    side_config,
)
from rayformer.ckpt.manifest import Manifest, ShardRecord, step_folder
from rayformer.ckpt.reader import Source
from rayformer.ckpt.storage import Buffer, Folder
from rayformer.ckpt.tensorfile import make_head
from rayformer.ckpt.writer import commit, file_name, start, write_file
from rayformer.config.model import ModelConfig
from rayformer.errors import CheckpointError
from rayformer.shards import KINDS, tensor_name, whole

MAX_SHARD_BYTES = 5 * 10**9

_NAMES = {"fp32": ("F32", "float32", 4), "bf16": ("BF16", "bfloat16", 2), "fp16": ("F16", "float16", 2)}


def export(
    folder: Folder,
    manifest: Manifest,
    target: Folder,
    *,
    dtype: str | None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    on_bytes: Callable[[int], None] = lambda _: None,
) -> int:
    """Write the weights of a checkpoint to ``target`` as ``transformers`` loads them; how many bytes they are.

    ``dtype`` is fp32, bf16 or fp16, None the one that the run computed in, or that was imported. The files are the same
    whatever layout the checkpoint was saved from. Raises CheckpointError for a model that is of none of the families.
    """
    model, job = exported_model(folder, manifest), manifest.job
    base = _base(folder, model)
    dtype = dtype or job.get("precision", {}).get("params", "fp32")
    config = hf_config(model, dtype=_NAMES[dtype][1], seq=job.get("batch", {}).get("seq"), base=base)
    config = {key: config[key] for key in sorted(config)}
    tensors = hf_tensors(model, family_of(config, where=str(target)))
    source = Source(folder, manifest)
    files = _split(tensors, _NAMES[dtype][2], max_shard_bytes)
    names = (
        [SINGLE]
        if len(files) == 1
        else [f"model-{i + 1:05d}-of-{len(files):05d}.safetensors" for i in range(len(files))]
    )

    def parts(of_file: Sequence[HFTensor]) -> Iterator[Buffer]:
        yield make_head([(t.name, _NAMES[dtype][0], t.shape) for t in of_file], {"format": "pt"})[0]
        for tensor in of_file:
            data = _cast(tensor.name, _assembled(source, tensor), dtype)
            yield data
            on_bytes(4 * prod(tensor.shape))

    for name, of_file in zip(names, files):
        target.write(name, parts(of_file))
    total = sum(_NAMES[dtype][2] * prod(tensor.shape) for tensor in tensors)
    if len(files) > 1:
        where = {tensor.name: name for name, of_file in zip(names, files) for tensor in of_file}
        target.write(INDEX, [_json({"metadata": {"total_size": total}, "weight_map": where})])
    side = folder.parent / SIDE_FOLDER
    there = set(side.names())
    for name in SIDE_FILES:
        if name in there and name != CONFIG:
            target.write(name, [side.read(name)])
    target.write(CONFIG, [_json(config)])
    return total


def exported_model(folder: Folder, manifest: Manifest) -> ModelConfig:
    """The ``model`` section of a checkpoint. Raises CheckpointError for a model of a user's own factory."""
    section = manifest.job.get("model", {})
    if "factory" in section:
        raise CheckpointError(f"{folder}: its model is of {section['factory']}, which transformers has not")
    try:
        return ModelConfig.model_validate(section)
    except ValidationError as error:
        raise CheckpointError(f"{folder}: its model section can't be read ({error})") from None


def import_weights(source: HFWeights, directory: Folder, *, on_bytes: Callable[[int], None] = lambda _: None) -> Folder:
    """Write ``source`` as the checkpoint of step 0 in ``directory``, its moments zero; the checkpoint's folder."""
    source.check_tied_head()
    folder = directory / step_folder(0)
    start(folder)
    records: list[ShardRecord] = []
    total = 0
    names = sorted(source.shapes, key=_block)
    shapes = {tensor_name(name, kind): shape for name, shape in source.shapes.items() for kind in KINDS}
    for number, (_, of_block) in enumerate(groupby(names, key=_block)):
        values = []
        for name in of_block:
            shape = source.shapes[name]
            master, zeros = np.empty(shape, dtype=np.float32), np.zeros(shape, dtype=np.float32)
            source.read([(name, whole(shape), master)])
            for kind, array in zip(KINDS, (master, zeros, zeros)):
                values.append((tensor_name(name, kind), whole(shape), array))
            on_bytes(master.nbytes)
        written = write_file(folder, file_name("import", number), values, shapes)
        records += written.records
        total += written.hash
    copy_side_files(source.folder, directory / SIDE_FOLDER)
    manifest = Manifest(
        step=0,
        consumed_samples=0,
        layout=dict.fromkeys(("tp", "cp", "dp", "pp", "ep", "etp"), 1),
        virtual_ranks=1,
        order="keyed",
        job={
            "run": {"name": f"import of {source.folder.name}"},
            "model": source.model.model_dump(by_alias=True),
            "precision": {"params": source.dtype},
        },
        environment={},
        state_hash=shown(total),
        shards=records,
        extra={"updates": 0, "samples": None},
    )
    commit(directory, folder, manifest)
    return folder


def _block(name: str) -> str:
    """The block that a parameter is of, with which it is written."""
    return ".".join(name.split(".")[:2]) if name.startswith("layers.") else name.split(".")[0]


def _base(folder: Folder, model: ModelConfig) -> Mapping[str, Any]:
    """The config that the run's model was imported with, if it was this one."""
    base = side_config(folder.parent)
    if not base:
        return base
    found = model_section(base, where=f"{folder.parent / SIDE_FOLDER}/{CONFIG}")
    return {} if any(section_differences(found, model.model_dump(by_alias=True))) else base


def _split(tensors: Sequence[HFTensor], item: int, most: int) -> list[list[HFTensor]]:
    files: list[list[HFTensor]] = [[]]
    room = most
    for tensor in tensors:
        num_bytes = item * prod(tensor.shape)
        if num_bytes > room and files[-1]:
            files.append([])
            room = most
        files[-1].append(tensor)
        room -= num_bytes
    return files


def _assembled(source: Source, tensor: HFTensor) -> npt.NDArray[np.float32]:
    values = np.empty(tensor.shape, dtype=np.float32)
    arrays = [np.empty(part.ours_box.shape, dtype=np.float32) for part in tensor.parts]
    wanted = [(tensor_name(part.ours, "master"), part.ours_box, array) for part, array in zip(tensor.parts, arrays)]
    source.read(wanted, verify=True)
    for part, array in zip(tensor.parts, arrays):
        values[part.box.slices(whole(tensor.shape))] = array.T if part.is_transposed else array
    return values


def _cast(name: str, values: npt.NDArray[np.float32], dtype: str) -> memoryview:
    """``values`` in ``dtype``, to the nearest, as bytes. Raises CheckpointError where fp16 is too small for them."""
    if dtype == "fp32":
        return values.reshape(-1).view(np.uint8).data
    if dtype == "bf16":
        bits = values.reshape(-1).view(np.uint32)
        nearest = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
        nearest = np.where(np.isnan(values.reshape(-1)), np.uint32(0x7FC0), nearest)
        return nearest.astype("<u2").view(np.uint8).data
    with np.errstate(over="ignore"):
        half = values.reshape(-1).astype("<f2")
    if not np.array_equal(np.isfinite(half), np.isfinite(values.reshape(-1))):
        raise CheckpointError(f"{name} has values beyond the range of fp16; export with --dtype bf16 or fp32")
    return half.view(np.uint8).data


def _json(tree: Mapping[str, Any]) -> bytes:
    return (json.dumps(tree, indent=2) + "\n").encode()
