"""Text files become a .bin/.idx pair, one document a file."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from pathlib import Path

from rayformer.data.indexed import IndexedWriter, optimal_dtype
from rayformer.data.tokenizers import ByteTokenizer
from rayformer.errors import DataError

_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Summary:
    """What a preprocessing wrote."""

    num_documents: int
    num_tokens: int
    prefix: Path


@dataclass(frozen=True, kw_only=True)
class TextFile:
    """A regular file below a folder; `name` is its path relative to that folder, with forward slashes."""

    path: Path
    name: str
    num_bytes: int


def preprocess(
    inputs: Sequence[Path], prefix: Path, tokenizer: ByteTokenizer, *, suffixes: Sequence[str] | None = None
) -> Summary:
    """Write every file of inputs, and of the folders among them, as one document ended by eod.

    Inputs are taken in the order given, a folder's files by `list_files`. `suffixes` (such as ".txt") chooses among
    the files of folders; a file given by name is always taken. Memory stays below a few MB, whatever the size of the
    files. Raises DataError for a file that can't be read, for a folder without a file to take and for no input at all.
    """
    paths = [path for given in inputs for path in _paths(Path(given), suffixes)]
    if not paths:
        raise DataError(f"{prefix}: no input files were given; name at least one file or folder")
    with IndexedWriter(prefix, optimal_dtype(tokenizer.vocab_size)) as writer:
        for path in paths:
            # A byte tokenizer sees no context, so a file may be cut anywhere.
            for chunk in _chunks(path):
                writer.append(tokenizer.encode(chunk))
            writer.append([tokenizer.eod])
            writer.end_sequence()
            writer.end_document()
    return Summary(num_documents=writer.num_documents, num_tokens=writer.num_tokens, prefix=Path(prefix))


def list_files(
    folder: Path, *, suffixes: Sequence[str] | None = None, skip_folders: Set[str] = frozenset()
) -> list[TextFile]:
    """Return the files below a folder in ascending order of their names, links followed.

    Folders called as in skip_folders are left out, and so are files without one of the suffixes. Everything else is
    either returned or raises DataError: what can't be read, what is not a regular file, a link back to a parent.
    """
    found = _walk(folder, "", suffixes, skip_folders, (os.path.realpath(folder),))
    return sorted(found, key=lambda file: file.name)


def _paths(given: Path, suffixes: Sequence[str] | None) -> list[Path]:
    if not given.is_dir():
        return [given]
    paths = [file.path for file in list_files(given, suffixes=suffixes)]
    if not paths:
        wanted = "files" if suffixes is None else f"files ending in {', '.join(suffixes)}"
        raise DataError(f"{given}: the folder holds no {wanted}; give another folder or other suffixes")
    return paths


def _chunks(path: Path) -> Iterator[bytes]:
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # opening a pipe would wait for its writer
            raise DataError(f"{path}: is not a regular file; copy its text into one")
        with open(path, "rb", buffering=0) as file:
            while chunk := file.read(_CHUNK_BYTES):
                yield chunk
    except OSError as error:
        raise _unreadable(path, error) from error


def _walk(
    folder: Path, name: str, suffixes: Sequence[str] | None, skip_folders: Set[str], parents: tuple[str, ...]
) -> Iterator[TextFile]:
    try:
        entries = list(os.scandir(folder))
    except OSError as error:
        raise _unreadable(folder, error) from error
    for entry in entries:
        path = Path(entry.path)
        if entry.is_dir():
            if entry.name in skip_folders:
                continue
            real = os.path.realpath(path)
            if real in parents:
                raise DataError(f"{path}: is a link back to its parent {real}; remove the link")
            yield from _walk(path, f"{name}{entry.name}/", suffixes, skip_folders, (*parents, real))
        elif suffixes is None or entry.name.endswith(tuple(suffixes)):
            try:
                status = entry.stat()
            except OSError as error:
                raise _unreadable(path, error) from error
            if not stat.S_ISREG(status.st_mode):
                raise DataError(f"{path}: is not a regular file; remove it, or choose files by suffixes")
            yield TextFile(path=path, name=f"{name}{entry.name}", num_bytes=status.st_size)


def _unreadable(path: Path, error: OSError) -> DataError:
    return DataError(f"{path}: can't be read ({error.strerror}); make it readable, or leave it out of the inputs")
