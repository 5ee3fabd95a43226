"""Saves that fail at every call and in every way: the newest checkpoint that was committed is there, and whole."""

import errno
import os
import random
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from itertools import count
from pathlib import Path

import pytest
import small_checkpoints
from small_checkpoints import check_whole, hash_of, resumed, save

from rayformer.ckpt import inspect
from rayformer.ckpt.manifest import find_checkpoints, read_manifest, step_folder
from rayformer.ckpt.storage import Disk, LocalFolder
from rayformer.ckpt.writer import LATEST, file_name, prune
from rayformer.errors import CheckpointError, DamagedError


class Calls(Disk):
    """Its calls are told by name and may be replaced. It waits for no device: what is written outlives a process."""

    def __init__(self, instead=lambda number, name, do, args: do(*args)):
        self.names, self._instead = [], instead

    def _call(self, name, do, *args):
        self.names.append(name)
        return self._instead(len(self.names) - 1, name, do, args)

    def make(self, folder):
        self._call("make", super().make, folder)

    def open(self, path):
        return self._call("open", super().open, path)

    def write(self, descriptor, part):
        return self._call("write", super().write, descriptor, part)

    def sync(self, descriptor):
        self._call("sync", lambda descriptor: None, descriptor)

    def close(self, descriptor):
        self._call("close", super().close, descriptor)

    def replace(self, path, target):
        self._call("replace", super().replace, path, target)

    def sync_folder(self, folder):
        self._call("sync_folder", lambda folder: None, folder)

    def remove(self, path):
        self._call("remove", super().remove, path)

    def remove_folder(self, folder):
        if not folder.exists():
            raise FileNotFoundError(folder)
        for path in sorted(folder.iterdir()):
            self.remove(path)
        self._call("rmdir", Path.rmdir, folder)


class Story:
    """What lies in a folder of checkpoints before step 3 is saved, and how many of them are kept."""

    def __init__(self, *, steps, keep, step=3, unfinished=False):
        self.steps, self.keep, self.step, self.unfinished = steps, keep, step, unfinished

    def make(self, path):
        directory = LocalFolder(path, Calls())
        for step in self.steps:
            save(directory, step, keep=0, attempt=int(step >= self.step))
        if self.unfinished:
            folder = path / step_folder(self.step)
            folder.mkdir()
            (folder / file_name("dp0", 0)).write_bytes(b"an earlier try, and longer than what is written now" * 20)
            (folder / f"{file_name('dp1', 0)}.tmp").write_bytes(b"half" * 200)

    def calls(self, path):
        """The names of the calls of the save."""
        self.make(path)
        disk = Calls()
        save(LocalFolder(path, disk), self.step, keep=self.keep)
        return disk.names

    def check(self, path, *, committed):
        """The newest one committed is found, older ones that are kept are whole, and the next save works."""
        found = resumed(path)
        if committed:
            assert (found.step, found.state_hash) == (self.step, hash_of(self.step))
        else:
            assert found.step in {*self.steps, self.step}
        older = sorted({step for step in self.steps if step < self.step})
        for step in older[-1:] if not committed else older[len(older) - self.keep + 1 :]:
            check_whole(LocalFolder(path) / step_folder(step))
        save(LocalFolder(path, Calls()), 10, keep=self.keep)
        assert resumed(path).step == 10
        assert len(find_checkpoints(path)) <= self.keep


STORIES = {
    "keep 1": Story(steps=(2,), keep=1),
    "keep 2, over an unfinished one": Story(steps=(1, 2), keep=2, unfinished=True),
    "the run went back": Story(steps=(2, 3, 9), keep=2),
}
FAULTS_RUN = {}


def refusal(number):
    """A call that fails with an errno."""

    def fail(do, args):
        raise OSError(number, os.strerror(number))

    return fail


def killed(do, args):
    os.kill(os.getpid(), signal.SIGKILL)


def killed_half_way(do, args):
    """The death of a process that has half done what it was about: a part is written, a name is there too early."""
    if do.__name__ == "write":
        do(args[0], args[1][: len(args[1]) // 2])
    else:
        source, target = args
        half = source.read_bytes()[: source.stat().st_size // 2]
        source.unlink()
        target.write_bytes(half)
    killed(do, args)


def killed_with_an_empty_target(do, args):
    args[1].write_bytes(b"")
    killed(do, args)


def short(do, args):
    return do(args[0], args[1][: max(1, len(args[1]) // 3)])


def at(number, fault):
    return lambda called, name, do, args: fault(do, args) if called == number else do(*args)


def from_then_on(number, fault, names):
    return lambda called, name, do, args: fault(do, args) if called >= number and name in names else do(*args)


def copies(tmp_path, story):
    """Fresh folders in which the story begins."""
    before = tmp_path / "before"
    story.make(before)
    files = {path.relative_to(before): path.read_bytes() for path in before.rglob("*") if path.is_file()}
    for number in count():
        yield fill(tmp_path / str(number), files)


def fill(path, files):
    """A folder with these files by their names and contents."""
    for folder in {path, *((path / name).parent for name in files)}:
        folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (path / name).write_bytes(content)
    return path


def in_a_child(path, story, instead):
    """Save in a process that dies; whether it had committed."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            disk = Calls(instead)
            save(LocalFolder(path, disk), story.step, keep=story.keep, on_commit=lambda step: os.write(writer, b"!"))
        finally:
            os._exit(1)
    os.close(writer)
    _, status = os.waitpid(child, 0)
    committed = os.read(reader, 1) == b"!"
    os.close(reader)
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
    return committed


@pytest.mark.parametrize("name", STORIES)
def test_a_process_killed_at_any_call_leaves_the_newest_checkpoint_that_was_committed(tmp_path, name):
    story = STORIES[name]
    calls = story.calls(tmp_path / "recorded")
    fresh = copies(tmp_path, story)
    faults = [(number, killed) for number in range(len(calls))]
    faults += [(number, killed_half_way) for number, call in enumerate(calls) if call in ("write", "replace")]
    faults += [(number, killed_with_an_empty_target) for number, call in enumerate(calls) if call == "replace"]
    for number, fault in faults:
        path = next(fresh)
        committed = in_a_child(path, story, at(number, fault))
        story.check(path, committed=committed)
    FAULTS_RUN["kill", name] = len(faults)


@pytest.mark.parametrize("name", STORIES)
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO], ids=["ENOSPC", "EIO"])
def test_a_storage_that_refuses_any_call_is_named_and_harms_no_older_checkpoint(tmp_path, name, number):
    """It refuses once, or whatever takes room from then on; what was asked for is done, or what failed is told."""
    story = STORIES[name]
    calls = story.calls(tmp_path / "recorded")
    fresh = copies(tmp_path, story)
    takes_room = {"make", "open", "write", "sync"}
    faults = [at(index, refusal(number)) for index in range(len(calls))]
    faults += [from_then_on(index, refusal(number), takes_room) for index in range(len(calls))]
    told = 0
    for instead in faults:
        path, committed = next(fresh), []
        try:
            save(LocalFolder(path, Calls(instead)), story.step, keep=story.keep, on_commit=committed.append)
        except CheckpointError as error:
            told += 1
            assert str(path) in str(error) and os.strerror(number) in str(error)
            assert number != errno.ENOSPC or "MiB are free in" in str(error)
            assert not committed
        story.check(path, committed=bool(committed))
    assert told > len(calls), "most of what is refused keeps a checkpoint from being made"
    FAULTS_RUN[number, name] = len(faults)


@pytest.mark.parametrize("name", STORIES)
def test_a_write_that_takes_only_a_part_is_gone_on_with(tmp_path, name):
    story = STORIES[name]
    calls = story.calls(tmp_path / "recorded")
    fresh = copies(tmp_path, story)
    writes = [number for number, call in enumerate(calls) if call == "write"]
    for instead in [*(at(number, short) for number in writes), from_then_on(0, short, {"write"})]:
        path = next(fresh)
        save(LocalFolder(path, Calls(instead)), story.step, keep=story.keep)
        story.check(path, committed=True)
    FAULTS_RUN["short", name] = len(writes) + 1


class PowerCut(BaseException):
    """The machine stops."""


class Device(Calls):
    """What lies on a device while a machine runs, call by call: contents that were synced, names of synced folders.

    ``after_the_cut`` gives the files that the machine finds when it is up again. Changes of names that no sync of their
    folder has made durable may have happened or not, as ``happened`` says of each.
    """

    def __init__(self, root, cut_at):
        super().__init__(self._follow)
        self._cut_at, self._is_cut = cut_at, False
        paths = [path for path in root.rglob("*") if path.is_file()]
        self._content = {number: path.read_bytes() for number, path in enumerate(paths)}
        self._now = {path: number for number, path in enumerate(paths)}
        self._names = dict(self._now)
        self._folders = {root, *(path for path in root.rglob("*") if path.is_dir())}
        self._unsynced, self._open, self._pending = {}, {}, []

    def after_the_cut(self, happened):
        names, folders = dict(self._names), set(self._folders)
        for change in self._pending:
            if happened(change):
                self._apply(change, names, folders)
        return {path: self._content.get(file, b"") for path, file in names.items() if path.parent in folders}

    def _follow(self, number, name, do, args):
        if number >= self._cut_at or self._is_cut:
            self._is_cut = True
            raise PowerCut
        before = args[0].is_dir() if name == "make" else None
        result = do(*args)
        match name:
            case "make" if not before:
                self._pending.append(("mkdir", args[0].parent, args[0], None))
            case "open":
                file = self._now.setdefault(args[0], ("opened by call", number))
                self._content.pop(file, None)
                self._unsynced[file], self._open[result] = b"", file
                self._pending.append(("link", args[0].parent, args[0], file))
            case "write":
                self._unsynced[self._open[args[0]]] += bytes(args[1][:result])
            case "sync":
                self._content[self._open[args[0]]] = self._unsynced[self._open[args[0]]]
            case "replace":
                file = self._now[args[1]] = self._now.pop(args[0])
                self._pending.append(("move", args[0].parent, args, file))
            case "remove":
                self._now.pop(args[0])
                self._pending.append(("unlink", args[0].parent, args[0], None))
            case "rmdir":
                self._pending.append(("rmdir", args[0].parent, args[0], None))
            case "sync_folder":
                for change in [change for change in self._pending if change[1] == args[0]]:
                    self._pending.remove(change)
                    self._apply(change, self._names, self._folders)
        return result

    def _apply(self, change, names, folders):
        kind, _, what, file = change
        match kind:
            case "mkdir":
                folders.add(what)
            case "rmdir":
                folders.discard(what)
                for path in [path for path in names if path.parent == what]:
                    del names[path]
            case "link":
                names[what] = file
            case "move":
                names.pop(what[0], None)
                names[what[1]] = file
            case "unlink":
                names.pop(what, None)


def some(seed):
    rng = random.Random(seed)
    return lambda change: rng.random() < 0.5


@pytest.mark.parametrize("name", STORIES)
def test_a_machine_that_stops_at_any_call_finds_the_newest_checkpoint_that_was_committed(tmp_path, name):
    """Of what was not synced nothing has reached the device, or all names and no contents, or some of the names."""
    story = STORIES[name]
    calls = story.calls(tmp_path / "recorded")
    fresh = copies(tmp_path, story)
    endings = [lambda change: False, lambda change: True, some(1), some(2)]
    for number in range(len(calls) + 1):
        path, committed = next(fresh), []
        device = Device(path, number)
        with suppress(PowerCut):
            save(LocalFolder(path, device), story.step, keep=story.keep, on_commit=committed.append)
        for ending, happened in enumerate(endings):
            found = {file.relative_to(path): content for file, content in device.after_the_cut(happened).items()}
            story.check(fill(tmp_path / f"{number}-{ending}", found), committed=bool(committed))
    FAULTS_RUN["power", name] = len(endings) * (len(calls) + 1)


def test_at_least_a_thousand_faults_were_run():
    """Those of the tests above, which a run of the whole file has done."""
    assert len(FAULTS_RUN) == 5 * len(STORIES)
    assert sum(FAULTS_RUN.values()) >= 1000


def test_a_flipped_bit_anywhere_is_found(tmp_path):
    save(LocalFolder(tmp_path, Calls()), 1, keep=1)
    (folder,) = find_checkpoints(tmp_path)
    for name in folder.names():
        path = folder.path / name
        content = path.read_bytes()
        for number in range(0, len(content), 7):
            flipped = bytearray(content)
            flipped[number] ^= 1 << (number // 7) % 8
            path.write_bytes(flipped)
            assert is_found(folder), f"bit {(number // 7) % 8} of byte {number} of {name}"
        path.write_bytes(content)
    check_whole(folder)


def is_found(folder):
    """Whether a run that resumes passes it over, or ``verify`` tells what is wrong."""
    try:
        return bool(list(inspect.problems(folder, read_manifest(folder), on_bytes=lambda _: None)))
    except DamagedError:
        return True
    except CheckpointError as error:
        return "expected format 1" in str(error)


def test_an_older_checkpoint_survives_a_save_for_which_the_disk_is_too_small(tmp_path):
    """Any size that is not enough for both: the save fails, and works when there is room."""
    save(LocalFolder(tmp_path / "a", Calls()), 1, keep=1)
    one = used(tmp_path / "a")
    for room in range(one, 2 * one - 100, 50):
        path = tmp_path / str(room)
        shutil.copytree(tmp_path / "a", path)
        with pytest.raises(CheckpointError, match=r"No space left on device\); \d+ MiB of \d+ MiB are free in") as told:
            save(LocalFolder(path, Calls(of_size(path, room))), 2, keep=1)
        assert str(path) in str(told.value)
        assert [folder.name for folder in find_checkpoints(path)] == [step_folder(1)] and resumed(path).step == 1
        assert used(path) == one, "what the failed save had written is gone"
        save(LocalFolder(path, Calls(of_size(path, 3 * one))), 2, keep=1)
        assert resumed(path).step == 2 and not (path / step_folder(1)).exists()


def of_size(path, room):
    """Calls of a file system of ``room`` bytes, which takes what fits."""

    def call(number, name, do, args):
        if name != "write":
            return do(*args)
        free = room - used(path)
        if free <= 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return do(args[0], args[1][:free])

    return call


def used(path):
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def test_a_folder_that_can_not_be_listed_keeps_its_old_checkpoints_and_fails_no_save(tmp_path, monkeypatch, caplog):
    for step in (1, 2):
        save(LocalFolder(tmp_path, Calls()), step, keep=0)

    def refused(path):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(os, "listdir", refused)
        prune(LocalFolder(tmp_path), keep=1)
    assert f"{tmp_path}: it can't be listed (Input/output error)" in caplog.text
    assert len(find_checkpoints(tmp_path)) == 2


def test_kills_while_steps_are_saved_one_after_the_other_lose_none_that_was_told(tmp_path):
    """40 processes, each killed at some moment after its first checkpoint and going on from the newest."""
    rng = random.Random(1)
    told = 0
    for _ in range(40):
        child = subprocess.Popen([sys.executable, small_checkpoints.__file__, str(tmp_path)], stdout=subprocess.PIPE)
        lines = [child.stdout.readline()]
        try:
            child.wait(rng.uniform(0, 0.05))
        except subprocess.TimeoutExpired:
            child.send_signal(signal.SIGKILL)
        lines += child.stdout.read().splitlines()
        child.stdout.close()
        assert child.wait() == -signal.SIGKILL
        last = max(int(line) for line in lines)
        assert last > told, "it went on from the newest"
        told = last
        found = resumed(tmp_path).step
        assert found in (told, told + 1)
        assert (tmp_path / LATEST).read_text().strip() in (step_folder(step) for step in (found - 1, found))
