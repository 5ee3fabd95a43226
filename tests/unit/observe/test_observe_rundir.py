"""The run directory keeps what is in it, and one driver at a time."""

import fcntl
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from rayformer.errors import RunError
from rayformer.events import JournalEntry
from rayformer.observe.journal import Journal
from rayformer.observe.jsonl import JsonlWriter
from rayformer.observe.rundir import RunDir

HOLD = """
import sys, time
from pathlib import Path
from rayformer.observe.rundir import RunDir
with RunDir(Path(sys.argv[1])).lock():
    print("locked", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path / "runs" / "tiny")


@pytest.fixture
def driver(run: RunDir):
    """Another process that holds the run's lock."""
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(run.path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "locked\n"
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


def test_everything_lies_in_the_run_folder_but_the_corpora_are_shared(run: RunDir):
    run.create()
    run.create()
    assert run.path.is_dir() and run.logs.is_dir()
    for path in (run.job_yaml, run.metrics, run.journal, run.checkpoints, run.logs):
        assert path.parent == run.path
    assert run.corpus_cache == RunDir(run.path.with_name("other")).corpus_cache


def test_a_live_run_is_refused_by_name_and_free_once_its_driver_is_killed(run: RunDir, driver: subprocess.Popen):
    with pytest.raises(RunError) as refused, run.lock():
        pass
    assert str(refused.value) == (
        f"the run tiny in {run.path} is live: driver pid {driver.pid} on host {socket.gethostname()}; "
        "wait for it, stop it, or choose another run.name"
    )
    os.kill(driver.pid, signal.SIGKILL)
    driver.wait()
    with run.lock():
        assert f"pid {os.getpid()} " in (run.path / ".lock").read_text()


def test_a_live_run_is_not_set_aside(run: RunDir, driver: subprocess.Popen):
    with pytest.raises(RunError, match=f"driver pid {driver.pid}"):
        run.set_aside()
    assert [path.name for path in run.path.parent.iterdir()] == ["tiny"]


def test_a_lock_can_be_taken_again_after_it_was_given_back(run: RunDir):
    for _ in range(2):
        with run.lock(), pytest.raises(RunError, match=f"pid {os.getpid()} "), run.lock():
            pass


def test_set_aside_loses_nothing_and_finds_a_free_name(run: RunDir):
    assert run.set_aside() is None
    moved = []
    for text in ("first", "second", "third"):
        run.create()
        run.job_yaml.write_text(text)
        moved.append(run.set_aside(clock=lambda: 0.0))
        assert not run.path.exists()
    stem = "tiny.before-19700101T000000Z"
    assert [path.name for path in moved] == [stem, f"{stem}-2", f"{stem}-3"]
    assert [(path / "job.yaml").read_text() for path in moved] == ["first", "second", "third"]


def test_a_lock_on_a_folder_that_was_set_aside_meanwhile_is_not_taken_for_the_run(run: RunDir, monkeypatch):
    """Driver B has opened the lock file, driver A sets the folder aside, B gets the lock: of the wrong folder."""
    run.create()
    flock, moved = fcntl.flock, []

    def late_flock(fd: int, how: int) -> None:
        if not moved:
            moved.append(run.path.rename(run.path.with_name("moved")))
        flock(fd, how)

    monkeypatch.setattr("rayformer.observe.rundir.fcntl.flock", late_flock)
    with run.lock():
        monkeypatch.undo()
        with pytest.raises(RunError), RunDir(run.path).lock():
            pass
        with RunDir(moved[0]).lock():
            pass


def test_attempts_count_on_from_the_last_line_of_either_file(run: RunDir):
    assert run.next_attempt() == 1
    run.create()
    assert run.next_attempt() == 1
    JsonlWriter(run.metrics).append({"attempt": 2, "step": 1})
    assert run.next_attempt() == 3
    Journal(run.journal, attempt=3).write(JournalEntry(kind="membership", generation=1))
    assert run.next_attempt() == 4
    with run.metrics.open("a") as file:
        file.write('{"attempt": 99')
    assert run.next_attempt() == 4
