"""What every folder does, on a disk and in an object store that speaks S3: names, whole files, named refusals."""

import os
import pickle
import re
import signal
import subprocess
import sys
from urllib.request import Request, urlopen

import numpy as np
import pytest
from small_checkpoints import SHAPES, check_whole, resumed, save, state

from rayformer.ckpt.manifest import find_checkpoints, read_manifest, step_folder
from rayformer.ckpt.reader import read_boxes
from rayformer.ckpt.storage import LocalFolder, folder_at, is_uri
from rayformer.ckpt.writer import LATEST
from rayformer.errors import CheckpointError, DamagedError
from rayformer.shards import whole

KEY, SECRET = "AKIAKEY", "se/cret"


SERVER = """
import sys
from moto.server import ThreadedMotoServer

server = ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
server.start()
print("{}:{}".format(*server.get_host_and_port()), flush=True)
sys.stdin.read()
server.stop()
"""


@pytest.fixture(scope="module")
def endpoint():
    """HOST:PORT of an S3 server with an empty ``bucket``, which ends with these tests."""
    pytest.importorskip("moto", reason="the extra s3-test is missing")
    command = [sys.executable, "-c", SERVER]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        found = server.stdout.readline().strip()
        urlopen(Request(f"http://{found}/bucket", method="PUT")).close()
        yield found


def uri(endpoint, path):
    keys = f"{KEY}:{SECRET.replace('/', '%2F')}"
    return f"s3://{keys}@{path}?scheme=http&endpoint_override={endpoint}&region=us-east-1"


@pytest.fixture(params=["disk", "s3"])
def folder(request, tmp_path):
    if request.param == "disk":
        return folder_at(tmp_path / "runs")
    return folder_at(uri(request.getfixturevalue("endpoint"), f"bucket/{request.node.name.partition('[')[0]}"))


def test_what_is_written_is_there_under_its_name(folder):
    assert folder.names() == [] and folder.size("a") is None
    folder.write("a", [b"one", memoryview(np.arange(3, dtype="<u2"))])
    assert folder.names() == ["a"] and folder.size("a") == 9
    assert folder.read("a") == b"one\0\0\1\0\2\0"
    folder.write("a", [])
    assert folder.read("a") == b""


def test_parts_of_a_file_are_read_and_its_end_is_told(folder):
    folder.write("a", [b"0123456789"])
    target = bytearray(4)
    with folder.open("a") as file:
        file.read_into(3, memoryview(target))
        assert target == b"3456"
        file.read_into(6, memoryview(target))
        assert target == b"6789"
        with pytest.raises(DamagedError, match="a: it ends at byte 10"):
            file.read_into(8, memoryview(target))


def test_a_file_that_is_not_there_is_told_from_one_that_can_not_be_read(folder):
    for read in (folder.read, lambda name: folder.open(name).__enter__()):
        with pytest.raises(FileNotFoundError):
            read("a")


def test_a_file_gets_another_name(folder):
    folder.write("a", [b"1"])
    folder.write("b", [b"2"])
    folder.rename("a", "b")
    assert folder.names() == ["b"] and folder.read("b") == b"1"
    with pytest.raises(CheckpointError, match=f"{re.escape(str(folder))}/a: it can't be renamed"):
        folder.rename("a", "c")


def test_a_folder_in_another_is_listed_and_dropped_with_what_is_in_it(folder):
    inner = folder / "inner"
    assert inner.name == "inner" and inner.parent == folder and str(inner) == f"{folder}/inner"
    inner.write("a", [b"1"])
    (inner / "deep").write("b", [b"2"])
    folder.write("c", [b"3"])
    assert sorted(folder.names()) == ["c", "inner"] and folder.size("inner") is None
    inner.remove()
    inner.remove()
    assert folder.names() == ["c"] and inner.names() == []


def test_a_folder_goes_to_another_process(folder):
    folder.write("a", [b"1"])
    again = pickle.loads(pickle.dumps(folder))
    assert again == folder and hash(again) == hash(folder) and again != folder / "x" and again.read("a") == b"1"


def test_a_file_whose_parts_break_off_gets_no_name(folder):
    def parts():
        yield b"1"
        raise RuntimeError("the process that has the rest is gone")

    folder.write("b", [b"2"])
    with pytest.raises(RuntimeError):
        folder.write("a", parts())
    assert folder.names() == ["b"]


def test_a_checkpoint_is_written_found_verified_loaded_and_dropped(folder):
    for step in (1, 2, 3):
        save(folder, step, keep=2)
    assert [found.name for found in find_checkpoints(folder)] == [step_folder(3), step_folder(2)]
    assert sorted(folder.names()) == sorted([LATEST, step_folder(2), step_folder(3)])
    assert resumed(folder).step == 3
    for found in find_checkpoints(folder):
        check_whole(found)
    newest = find_checkpoints(folder)[0]
    arrays = {tensor: np.empty(shape, np.float32) for tensor, shape in SHAPES.items()}
    read_boxes(newest, read_manifest(newest), [(t, whole(array.shape), array) for t, array in arrays.items()])
    np.testing.assert_array_equal(np.concatenate([array.reshape(-1) for array in arrays.values()]), state(3))
    newest.write(read_manifest(newest).shards[0].file, [b"short"])
    assert resumed(folder).step == 2


def test_keys_are_never_shown(endpoint):
    address = uri(endpoint, "bucket/keys")
    folder = folder_at(address)
    folder.write("a", [b"1"])
    with pytest.raises(CheckpointError) as missing:
        folder.rename("b", "c")
    told = [str(folder), repr(folder), str(folder / "x"), repr(folder.parent), str(missing.value)]
    for wrong in (address.replace("%2F", "/"), f"{address}&nonsense=1", address.replace("s3:", "s9:")):
        with pytest.raises(CheckpointError) as error:
            folder_at(wrong).names()
        told += [str(error.value), str(folder_at(wrong))]
    for text in told:
        assert KEY not in text and "cret" not in text
    assert str(folder) == "s3://bucket/keys"


def test_an_address_that_nobody_understands_and_a_bucket_that_is_not_there_are_named(endpoint):
    with pytest.raises(CheckpointError, match=r"^nonsense://bucket/runs: it can't be understood \(.*nonsense"):
        folder_at("nonsense://bucket/runs").names()
    nowhere = folder_at(uri(endpoint, "nowhere/runs"))
    with pytest.raises(CheckpointError, match=r"^s3://nowhere/runs: it can't be listed \(there is no bucket 'nowhere'"):
        find_checkpoints(nowhere)
    with pytest.raises(CheckpointError, match=r"^s3://nowhere/runs/a: it can't be written \(.*bucket does not exist"):
        nowhere.write("a", [b"1"])


UPLOAD = """
import os, sys
from rayformer.ckpt.storage import folder_at

def parts():
    while True:
        yield bytes(6 << 20)
        os.write(1, b"!")

folder_at(sys.argv[1]).write(sys.argv[2], parts())
"""


@pytest.mark.parametrize("parts", [1, 4])
def test_a_writer_that_is_killed_leaves_what_was_there_before(folder, parts, tmp_path, request):
    where = str(folder)
    if not isinstance(folder, LocalFolder):
        where = uri(request.getfixturevalue("endpoint"), where.removeprefix("s3://"))
    folder.write("old", [b"old"])
    for name in ("old", "new"):
        with subprocess.Popen([sys.executable, "-c", UPLOAD, where, name], stdout=subprocess.PIPE) as child:
            assert child.stdout.read(parts) == b"!" * parts
            child.send_signal(signal.SIGKILL)
    assert folder.read("old") == b"old"
    assert {name for name in folder.names() if not name.endswith(".tmp")} == {"old"} and folder.size("new") is None


def test_a_file_uri_is_a_path(tmp_path):
    assert (
        folder_at(f"file://{tmp_path}/a%20b")
        == folder_at(f"file://localhost{tmp_path}/a b")
        == LocalFolder(tmp_path / "a b")
    )
    assert not is_uri(f"file://{tmp_path}") and is_uri("s3://bucket")
    with pytest.raises(CheckpointError, match=r"file://elsewhere/a: files of 'elsewhere' can't be reached"):
        folder_at("file://elsewhere/a")


def test_what_a_disk_refuses_is_named(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    folder = LocalFolder(tmp_path / "file")
    assert folder.names() == [] and folder.size("a") is None, "there is no such folder"
    with pytest.raises(CheckpointError, match=r"file/a: it can't be written \(.*\); \d+ MiB of \d+ MiB are free"):
        folder.write("a", [b"1"])
    with pytest.raises(CheckpointError, match="file: it can't be removed"):
        folder.remove()
    loop = LocalFolder(tmp_path / "loop")
    os.symlink("loop", loop.path)
    for call in (loop.names, lambda: loop.size("a"), loop.settle):
        with pytest.raises(CheckpointError, match=r"loop(/a)?: it can't be .* \(Too many levels of symbolic links\)"):
            call()
