"""The state hash: one number for a whole state, the same for every layout that holds it.

The sum modulo 2^64, over all elements of all tensors, of ``mix(mix(key ^ i) ^ u)``: key is xxh3_64 of the tensor's name
(``layers.0.mlp.down.weight@master``), i the row-major index in the global tensor, u the element's bits as an unsigned
integer, mix the finalizer of splitmix64. Cells hash the boxes they answer for, and the sum of their numbers is the
hash of the whole.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from rayformer.shards import Box

_CHUNK = 1 << 14  # elements: what numpy works on at a time stays in the second cache
_MANY = 1 << 18  # elements of a box from which on it pays to load the compiled loop
_C1, _C2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_S1, _S2, _S3 = np.uint64(30), np.uint64(27), np.uint64(31)

Bits = npt.NDArray[np.unsignedinteger[Any]]


def box_hash(tensor: str, box: Box, shape: Sequence[int], values: npt.NDArray[np.generic]) -> int:
    """The part of the hash that comes from ``values``, which fill ``box`` of the global ``tensor`` of ``shape``."""
    assert values.shape == box.shape, f"{values.shape} values for {box}"
    if values.size == 0:
        return 0
    key = np.uint64(xxhash.xxh3_64_intdigest(tensor.encode()))
    bits = np.ascontiguousarray(values).reshape(-1).view(f"u{values.dtype.itemsize}")
    sum_rows = _sum_compiled if bits.size >= _MANY or "rayformer.ckpt.compiled" in sys.modules else _sum_rows
    return sum(sum_rows(key, start, stride, rows) for start, stride, rows in _runs(box, shape, bits)) % 2**64


def shown(state_hash: int) -> str:
    """The hash as it is printed: 16 hex digits."""
    return f"{state_hash % 2**64:016x}"


def _runs(box: Box, shape: Sequence[int], bits: Bits) -> Iterator[tuple[int, int, Bits]]:
    """The elements of ``box`` as rows: the row-major index of the first in a tensor of ``shape``, how far one row is
    from the next, and the rows, in each of which the indexes follow each other.
    """
    last = max((dim for dim, n in enumerate(shape) if box.shape[dim] != n), default=0)  # dims after it are whole
    strides = [prod(shape[dim + 1 :]) for dim in range(len(shape))]
    base = sum(lo * stride for lo, stride in zip(box.lo, strides))
    length = prod(box.shape[last:])
    if last == 0:
        yield base, 0, bits.reshape(1, -1)
        return
    blocks = bits.reshape(-1, box.shape[last - 1], length)
    for block, at in zip(blocks, np.ndindex(*box.shape[: last - 1])):
        yield base + sum(i * stride for i, stride in zip(at, strides)), strides[last - 1], block


def _sum_compiled(key: np.uint64, start: int, stride: int, bits: Bits) -> int:
    from rayformer.ckpt.compiled import sum_rows

    return int(sum_rows(key, np.uint64(start), np.uint64(stride), bits))


def _sum_rows(key: np.uint64, start: int, stride: int, bits: Bits) -> int:
    """The sum over ``bits`` [rows, elements]; row r has the indexes from ``start + r * stride`` on."""
    total = 0
    per_chunk = max(1, _CHUNK // bits.shape[1])
    for row in range(0, bits.shape[0], per_chunk):
        some = bits[row : row + per_chunk]
        first = np.arange(row, row + len(some), dtype=np.uint64) * np.uint64(stride) + np.uint64(start)
        for at in range(0, bits.shape[1], _CHUNK):
            part = some[:, at : at + _CHUNK]
            z = first[:, None] + np.arange(at, at + part.shape[1], dtype=np.uint64)
            spare = np.empty_like(z)
            np.bitwise_xor(z, key, out=z)
            _mix(z, spare)
            np.bitwise_xor(z, part, out=z)
            _mix(z, spare)
            total += int(z.sum(dtype=np.uint64))
    return total


def _mix(z: npt.NDArray[np.uint64], spare: npt.NDArray[np.uint64]) -> None:
    """The finalizer of splitmix64, in place."""
    np.right_shift(z, _S1, out=spare)
    np.bitwise_xor(z, spare, out=z)
    np.multiply(z, _C1, out=z)
    np.right_shift(z, _S2, out=spare)
    np.bitwise_xor(z, spare, out=z)
    np.multiply(z, _C2, out=z)
    np.right_shift(z, _S3, out=spare)
    np.bitwise_xor(z, spare, out=z)
