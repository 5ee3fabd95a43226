"""JSON lines files that a process may be killed while writing: whole lines in, whole lines out."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class JsonlWriter:
    """Appends lines to ``path``. Each is one ``write`` in append mode, so lines of several writers never mix.

    If the file ends in half a line, left by a writer that died, that line is ended first: it stays the only broken one.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        size = os.fstat(self._fd).st_size
        if size and os.pread(self._fd, 1, size - 1) != b"\n":
            os.write(self._fd, b"\n")

    def append(self, values: Mapping[str, Any]) -> None:
        """Writes one line. ValueError for a number that JSON does not have; OSError if the disk is full."""
        line = json.dumps(values, allow_nan=False).encode() + b"\n"
        if os.write(self._fd, line) != len(line):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._path))

    def close(self) -> None:
        os.close(self._fd)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The lines of a file, none if it does not exist; lines that are broken off are left out."""
    if not path.exists():
        return []
    lines = []
    for text in path.read_bytes().split(b"\n"):
        try:
            values = json.loads(text)
        except ValueError:  # half a line, or the empty piece after the last newline
            continue
        if isinstance(values, dict):
            lines.append(values)
    return lines
