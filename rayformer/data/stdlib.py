"""The corpus `python-stdlib`: the sources of this machine's Python standard library, one document a file."""

from __future__ import annotations

import os
import platform
import shutil
import sysconfig
import uuid
from pathlib import Path

import xxhash

from rayformer.data.preprocess import TextFile, list_files, preprocess
from rayformer.data.tokenizers import ByteTokenizer
from rayformer.errors import DataError

_HELD_OUT_ONE_IN = 20
_SKIP_FOLDERS = frozenset({"site-packages", "dist-packages"})


def stdlib_files() -> tuple[list[TextFile], list[TextFile]]:
    """Return the train and the held-out files, each in ascending order of their names, without reading them.

    A file is held out if xxh3_64 of its name (its path below the library's folder) is a multiple of 20.
    """
    files = list_files(Path(sysconfig.get_paths()["stdlib"]), suffixes=(".py",), skip_folders=_SKIP_FOLDERS)
    held_out = [_name_hash(file) % _HELD_OUT_ONE_IN == 0 for file in files]
    return (
        [file for file, held in zip(files, held_out, strict=True) if not held],
        [file for file, held in zip(files, held_out, strict=True) if held],
    )


def build_stdlib(cache_dir: Path, tokenizer: ByteTokenizer) -> tuple[Path, Path]:
    """Return the prefixes of the train and the held-out pair, after writing both if the cache lacks them.

    They lie in a folder whose name holds the Python version, the tokenizer and a hash of all names and contents. It is
    written under another name and renamed when complete, so processes that build at once do not see each other's work.
    """
    train, held_out = stdlib_files()
    folder = cache_dir / f"python-stdlib-{platform.python_version()}-{tokenizer.name}-{_content_key(train + held_out)}"
    if not folder.exists():
        part = folder.with_name(f"{folder.name}.{os.getpid()}-{uuid.uuid4().hex[:8]}.tmp")
        try:
            preprocess([file.path for file in train], part / "train", tokenizer)
            preprocess([file.path for file in held_out], part / "held_out", tokenizer)
            part.rename(folder)
        except OSError:
            if not folder.exists():  # else another process was first, with the same content
                raise
        finally:
            shutil.rmtree(part, ignore_errors=True)
    return folder / "train", folder / "held_out"


def _name_hash(file: TextFile) -> int:
    return xxhash.xxh3_64_intdigest(os.fsencode(file.name))


def _content_key(files: list[TextFile]) -> str:
    """Return 16 hex digits that change with any name or content: 30 MB read once, about 0.1 s."""
    total = xxhash.xxh3_64()
    for file in files:
        try:
            content = file.path.read_bytes()
        except OSError as error:
            raise DataError(f"{file.path}: can't be read ({error.strerror}); make it readable") from error
        total.update(os.fsencode(file.name) + b"\0" + xxhash.xxh3_64_digest(content))
    return total.hexdigest()
