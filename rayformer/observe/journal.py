"""journal.jsonl: one line for every event and command of the controller, over all attempts of a run."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rayformer.events import JournalEntry
from rayformer.observe.jsonl import JsonlWriter, read_lines


class Journal:
    """Appends the entries of one attempt to ``path``: ``time, attempt, generation, kind`` and the entry's values."""

    def __init__(self, path: Path, attempt: int, clock: Callable[[], float] = time.time) -> None:
        self._writer = JsonlWriter(path)
        self._attempt = attempt
        self._clock = clock

    def write(self, entry: JournalEntry) -> None:
        """Writes one line; it is in the file, whatever happens to this process, when the call returns."""
        head = {
            "time": self._clock(),
            "attempt": self._attempt,
            "generation": entry.generation,
            "kind": entry.kind,
        }
        assert not head.keys() & entry.values.keys(), f"a value of {entry.kind} has the name of a common key: {entry}"
        self._writer.append({**head, **entry.values})

    def close(self) -> None:
        self._writer.close()


def read_journal(path: Path) -> list[dict[str, Any]]:
    """Every line, in the order written."""
    return read_lines(path)
