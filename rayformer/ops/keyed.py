"""Keyed randomness: every draw is a pure function of a key and a place, so no layout changes it.

The element with row-major index i of a global tensor is element i mod 1024 of block i // 1024. Block k of the tensor
``name`` under ``seed`` is 1024 standard normal float32 numbers of numpy's ziggurat over Philox4x64-10 with

    key      [seed, xxh3_64(name)]
    counter  [0, k, 0, 0]

so a block needs no other block, and a shard draws the blocks that it touches.
"""

from __future__ import annotations

from math import prod

import numpy as np
import xxhash

from rayformer.shards import Box

BLOCK = 1024


def normal_box(box: Box, shape: tuple[int, ...], *, seed: int, name: str) -> np.ndarray:
    """The standard normal numbers, float32, that fill ``box`` of the global tensor ``name`` of ``shape``."""
    row = prod(shape[1:])
    first, last = box.lo[0], box.hi[0]
    rows = normal_range(first * row, last * row, seed=seed, name=name).reshape(last - first, *shape[1:])
    return rows[(slice(None), *(slice(lo, hi) for lo, hi in zip(box.lo[1:], box.hi[1:])))]


def normal_range(start: int, stop: int, *, seed: int, name: str) -> np.ndarray:
    """The numbers with row-major indices ``start`` up to ``stop``."""
    first, last = start // BLOCK, -(-stop // BLOCK)
    out = np.empty((last - first) * BLOCK, dtype=np.float32)
    key = np.array([seed, xxhash.xxh3_64_intdigest(name.encode())], dtype=np.uint64)
    for block in range(first, last):
        bits = np.random.Philox(key=key, counter=[0, block, 0, 0])
        at = (block - first) * BLOCK
        np.random.Generator(bits).standard_normal(dtype=np.float32, out=out[at : at + BLOCK])
    return out[start - first * BLOCK : stop - first * BLOCK]
