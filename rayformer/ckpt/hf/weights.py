"""A folder of Hugging Face weights in safetensors files, read in parts. Pickles are refused."""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from rayformer.ckpt.hf.config import Family, family_of, model_section
from rayformer.ckpt.hf.mapping import Part, hf_tensors
from rayformer.ckpt.reader import read_box
from rayformer.ckpt.storage import Folder, folder_at
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
_DTYPES = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}
_NO_PARAMETERS = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")  # constants that old files have

Array = npt.NDArray[np.float32]


class HFWeights:
    """The weights of one model as ``transformers`` keeps them. Raises CheckpointError for what it does not know."""

    def __init__(self, where: str | Path | Folder) -> None:
        self.folder = folder_at(where)
        self.config = read_json(self.folder, CONFIG)
        self.family: Family = family_of(self.config, where=f"{self.folder}/{CONFIG}")
        self.model = ModelConfig.model_validate(model_section(self.config, where=f"{self.folder}/{CONFIG}"))

    def check(self) -> None:
        """See that there is every tensor that the model has, in its shape, and no other."""
        found = dict(self._entries)
        for tensor in hf_tensors(self.model, self.family):
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

    def read(self, wanted: Iterable[tuple[str, Box, Array]]) -> None:
        """Fill each wanted array, a box of a parameter by our name, from the files."""
        targets = {(name, box): array for name, box, array in wanted}
        names = {name for name, _ in targets}
        for transfer in plan_transfers((held for held in self._held if held.tensor in names), targets):
            theirs, part = transfer.source.place
            inner = transfer.part
            box = _theirs(part, inner)
            values = self._values(theirs, box)
            target = targets[transfer.tensor, transfer.target]
            target[inner.slices(transfer.target)] = values.T if part.is_transposed else values

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The parameters of the model by our names."""
        shapes: dict[str, tuple[int, ...]] = {}
        for held in self._held:
            shapes[held.tensor] = tuple(map(max, held.box.hi, shapes.get(held.tensor, held.box.hi)))
        return shapes

    @cached_property
    def _held(self) -> list[Holding[tuple[str, Part]]]:
        return [
            Holding(tensor=part.ours, box=part.ours_box, place=(self._name(tensor.name), part))
            for tensor in hf_tensors(self.model, self.family)
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
            files = sorted(set(read_json(self.folder, INDEX).get("weight_map", {}).values()))
        elif SINGLE in names:
            files = [SINGLE]
        elif any(name.endswith(_PICKLES) for name in names):
            raise CheckpointError(
                f"{self.folder}: its weights are pickles, which are never read; save them as safetensors"
            )
        else:
            raise CheckpointError(f"{self.folder}: there is neither {SINGLE} nor {INDEX}")
        entries: dict[str, Entry] = {}
        for file in files:
            if "/" in file:
                raise CheckpointError(f"{self.folder}/{INDEX}: {file!r} lies outside of the folder; refuse it")
            entries |= read_head(self.folder, file)
        return entries

    def _values(self, name: str, box: Box) -> Array:
        entry = self._entries[name]
        with self.folder.open(entry.file) as file:
            values = read_box(file, entry.offset, entry.shape, box, _DTYPES[entry.dtype])
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
