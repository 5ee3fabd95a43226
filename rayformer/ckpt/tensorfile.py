"""The head of a safetensors file, written before and read without what follows it, so that both are streamed.

The format: eight bytes with the length of the head, little-endian; the head, a JSON object of tensors with dtype, shape
and where their bytes lie after it; the bytes. Source: https://github.com/huggingface/safetensors
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from operator import index
from typing import Any

from rayformer.ckpt.storage import Folder
from rayformer.errors import DamagedError

WIDTHS = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One tensor of a file; ``offset`` counts from the beginning of the file."""

    file: str
    dtype: str
    shape: tuple[int, ...]
    offset: int


def make_head(
    tensors: Iterable[tuple[str, str, tuple[int, ...]]], metadata: Mapping[str, str] | None = None
) -> tuple[bytes, list[int]]:
    """The head of a file with tensors of these names, dtypes and shapes, and where in the file each starts."""
    entries: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    starts, at = [], 0
    for name, dtype, shape in tensors:
        num_bytes = WIDTHS[dtype] * prod(shape)
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + num_bytes]}
        starts.append(at)
        at += num_bytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, [8 + len(text) + start for start in starts]


def read_head(folder: Folder, file: str) -> dict[str, Entry]:
    """The tensors of a file. Raises DamagedError if it is missing, ends too early, or is no safetensors file."""
    size = folder.size(file)
    if size is None:
        raise DamagedError(f"{folder}/{file}: it is missing")
    if size < 8:
        raise DamagedError(f"{folder}/{file}: it has {size} bytes: no safetensors file")
    with folder.open(file) as opened:
        length = bytearray(8)
        opened.read_into(0, memoryview(length))
        num = int.from_bytes(length, "little")
        if num > size - 8:
            raise DamagedError(f"{folder}/{file}: its head says {num} bytes and it has {size}: no safetensors file")
        text = bytearray(num)
        opened.read_into(8, memoryview(text))
    entries: dict[str, Entry] = {}
    try:
        for name, told in json.loads(text).items():
            if name == "__metadata__":
                continue
            start, stop = map(index, told["data_offsets"])
            entry = Entry(
                file=file, dtype=told["dtype"], shape=tuple(map(index, told["shape"])), offset=8 + num + start
            )
            if stop - start != WIDTHS.get(entry.dtype, 1) * prod(entry.shape) and entry.dtype in WIDTHS:
                raise DamagedError(f"{folder}/{file}: {name} has not the bytes of {entry.dtype} {list(entry.shape)}")
            if min(start, *entry.shape, 0) < 0:
                raise DamagedError(f"{folder}/{file}: {name} has a shape or a place below 0")
            if 8 + num + stop > size:
                raise DamagedError(f"{folder}/{file}: it ends at byte {size}, before {name} does")
            entries[name] = entry
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise DamagedError(f"{folder}/{file}: its head is no JSON of tensors: no safetensors file") from None
    return entries
