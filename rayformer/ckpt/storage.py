"""Folders that checkpoints lie in, on this machine or wherever a URI says; a file is written whole or not at all.

On a file system a file is written beside its place, made durable and renamed. An object store has no rename, but an
upload appears when it is complete, and one that was broken off never does (``remote.py``). Nothing else is asked of
either, so that both commit alike: first the data, last the manifest, which alone makes a checkpoint of them.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import stat
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import unquote, urlsplit

import numpy.typing as npt

from rayformer.errors import CheckpointError, DamagedError

Buffer = bytes | memoryview
Target = Any  # contiguous memory that can be written: an array, a bytearray, a memoryview
KEYS = r"//(?:[^/?@:\s]*:[^?@\s]*|[^/?@\s]*)@"  # of a URI; a secret key may have slashes in it
MANY_ROWS = 256  # of which reading is left to a compiled loop
_HERE = "file://"


class OpenFile(Protocol):
    """A file that is being read."""

    def read_into(self, offset: int, target: Target) -> None:
        """Fill ``target`` with the bytes from ``offset`` on. Raises DamagedError if the file ends before."""

    def read_rows(self, offset: int, step: int, rows: npt.NDArray[Any]) -> None:
        """Fill ``rows``, each of which is contiguous, with the bytes at ``offset`` and at every ``step`` from there."""


class Folder(ABC):
    """A folder by its address, which ``str`` gives. Making the object touches nothing.

    What the storage refuses comes as CheckpointError, but from ``read`` and ``open``, whose callers tell a file that is
    missing from one that can't be read.
    """

    @property
    @abstractmethod
    def name(self) -> str:
        """The last part of the address."""

    @property
    @abstractmethod
    def parent(self) -> Folder:
        """The folder that this one is in."""

    @abstractmethod
    def __truediv__(self, name: str) -> Folder:
        """The folder ``name`` in this one."""

    @abstractmethod
    def names(self) -> list[str]:
        """What is in it, in no order; nothing if it does not exist."""

    @abstractmethod
    def size(self, name: str) -> int | None:
        """The bytes of a file; None if there is none."""

    @abstractmethod
    def read(self, name: str) -> bytes:
        """All of a file. Raises FileNotFoundError, or another OSError."""

    @abstractmethod
    def open(self, name: str) -> AbstractContextManager[OpenFile]:
        """Read parts of a file. Raises FileNotFoundError, or another OSError."""

    @abstractmethod
    def write(self, name: str, parts: Iterable[Buffer]) -> None:
        """Write a file, durably; it has its name only when it is whole. The folder is made if need be.

        Raises CheckpointError that tells what the storage said, and leaves nothing behind.
        """

    @abstractmethod
    def rename(self, name: str, new: str) -> None:
        """Give a file another name."""

    @abstractmethod
    def remove(self) -> None:
        """Drop the folder and what is in it, if there is one."""

    @abstractmethod
    def settle(self) -> None:
        """Make the names in it durable."""


class Disk:
    """The calls that write to a file system, one by one, so that each can be made to fail."""

    def make(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)

    def open(self, path: Path) -> int:
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)

    def write(self, descriptor: int, part: memoryview) -> int:
        return os.write(descriptor, part)

    def sync(self, descriptor: int) -> None:
        os.fsync(descriptor)

    def close(self, descriptor: int) -> None:
        os.close(descriptor)

    def replace(self, path: Path, target: Path) -> None:
        os.replace(path, target)

    def sync_folder(self, folder: Path) -> None:
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def remove(self, path: Path) -> None:
        path.unlink()

    def remove_folder(self, folder: Path) -> None:
        shutil.rmtree(folder)


DISK = Disk()


class LocalFolder(Folder):
    """A folder of a file system that is mounted here."""

    def __init__(self, path: Path, disk: Disk = DISK) -> None:
        self.path, self._disk = path, disk

    def __str__(self) -> str:
        return str(self.path)

    def __repr__(self) -> str:
        return f"LocalFolder({self.path})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LocalFolder) and self.path == other.path

    def __hash__(self) -> int:
        return hash(self.path)

    def __truediv__(self, name: str) -> LocalFolder:
        return LocalFolder(self.path / name, self._disk)

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def parent(self) -> LocalFolder:
        return LocalFolder(self.path.parent, self._disk)

    def names(self) -> list[str]:
        with _told(self.path, "listed"), suppress(FileNotFoundError, NotADirectoryError):
            return os.listdir(self.path)
        return []

    def size(self, name: str) -> int | None:
        path = self.path / name
        with _told(path, "looked at"), suppress(FileNotFoundError, NotADirectoryError):
            found = path.stat()
            return found.st_size if stat.S_ISREG(found.st_mode) else None
        return None

    def read(self, name: str) -> bytes:
        return (self.path / name).read_bytes()

    @contextmanager
    def open(self, name: str) -> Iterator[OpenFile]:
        descriptor = os.open(self.path / name, os.O_RDONLY)
        try:
            yield _LocalFile(self.path / name, descriptor)
        finally:
            os.close(descriptor)

    def write(self, name: str, parts: Iterable[Buffer]) -> None:
        path, disk = self.path / name, self._disk
        temporary = path.with_name(f"{name}.tmp")
        try:
            disk.make(self.path)
            descriptor = disk.open(temporary)
            try:
                for part in parts:
                    _write_all(disk, descriptor, memoryview(part).cast("B"))
                disk.sync(descriptor)
            finally:
                disk.close(descriptor)
            disk.replace(temporary, path)
        except BaseException as error:
            with suppress(OSError):
                disk.remove(temporary)
            if not isinstance(error, OSError):
                raise
            said = error.strerror or error
            raise CheckpointError(f"{path}: it can't be written ({said}); {_room(self.path)}") from None

    def rename(self, name: str, new: str) -> None:
        with _told(self.path / name, "renamed"):
            self._disk.replace(self.path / name, self.path / new)

    def remove(self) -> None:
        with _told(self.path, "removed"), suppress(FileNotFoundError):
            self._disk.remove_folder(self.path)

    def settle(self) -> None:
        with _told(self.path, "made durable"):
            self._disk.sync_folder(self.path)


class _LocalFile:
    def __init__(self, path: Path, descriptor: int) -> None:
        self._path, self._descriptor = path, descriptor

    def read_rows(self, offset: int, step: int, rows: npt.NDArray[Any]) -> None:
        done = 0
        if len(rows) >= MANY_ROWS:
            from rayformer.ckpt.compiled import read_rows

            address, length = rows.ctypes.data, rows[0].nbytes
            done = read_rows(self._descriptor, offset, step, address, rows.strides[0], length, len(rows))
        for i in range(done, len(rows)):
            self.read_into(offset + i * step, rows[i : i + 1])

    def read_into(self, offset: int, target: Target) -> None:
        num = os.preadv(self._descriptor, [target], offset)
        left = memoryview(target)
        if num == left.nbytes:  # there may be many short reads
            return
        left = left.cast("B")
        while left := left[num:]:
            if num == 0:
                raise DamagedError(f"{self._path}: it ends at byte {offset}, where more was written")
            offset += num
            num = os.preadv(self._descriptor, [left], offset)


def folder_at(where: str | Path | Folder) -> Folder:
    """The folder that ``where`` names: a path, or a URI such as ``s3://bucket/runs``.

    Raises CheckpointError for a URI that no file system here understands.
    """
    if isinstance(where, Folder):
        return where
    if is_uri(where):
        from rayformer.ckpt.remote import ArrowFolder  # pyarrow takes its time to import

        return ArrowFolder(str(where))
    if str(where).startswith(_HERE):
        return LocalFolder(_path_of(str(where)))
    return LocalFolder(Path(where).expanduser().absolute())


def without_keys(where: str) -> str:
    """``where``, or a message, without the name and the password that a URI may have in it."""
    return re.sub(KEYS, "//", where)


def is_uri(where: str | Path) -> bool:
    """Whether ``where`` is an address elsewhere; ``file:`` is here."""
    return "://" in str(where) and not str(where).startswith(_HERE)


@contextmanager
def opened(folder: Folder, name: str) -> Iterator[OpenFile]:
    """Read parts of a file; what the storage says against it comes as CheckpointError."""
    try:
        with folder.open(name) as file:
            yield file
    except FileNotFoundError:
        raise DamagedError(f"{folder}/{name}: it is missing; use an older checkpoint") from None
    except OSError as error:
        said = error.strerror or error
        raise CheckpointError(f"{folder}/{name}: it can't be read ({said}); use an older checkpoint") from None


def is_plain_name(file: str) -> bool:
    """Whether ``file`` is the name of something in a folder, and leads nowhere else."""
    return file not in ("", ".", "..") and not set(file) & {"/", "\\", "\0"}


def _path_of(uri: str) -> Path:
    """The path of a URI that begins with ``file://``. Raises CheckpointError if it names another machine."""
    parts = urlsplit(uri)
    if parts.netloc not in ("", "localhost"):
        raise CheckpointError(f"{uri}: files of {parts.netloc!r} can't be reached from here; write file:///PATH")
    return Path(unquote(parts.path)).absolute()


@contextmanager
def _told(path: Path, done: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        room = f"; {_room(path.parent)}" if error.errno == errno.ENOSPC else ""
        raise CheckpointError(f"{path}: it can't be {done} ({error.strerror or error}){room}") from None


def _write_all(disk: Disk, descriptor: int, part: memoryview) -> None:
    while part:
        part = part[disk.write(descriptor, part) :]


def _room(folder: Path) -> str:
    nearest = next(path for path in (folder, *folder.parents) if os.path.exists(path))
    usage = shutil.disk_usage(nearest)
    return f"{usage.free / 2**20:.0f} MiB of {usage.total / 2**20:.0f} MiB are free in {nearest}"
