"""The two loops that run over all bytes of a large state, compiled: the sum of its hash, and reading rows of a file.

The sum is some ten times as fast as numpy's twenty passes (see ``hash.py``), and a row costs half of what it costs in
Python. They take a second to load, so that whoever has little to do does without them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit, types

_C1, _C2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_S1, _S2, _S3 = np.uint64(30), np.uint64(27), np.uint64(31)


def _sum_rows(key: Any, start: Any, stride: Any, bits: Any) -> Any:
    total = np.uint64(0)
    for row in range(bits.shape[0]):
        first = start + np.uint64(row) * stride
        for i in range(bits.shape[1]):
            z = (first + np.uint64(i)) ^ key
            z = (z ^ (z >> _S1)) * _C1
            z = (z ^ (z >> _S2)) * _C2
            z = (z ^ (z >> _S3)) ^ np.uint64(bits[row, i])
            z = (z ^ (z >> _S1)) * _C1
            z = (z ^ (z >> _S2)) * _C2
            total += z ^ (z >> _S3)
    return total


def _read_rows(descriptor: Any, offset: Any, step: Any, address: Any, stride: Any, length: Any, count: Any) -> Any:
    for row in range(count):
        if _pread(descriptor, address + row * stride, length, offset + row * step) != length:
            return row
    return count


def _compiled(function: Any) -> Any:
    try:
        return njit(nogil=True, cache=True)(function)
    except RuntimeError:  # nowhere to keep what was compiled
        return njit(nogil=True)(function)


# The C library's: ssize_t pread(int, void *, size_t, off_t).
_pread = types.ExternalFunction("pread", types.int64(types.int32, types.intp, types.uint64, types.int64))
sum_rows = _compiled(_sum_rows)
# Rows of a file at distances of ``step`` into memory at distances of ``stride``; how many were read before one was not.
read_rows = _compiled(_read_rows)
