"""Folders of an object store or another file system, by whatever ``pyarrow.fs`` understands.

An upload to an object store appears when it is complete: a writer that is killed leaves parts that nobody can read,
which the store drops by itself if the bucket has a rule for them. Files are therefore written in their place there.
Other file systems (HDFS) rename at once, and get them written beside their place, as on a disk.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyarrow import fs

from rayformer.ckpt.storage import KEYS, Buffer, Folder, OpenFile, Target, without_keys
from rayformer.errors import CheckpointError, DamagedError

_REFUSALS = (OSError, pa.ArrowException)
NEAR_BYTES, SPAN_BYTES = 4 * 2**20, 64 * 2**20  # a gap not worth a request of its own; what one request reads at most
_STORES = {"s3", "gcs", "abfs"}  # objects, which appear when they are complete


class ArrowFolder(Folder):
    """A folder by its URI. Options after a ``?`` are pyarrow's, such as ``endpoint_override`` for S3."""

    def __init__(self, uri: str) -> None:
        address, mark, self._options = uri.partition("?")
        self._mark = mark
        self._address = address.rstrip("/")

    def __str__(self) -> str:
        return without_keys(self._address)

    def __repr__(self) -> str:
        return f"ArrowFolder({self})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ArrowFolder) and self._uri == other._uri

    def __hash__(self) -> int:
        return hash(self._uri)

    def __reduce__(self) -> tuple[Any, ...]:
        return ArrowFolder, (self._uri,)

    def __truediv__(self, name: str) -> ArrowFolder:
        return ArrowFolder(f"{self._address}/{name}{self._mark}{self._options}")

    @property
    def name(self) -> str:
        return self._address.rpartition("/")[2]

    @property
    def parent(self) -> ArrowFolder:
        return ArrowFolder(f"{self._address.rpartition('/')[0]}{self._mark}{self._options}")

    def names(self) -> list[str]:
        with self._told("listed"):
            found = self._system.get_file_info(fs.FileSelector(self._path, allow_not_found=True))
            if not found and self._system.type_name in _STORES and "allow_bucket_creation" not in self._options:
                self._check_bucket()
        return [info.base_name for info in found]

    def size(self, name: str) -> int | None:
        with self._told("looked at", name):
            info = self._system.get_file_info(self._at(name))
        return info.size if info.type == fs.FileType.File else None

    def read(self, name: str) -> bytes:
        with self._system.open_input_stream(self._at(name)) as file:
            content: bytes = file.read()
            return content

    @contextmanager
    def open(self, name: str) -> Iterator[OpenFile]:
        with self._system.open_input_file(self._at(name)) as file:
            yield _ArrowFile(f"{self}/{name}", file)

    def write(self, name: str, parts: Iterable[Buffer]) -> None:
        path = self._at(name)
        is_store = self._system.type_name in _STORES
        written = path if is_store else f"{path}.tmp"
        try:
            if not is_store:
                self._system.create_dir(self._path, recursive=True)
            with self._system.open_output_stream(written) as stream:
                for part in parts:
                    stream.write(pa.py_buffer(part))
            if not is_store:
                self._system.move(written, path)
        except BaseException as error:
            with suppress(OSError, pa.ArrowException):  # what came so far has become a file when the stream was closed
                self._system.delete_file(written)
            if not isinstance(error, _REFUSALS):
                raise
            raise CheckpointError(f"{self}/{name}: it can't be written ({_first_line(error)})") from None

    def rename(self, name: str, new: str) -> None:
        with self._told("renamed", name):
            self._system.move(self._at(name), self._at(new))

    def remove(self) -> None:
        with self._told("removed"), suppress(FileNotFoundError):
            self._system.delete_dir(self._path)

    def settle(self) -> None:
        """What a store has said to be complete is durable."""

    @property
    def _uri(self) -> str:
        return f"{self._address}{self._mark}{self._options}"

    @cached_property
    def _resolved(self) -> tuple[Any, str]:
        root = re.match(f"[^/]*({KEYS}|//)[^/]*", self._address)[0]  # type: ignore[index]
        with self._told("understood"):
            system, path = _file_system(f"{root}{self._mark}{self._options}")
        return system, path.rstrip("/") + self._address[len(root) :]

    @property
    def _system(self) -> Any:
        return self._resolved[0]

    @property
    def _path(self) -> str:
        return self._resolved[1]

    def _at(self, name: str) -> str:
        return f"{self._path}/{name}"

    def _check_bucket(self) -> None:
        bucket = self._path.partition("/")[0]
        if self._system.get_file_info(bucket).type == fs.FileType.NotFound:
            raise FileNotFoundError(f"there is no bucket {bucket!r}")

    @contextmanager
    def _told(self, done: str, name: str = "") -> Iterator[None]:
        try:
            yield
        except (*_REFUSALS, ValueError) as error:
            shown = f"{self}/{name}" if name else str(self)
            raise CheckpointError(f"{shown}: it can't be {done} ({_first_line(error)})") from None


class _ArrowFile:
    def __init__(self, shown: str, file: Any) -> None:
        self._shown, self._file = shown, file

    def read_rows(self, offset: int, step: int, rows: npt.NDArray[Any]) -> None:
        """A request takes longer than to read what lies between near rows."""
        length = rows[0].nbytes
        per_read = 1 if step - length > NEAR_BYTES else max(1, SPAN_BYTES // step)
        for first in range(0, len(rows), per_read):
            some = rows[first : first + per_read]
            span = np.empty((len(some) - 1) * step + length, dtype=np.uint8)
            self.read_into(offset + first * step, span)
            picked = np.lib.stride_tricks.as_strided(span, (len(some), length), (step, 1), writeable=False)
            some[...] = np.ascontiguousarray(picked).view(rows.dtype).reshape(some.shape)

    def read_into(self, offset: int, target: Target) -> None:
        target = memoryview(target).cast("B")
        size = self._file.size()
        if size < offset + len(target):
            raise DamagedError(f"{self._shown}: it ends at byte {size}, where more was written")
        target[:] = self._file.read_at(len(target), offset)


@lru_cache
def _file_system(root: str) -> tuple[Any, str]:
    found: tuple[Any, str] = fs.FileSystem.from_uri(root)
    return found


def _first_line(error: BaseException) -> str:
    return without_keys(str(error).splitlines()[0]) if str(error) else type(error).__name__
