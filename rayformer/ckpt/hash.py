"""The state hash: one number for a whole state, the same for every layout that holds it.

The sum modulo 2^64, over all elements of all tensors, of ``mix(mix(key ^ i) ^ u)``: key is xxh3_64 of the tensor's name
(``layers.0.mlp.down.weight@master``), i the row-major index in the global tensor, u the element's bits as an unsigned
integer, mix the finalizer of splitmix64. Cells hash the boxes they answer for, and the sum of their numbers is the
hash of the whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from rayformer.shards import Box

_CHUNK = 1 << 14  # elements: what is worked on stays in the second cache
_C1, _C2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_S1, _S2, _S3 = np.uint64(30), np.uint64(27), np.uint64(31)


def box_hash(tensor: str, box: Box, shape: Sequence[int], values: npt.NDArray[np.generic]) -> int:
    """The part of the hash that comes from ``values``, which fill ``box`` of the global ``tensor`` of ``shape``."""
    assert values.shape == box.shape, f"{values.shape} values for {box}"
    key = np.uint64(xxhash.xxh3_64_intdigest(tensor.encode()))
    bits = np.ascontiguousarray(values).reshape(-1).view(f"u{values.dtype.itemsize}")
    hasher = _Hasher(key)
    at = 0
    for start, length in _runs(box, shape):
        hasher.add(bits[at : at + length], start)
        at += length
    return hasher.total


class _Hasher:
    """Adds up runs of elements whose indexes follow each other, in memory that is used again and again.

    Short runs are gathered, so that numpy has something to do at a time.
    """

    def __init__(self, key: np.uint64) -> None:
        self._key = key
        self._index, self._mixed, self._spare = (np.empty(_CHUNK, dtype=np.uint64) for _ in range(3))
        self._bits = np.empty(_CHUNK, dtype=np.uint64)
        self._count = np.arange(_CHUNK, dtype=np.uint64)
        self._sum, self._filled = 0, 0

    def add(self, bits: npt.NDArray[np.unsignedinteger[Any]], start: int) -> None:
        """Add elements with the row-major indexes from ``start`` on."""
        while bits.size:
            num = min(bits.size, _CHUNK - self._filled)
            to = slice(self._filled, self._filled + num)
            np.add(self._count[:num], np.uint64(start), out=self._index[to])
            self._bits[to] = bits[:num]
            self._filled += num
            if self._filled == _CHUNK:
                self._flush()
            bits, start = bits[num:], start + num

    @property
    def total(self) -> int:
        self._flush()
        return self._sum % 2**64

    def _flush(self) -> None:
        filled = slice(0, self._filled)
        z, spare = self._mixed[filled], self._spare[filled]
        np.bitwise_xor(self._index[filled], self._key, out=z)
        _mix(z, spare)
        np.bitwise_xor(z, self._bits[filled], out=z)
        _mix(z, spare)
        self._sum += int(z.sum(dtype=np.uint64))
        self._filled = 0


def _runs(box: Box, shape: Sequence[int]) -> Iterator[tuple[int, int]]:
    """The runs of elements of ``box`` whose row-major indexes in a tensor of ``shape`` follow each other."""
    last = max((dim for dim, n in enumerate(shape) if box.shape[dim] != n), default=0)  # dims after it are whole
    strides = [prod(shape[dim + 1 :]) for dim in range(len(shape))]
    length = prod(box.shape[last:])
    if length == 0:
        return
    base = sum(lo * stride for lo, stride in zip(box.lo, strides))
    for at in np.ndindex(*box.shape[:last]):
        yield base + sum(i * stride for i, stride in zip(at, strides)), length


def shown(state_hash: int) -> str:
    """The hash as it is printed: 16 hex digits."""
    return f"{state_hash % 2**64:016x}"


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
