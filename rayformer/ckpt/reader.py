"""Reading a checkpoint into whatever boxes a cell wants: only the bytes that these need, each file once from the front.

A shard that is wanted whole is compared with its checksum. Of one that is wanted in part only that part is read, which
no checksum covers: whoever loads compares the state hash of the whole afterwards, and ``find_damage`` names the file.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from rayformer.ckpt.manifest import Manifest, ShardRecord
from rayformer.ckpt.storage import Folder, LocalFolder, OpenFile, folder_at, opened
from rayformer.errors import CheckpointError, DamagedError
from rayformer.shards import Box, CoverageError, Holding, Transfer, plan_transfers, whole

Array = npt.NDArray[np.float32]
NEAR_BYTES = 512  # a gap that is cheaper to read than to skip
STORE_THREADS = 8  # of an object store, one read takes its time, and many at once do not take longer


class Source:
    """A checkpoint that is read from, one time or many."""

    def __init__(self, folder: Path | Folder, manifest: Manifest) -> None:
        self._folder = folder_at(folder)
        self._held: defaultdict[str, list[Holding[ShardRecord]]] = defaultdict(list)
        for holding in manifest.holdings():
            self._held[holding.tensor].append(holding)
        self._verified = lru_cache(maxsize=8)(lambda shard: read_shard(self._folder, shard))

    def read(self, wanted: Iterable[tuple[str, Box, Array]], *, verify: bool = False) -> int:
        """Fill each wanted array, which is a box of a tensor; the bytes that were read.

        With ``verify`` shards are read whole even where a part is wanted, and compared with their checksums. Raises
        CheckpointError naming the tensor if it is not held or not held whole, and the file if its bytes changed.
        """
        targets = {(tensor, box): array for tensor, box, array in wanted}
        by_file: defaultdict[str, list[Transfer[ShardRecord]]] = defaultdict(list)
        for transfer in self._plan(targets):
            by_file[transfer.source.place.file].append(transfer)

        def read(file: str) -> int:
            transfers = sorted(by_file[file], key=lambda t: t.source.place.offset)
            if verify:
                return sum(self._copy(t, targets[t.tensor, t.target]) for t in transfers)
            with opened(self._folder, file) as source:
                return sum(_read(self._folder, source, t, targets[t.tensor, t.target]) for t in transfers)

        if isinstance(self._folder, LocalFolder) or verify:
            return sum(map(read, by_file))
        with ThreadPoolExecutor(STORE_THREADS) as pool:
            return sum(pool.map(read, by_file))

    def _plan(self, targets: Iterable[tuple[str, Box]]) -> Iterator[Transfer[ShardRecord]]:
        for tensor, box in targets:
            if tensor not in self._held:
                raise CheckpointError(f"{self._folder}: it holds no {tensor}; is it of another model?")
            try:
                yield from plan_transfers(self._held[tensor], [(tensor, box)])
            except CoverageError as error:
                raise CheckpointError(f"{self._folder}: {error}") from None

    def _copy(self, transfer: Transfer[ShardRecord], target: Array) -> int:
        values = self._verified(transfer.source.place)
        part = transfer.part
        target[part.slices(transfer.target)] = values[part.slices(transfer.source.box)]
        return 4 * part.numel


def read_boxes(folder: Path | Folder, manifest: Manifest, wanted: Iterable[tuple[str, Box, Array]]) -> int:
    """Fill arrays from the checkpoint in ``folder`` as ``Source.read`` does."""
    return Source(folder, manifest).read(wanted)


def read_box(file: OpenFile, offset: int, shape: Sequence[int], box: Box, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """The part ``box`` of a row-major tensor of ``shape`` that starts at ``offset`` of a file."""
    values = np.empty(box.shape, dtype=dtype)
    for rows in _rows(whole(shape), box):
        _read_rows(file, offset, rows, _view(values, rows.at))
    return values


def read_shard(folder: Path | Folder, shard: ShardRecord) -> Array:
    """All of one shard, verified. Raises DamagedError if it is not what was written."""
    folder = folder_at(folder)
    values = np.empty(shard.box.shape, dtype="<f4")
    with opened(folder, shard.file) as source:
        _read_whole(folder, source, shard, values)
    return values


def find_damage(folder: Path | Folder, shards: Iterable[ShardRecord]) -> str | None:
    """Read ``shards`` whole: what is wrong with the first one that is not what was written."""
    try:
        for shard in shards:
            read_shard(folder, shard)
    except CheckpointError as error:
        return str(error)
    return None


def _read(folder: Folder, file: OpenFile, transfer: Transfer[ShardRecord], target: Array) -> int:
    """Copy the part of one shard that a wanted box needs to its place; the bytes read."""
    shard, part = transfer.source.place, transfer.part
    into = _view(target, part.slices(transfer.target))
    if part == shard.box and into.flags.c_contiguous:
        _read_whole(folder, file, shard, into)
        return shard.num_bytes
    if part == shard.box:
        values = np.empty(part.shape, dtype="<f4")
        _read_whole(folder, file, shard, values)
        into[...] = values
        return shard.num_bytes
    return sum(_read_rows(file, shard.offset, rows, _view(into, rows.at)) for rows in _rows(shard.box, part))


def _view(values: Array, at: Sequence[int | slice]) -> Array:
    """The part of ``values`` at ``at``, a view even where that is a single element."""
    place: Any = (*at, ...)
    view: Array = values[place]
    return view


@dataclass(frozen=True, kw_only=True)
class _Rows:
    """Equal runs of a shard at equal distances: ``at`` is where they go, the rest counts elements of the shard."""

    at: tuple[int, ...]
    start: int
    count: int
    length: int
    stride: int


def _rows(held: Box, part: Box) -> Iterator[_Rows]:
    """The runs of memory in which ``part`` of the row-major ``held`` lies."""
    shape = held.shape
    last = max((d for d, n in enumerate(shape) if part.shape[d] != n), default=0)  # dims after it are whole
    length = prod(part.shape[last:])
    if last == 0:
        yield _Rows(at=(), start=_flat(held, part.lo), count=1, length=length, stride=0)
        return
    for at in np.ndindex(*part.shape[: last - 1]):
        corner = (*(lo + i for lo, i in zip(part.lo, at)), *part.lo[last - 1 :])
        yield _Rows(
            at=at,
            start=_flat(held, corner),
            count=part.shape[last - 1],
            length=length,
            stride=prod(shape[last:]),
        )


def _read_rows(file: OpenFile, offset: int, rows: _Rows, into: npt.NDArray[Any]) -> int:
    """Read runs of a tensor at ``offset`` into ``into``, whose first dim counts them if they are several; the bytes."""
    item, dtype = into.itemsize, into.dtype
    if rows.count > 1 and item * (rows.stride - rows.length) < NEAR_BYTES:
        span = np.empty((rows.count - 1) * rows.stride + rows.length, dtype=dtype)
        file.read_into(offset + item * rows.start, span)
        strides = item * rows.stride, item
        runs = np.lib.stride_tricks.as_strided(span, (rows.count, rows.length), strides, writeable=False)
        into[...] = runs.reshape(into.shape)
        return span.nbytes
    each = into if rows.stride else into[None]
    if each[0].flags.c_contiguous:
        file.read_rows(offset + item * rows.start, item * rows.stride, each)
    else:
        values = np.empty((rows.count, rows.length), dtype=dtype)
        file.read_rows(offset + item * rows.start, item * rows.stride, values)
        each[...] = values.reshape(each.shape)
    return item * rows.count * rows.length


def _flat(held: Box, at: tuple[int, ...]) -> int:
    flat = 0
    for n, lo, i in zip(held.shape, held.lo, at):
        flat = flat * n + i - lo
    return flat


def _read_whole(folder: Folder, file: OpenFile, shard: ShardRecord, into: Array) -> None:
    try:
        file.read_into(shard.offset, into)
    except DamagedError as error:
        raise DamagedError(f"{error}: {shard.tensor} {shard.box} is not whole; use an older checkpoint") from None
    if xxhash.xxh3_64_hexdigest(_bytes(into)) != shard.xxh3:
        raise DamagedError(
            f"{folder}/{shard.file}: the {shard.num_bytes} bytes at {shard.offset}, which are {shard.tensor}"
            f" {shard.box}, are not those that were written; use an older checkpoint"
        )


def _bytes(array: npt.NDArray[Any]) -> memoryview:
    return array.reshape(-1).view(np.uint8).data
