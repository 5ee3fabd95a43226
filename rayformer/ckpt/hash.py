"""The state hash: one number for a whole state, the same for every layout that holds it.

The sum modulo 2^64, over all elements of all tensors, of ``mix(mix(key ^ i) ^ u)``: key is xxh3_64 of the tensor's name
(``layers.0.mlp.down.weight@master``), i the row-major index in the global tensor, u the element's bits as an unsigned
integer, mix the finalizer of splitmix64. Cells hash the boxes they answer for, and the sum of their numbers is the
hash of the whole.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import xxhash

from rayformer.shards import Box

_CHUNK = 1 << 20


def box_hash(tensor: str, box: Box, shape: Sequence[int], values: npt.NDArray[np.generic]) -> int:
    """The part of the hash that comes from ``values``, which fill ``box`` of the global ``tensor`` of ``shape``."""
    assert values.shape == box.shape, f"{values.shape} values for {box}"
    key = np.uint64(xxhash.xxh3_64_intdigest(tensor.encode()))
    index = np.zeros((1,) * len(shape), dtype=np.uint64)
    stride = 1
    for dim in reversed(range(len(shape))):
        steps = np.arange(box.lo[dim], box.hi[dim], dtype=np.uint64) * np.uint64(stride)
        index = index + steps.reshape([-1 if d == dim else 1 for d in range(len(shape))])
        stride *= shape[dim]
    flat_index = np.broadcast_to(index, box.shape).reshape(-1)
    bits = np.ascontiguousarray(values).reshape(-1).view(f"u{values.dtype.itemsize}")
    total = 0
    for start in range(0, bits.size, _CHUNK):
        chunk = slice(start, start + _CHUNK)
        mixed = _mix(_mix(flat_index[chunk] ^ key) ^ bits[chunk].astype(np.uint64))
        total += int(mixed.sum(dtype=np.uint64))
    return total % 2**64


def shown(state_hash: int) -> str:
    """The hash as it is printed: 16 hex digits."""
    return f"{state_hash % 2**64:016x}"


def _mix(z: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
