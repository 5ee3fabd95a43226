"""The run directory: where everything of a run lies, and the lock that says a driver is at work in it."""

from __future__ import annotations

import fcntl
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

from rayformer.errors import RunError
from rayformer.observe.jsonl import read_lines


class RunDir:
    """The folder ``<run.dir>/<run.name>/``. Making the object touches nothing on disk."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def job_yaml(self) -> Path:
        return self.path / "job.yaml"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def journal(self) -> Path:
        return self.path / "journal.jsonl"

    @property
    def trace(self) -> Path:
        return self.path / "trace.json"

    @property
    def report(self) -> Path:
        return self.path / "report.html"

    @property
    def checkpoints(self) -> Path:
        """Where checkpoints go unless ``checkpoint.dir`` says otherwise."""
        return self.path / "checkpoints"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    def marks(self, attempt: int) -> Path:
        """Where the cells of an attempt mark the faults that befall them."""
        return self.logs / f"faults-{attempt}"

    @property
    def corpus_cache(self) -> Path:
        """Prepared corpora, shared by all runs of the same ``run.dir``."""
        return self.path.parent / ".corpus"

    def create(self) -> None:
        """Makes the folder and ``logs/`` in it, where they don't exist yet."""
        self.logs.mkdir(parents=True, exist_ok=True)

    def next_attempt(self) -> int:
        """The number of the attempt that starts now: one more than the last that left a line here; 1 for a new run."""
        lines = read_lines(self.metrics) + read_lines(self.journal)
        return 1 + max((line["attempt"] for line in lines), default=0)

    def set_aside(self, clock: Callable[[], float] = time.time) -> Path | None:
        """Renames an existing folder to ``<name>.before-<UTC time>`` and returns that; None if there was none.

        Raises RunError if a driver is at work in it. Call it before ``lock()``: it holds the old folder's lock while
        it renames, and a driver that was waiting in between finds that its folder has moved (see ``lock``).
        """
        if not self.path.exists():
            return None
        with self.lock():
            stem = f"{self.path.name}.before-{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime(clock()))}"
            names = (stem if n == 1 else f"{stem}-{n}" for n in count(1))
            target = next(path for path in map(self.path.with_name, names) if not path.exists())
            self.path.rename(target)
        return target

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Holds the run for this process; RunError names the driver that has it. Makes the folder if need be.

        The lock is a flock on ``.lock``, so the kernel releases it when the process dies, however it dies. The file's
        text says who took it last.
        """
        fd = self._open_lock()
        try:
            os.ftruncate(fd, 0)
            os.pwrite(fd, f"pid {os.getpid()} on host {socket.gethostname()}\n".encode(), 0)
            yield
        finally:
            os.close(fd)

    def _open_lock(self) -> int:
        path = self.path / ".lock"
        while True:
            self.path.mkdir(parents=True, exist_ok=True)
            fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                holder = os.pread(fd, 1000, 0).decode().strip() or "that is just starting"
                os.close(fd)
                raise RunError(
                    f"the run {self.path.name} in {self.path} is live: driver {holder}; "
                    "wait for it, stop it, or choose another run.name"
                ) from None
            # Between open and flock another driver may have set this folder aside: then this is a lock on the past.
            if path.exists() and os.path.samestat(os.fstat(fd), path.stat()):
                return fd
            os.close(fd)
