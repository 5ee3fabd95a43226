"""A folder of Hugging Face weights in safetensors files, read in parts. Pickles are refused."""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from rayformer.ckpt.hf.config import Family, family_of, model_section
from rayformer.ckpt.hf.mapping import HFTensor, Part, hf_tensors
from rayformer.ckpt.reader import read_box
from rayformer.ckpt.storage import Folder, folder_at, is_plain_name, opened
from rayformer.ckpt.tensorfile import Entry, read_head
from rayformer.config.model import ModelConfig
from rayformer.errors import CheckpointError
from rayformer.shards import Box, Holding, plan_transfers

PREFIX = "hf:"  # of an address in a job
SIDE_FOLDER = "hf"  # beside checkpoints, what a Hugging Face model has besides its weights
CONFIG, INDEX, SINGLE = "config.json", "model.safetensors.index.json", "model.safetensors"
# What belongs to a model besides its weights, and is none of our business.
SIDE_FILES = (
    CONFIG, "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
    "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt", "tokenizer.model", "spiece.model",
    "chat_template.jinja", "chat_template.json",
)  # fmt: skip
_PICKLES = (".bin", ".pt", ".pth", ".ckpt")
_ROWS = 1024  # that are compared at once

_NO_PARAMETERS = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")  # constants that old files have

Array = npt.NDArray[np.float32]


class _Dtype(NamedTuple):
    ours: str
    numpy: str


_DTYPES = {"F32": _Dtype("fp32", "<f4"), "F16": _Dtype("fp16", "<f2"), "BF16": _Dtype("bf16", "<u2")}


class HFWeights:
    """The weights of one model as ``transformers`` keeps them.

    Raises CheckpointError for what it does not know, and unless the files have every tensor that the model has, in its
    shape, and no other.
    """

    def __init__(self, where: str | Path | Folder) -> None:
        self.folder = folder_at(where)
        self.config = read_json(self.folder, CONFIG)
        self.family: Family = family_of(self.config, where=f"{self.folder}/{CONFIG}")
        self.model = ModelConfig.model_validate(model_section(self.config, where=f"{self.folder}/{CONFIG}"))
        self._check_tensors()

    @property
    def dtype(self) -> str:
        """fp32, bf16 or fp16, whichever all tensors have; fp32, which holds all of them, if they differ."""
        found = {self._entries[self._name(tensor.name)].dtype for tensor in self._tensors}
        return _DTYPES[found.pop()].ours if len(found) == 1 else "fp32"

    def check_tied_head(self) -> None:
        """See that a head, which some files have though the model is tied, is the embedding."""
        if not self.model.tie_embeddings or "lm_head.weight" not in self._entries:
            return
        embedding = self._name(self._tensors[0].name)
        vocab, hidden = self._entries[embedding].shape
        for start in range(0, vocab, _ROWS):
            rows = Box(lo=(start, 0), hi=(min(vocab, start + _ROWS), hidden))
            if not np.array_equal(self._values(embedding, rows), self._values("lm_head.weight", rows)):
                raise CheckpointError(
                    f"{self.folder}: lm_head.weight differs from {embedding}, and {CONFIG} says that they are one; set"
                    " tie_word_embeddings to false"
                )

    def read(self, wanted: Iterable[tuple[str, Box, Array]]) -> None:
        """Fill each wanted array, a box of a parameter by our name, from the files."""
        targets = {(name, box): array for name, box, array in wanted}
        names = {name for name, _ in targets}
        if unknown := sorted(names - self.shapes.keys()):
            raise CheckpointError(f"{self.folder}: it holds no {unknown[0]}; is it of another model?")
        for transfer in plan_transfers((held for held in self._held if held.tensor in names), targets):
            theirs, part = transfer.source.place
            values = self._values(theirs, _theirs(part, transfer.part))
            target = targets[transfer.tensor, transfer.target]
            target[transfer.part.slices(transfer.target)] = values.T if part.is_transposed else values

    def _check_tensors(self) -> None:
        found = dict(self._entries)
        for tensor in self._tensors:
            entry = found.pop(self._name(tensor.name), None)
            if entry is None:
                raise CheckpointError(f"{self.folder}: there is no tensor {tensor.name}, which {CONFIG} asks for")
            if entry.shape != tensor.shape:
                raise CheckpointError(
                    f"{self.folder}: {tensor.name} has shape {list(entry.shape)}, and {CONFIG} asks for"
                    f" {list(tensor.shape)}"
                )
            if entry.dtype not in _DTYPES:
                raise CheckpointError(
                    f"{self.folder}: {tensor.name} is of {entry.dtype}; the dtypes are {', '.join(_DTYPES)}"
                )
        if self.model.tie_embeddings:
            found.pop("lm_head.weight", None)
        left = [name for name in found if not name.endswith(_NO_PARAMETERS)]
        if left:
            raise CheckpointError(f"{self.folder}: there is a tensor {left[0]}, which {CONFIG} does not ask for")

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The parameters of the model by our names."""
        shapes: dict[str, tuple[int, ...]] = {}
        for held in self._held:
            shapes[held.tensor] = tuple(map(max, held.box.hi, shapes.get(held.tensor, held.box.hi)))
        return shapes

    @cached_property
    def _tensors(self) -> list[HFTensor]:
        return hf_tensors(self.model, self.family)

    @cached_property
    def _held(self) -> list[Holding[tuple[str, Part]]]:
        return [
            Holding(tensor=part.ours, box=part.ours_box, place=(self._name(tensor.name), part))
            for tensor in self._tensors
            for part in tensor.parts
        ]

    def _name(self, name: str) -> str:
        """The name that the files have: those of GPT-2 itself leave the first part out."""
        short = name.removeprefix("transformer.")
        return short if name not in self._entries and short in self._entries else name

    @cached_property
    def _entries(self) -> dict[str, Entry]:
        names = self.folder.names()
        if INDEX in names:
            files = _files(self.folder)
        elif SINGLE in names:
            files = [SINGLE]
        elif pickles := sorted(name for name in names if name.endswith(_PICKLES)):
            raise CheckpointError(
                f"{self.folder}/{pickles[0]}: its weights are pickles, which are never read; save them as safetensors"
            )
        else:
            raise CheckpointError(f"{self.folder}: there is neither {SINGLE} nor {INDEX}")
        entries: dict[str, Entry] = {}
        for file in files:
            for name, entry in read_head(self.folder, file).items():
                if name in entries:
                    raise CheckpointError(f"{self.folder}: {name} is in {entries[name].file} and in {file}; keep one")
                entries[name] = entry
        return entries

    def _values(self, name: str, box: Box) -> Array:
        entry = self._entries[name]
        with opened(self.folder, entry.file) as file:
            values = read_box(file, entry.offset, entry.shape, box, _DTYPES[entry.dtype].numpy)
        if entry.dtype == "BF16":
            return (values.astype(np.uint32) << 16).view(np.float32)
        return values.astype(np.float32)


def read_json(folder: Folder, name: str) -> dict[str, Any]:
    """A JSON file. Raises CheckpointError if it is missing or no JSON object."""
    try:
        found = json.loads(folder.read(name).decode())
    except FileNotFoundError:
        raise CheckpointError(f"{folder}: there is no {name}; name the folder of a Hugging Face model") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{folder}/{name}: it can't be read ({error})") from None
    if not isinstance(found, dict):
        raise CheckpointError(f"{folder}/{name}: expected a JSON object, found {type(found).__name__}")
    return found


def side_config(directory: Folder) -> dict[str, Any]:
    """The config that came with the weights which the checkpoints in ``directory`` go back to; empty if none did."""
    side = directory / SIDE_FOLDER
    return read_json(side, CONFIG) if CONFIG in side.names() else {}


def _files(folder: Folder) -> list[str]:
    """The files that the index names."""
    names = read_json(folder, INDEX).get("weight_map")
    if not isinstance(names, dict) or not names or not all(isinstance(file, str) for file in names.values()):
        raise CheckpointError(f"{folder}/{INDEX}: its weight_map does not tell which file each tensor is in")
    files = sorted(set(names.values()))
    for file in files:
        if not is_plain_name(file):
            raise CheckpointError(f"{folder}/{INDEX}: {file!r} lies outside of the folder; refuse it")
    return files


def copy_side_files(source: Folder, target: Folder) -> None:
    """Copy what belongs to a model besides its weights."""
    there = set(source.names())
    for name in SIDE_FILES:
        if name in there:
            target.write(name, [source.read(name)])


def _theirs(part: Part, inner: Box) -> Box:
    """Where ``inner``, a box of our tensor, lies in theirs."""
    shift = [a - b for a, b in zip(inner.lo, part.ours_box.lo)]
    shape = list(inner.shape)
    if part.is_transposed:
        shift, shape = shift[::-1], shape[::-1]
    lo = tuple(a + b for a, b in zip(part.box.lo, shift))
    return Box(lo=lo, hi=tuple(a + n for a, n in zip(lo, shape)))
