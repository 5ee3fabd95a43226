"""Checkpoints are written beside the training: every step's the right state, and whatever happens to a save is told."""

import os
import signal
import sys

import psutil
import pytest
from rayjobs import Driver, curve_of, folder_of, hash_of, lines_of, until, write_job

from rayformer.ckpt import inspect
from rayformer.ckpt.manifest import find_checkpoints, read_manifest

STEPS = 12
LAYOUT = {"pp": 2, "dp": 2}


@pytest.fixture(scope="module")
def calm(documents, tmp_path_factory):
    """The job in one process, which writes each step's checkpoint itself and tells its hash."""
    folder = tmp_path_factory.mktemp("calm")
    job = write_job(folder, "calm", corpus=documents, steps=STEPS, checkpoint={"every": 1, "keep": 0})
    driver = Driver([sys.executable, "-m", "rayformer.cell", job], folder=folder)
    assert driver.finish() == 0, driver.output
    return job


def checkpoints_of(job):
    return find_checkpoints(folder_of(job) / "checkpoints")


def assert_right(job, calm):
    """Every checkpoint is whole and holds the state that the calm run had after its step."""
    hashes = {line["step"]: line["state_hash"] for line in lines_of(calm)}
    for folder in checkpoints_of(job):
        manifest = read_manifest(folder)
        assert list(inspect.problems(folder, manifest, on_bytes=lambda _: None)) == []
        assert manifest.state_hash == hashes[manifest.step]
        assert manifest.consumed_samples == 8 * manifest.step
    assert curve_of(job) == curve_of(calm) and hash_of(job) == hash_of(calm)


def late(step):
    """A fault that lets a saver come up long before all that it waits for is pinned."""
    return {"slow": "pp1.dp1", "step": step, "at": "save", "seconds": 4.0}


def savers():
    return [process for process in psutil.process_iter() if "ray::Saver" in " ".join(_command(process))]


def _command(process):
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def steps_of(job, kind):
    return [line["step"] for line in lines_of(job, kind=kind)]


@pytest.mark.parametrize("zero", [0, 1])
def test_every_step_is_saved_while_training_goes_on(standing, train, documents, tmp_path, calm, zero):
    job = write_job(
        tmp_path, "saved", corpus=documents, address=standing.address, steps=STEPS, layout=LAYOUT,
        optim={"lr": 1.0e-3, "decay_steps": 20, "warmup_steps": 2, "zero": zero},
        checkpoint={"every": 1, "keep": 0, "max_file_bytes": 20_000},
    )  # fmt: skip
    driver = train(job)
    assert driver.finish() == 0, driver.output
    assert steps_of(job, "saved") == list(range(1, STEPS + 1))
    assert [read_manifest(folder).step for folder in checkpoints_of(job)] == list(range(STEPS, 0, -1))
    assert_right(job, calm)
    newest = checkpoints_of(job)[0]
    sizes = {}
    for shard in read_manifest(newest).shards:
        sizes[shard.file] = sizes.get(shard.file, 0) + shard.num_bytes
    assert max(sizes.values()) <= 20_000 and len(sizes) > 10
    by_cell = {}
    for file, size in sizes.items():
        by_cell[file.rpartition("-")[0]] = by_cell.get(file.rpartition("-")[0], 0) + size
    first, second = (sorted(n for cell, n in by_cell.items() if cell.startswith(pp)) for pp in ("pp0", "pp1"))
    for of_stage in (first, second):
        assert len(of_stage) == 2 and of_stage[1] <= 1.1 * of_stage[0]
    assert (newest.parent.path / "latest").read_text() == f"{newest.name}\n"


@pytest.mark.timeout(300)
@pytest.mark.parametrize("busy", ["skip", "wait"])
def test_a_checkpoint_that_is_due_meanwhile_is_left_out_or_waits(standing, train, documents, tmp_path, calm, busy):
    """The saver is stopped by a signal in its first save, and goes on later."""
    job = write_job(
        tmp_path, busy, corpus=documents, address=standing.address, steps=STEPS, layout=LAYOUT,
        checkpoint={"every": 2, "keep": 0, "busy": busy}, faults=[late(2)],
    )  # fmt: skip
    driver = train(job)
    driver.until(savers, "a saver")
    (saver,) = savers()
    saver.suspend()
    reached = STEPS - 1 if busy == "skip" else 3
    driver.until(lambda: len(lines_of(job)) >= reached, f"{reached} steps")
    assert steps_of(job, "saved") == []
    saver.resume()
    assert driver.finish() == 0, driver.output
    saved, skipped = steps_of(job, "saved"), steps_of(job, "save_skipped")
    if busy == "skip":
        assert (saved, skipped) == ([2, STEPS], [4, 6, 8, 10])
        assert "no checkpoint of step 4: the one before it is still being written" in driver.output
    else:
        assert (saved, skipped) == ([2, 4, 6, 8, 10, STEPS], [])
        assert steps_of(job, "save_waits")[0] == 4 and "training waits after step 4" in driver.output
    assert lines_of(job, kind="stall") == []
    assert_right(job, calm)


@pytest.mark.timeout(300)
def test_a_killed_saver_is_replaced_and_the_save_done_again(standing, train, documents, tmp_path, calm):
    job = write_job(
        tmp_path, "killed", corpus=documents, address=standing.address, steps=STEPS, layout=LAYOUT,
        checkpoint={"every": 1, "keep": 0},
    )  # fmt: skip
    driver = train(job)
    killed = set()
    for after in (2, 5, 8):
        driver.until(lambda after=after: len(steps_of(job, "saved")) >= after and savers(), f"{after} saves")
        (saver,) = savers()
        saver.kill()
        killed.add(saver.pid)
    assert driver.finish() == 0, driver.output
    assert len(killed) == 3
    assert steps_of(job, "saved") == list(range(1, STEPS + 1))
    assert_right(job, calm)


@pytest.mark.timeout(300)
def test_a_cell_that_dies_while_its_state_is_saved_costs_neither(standing, train, documents, tmp_path, calm):
    """The last step before the loss is pinned in the holder's memory, so that its save goes on."""
    job = write_job(
        tmp_path, "dies", corpus=documents, address=standing.address, steps=STEPS, layout=LAYOUT,
        recovery={"standbys_per_node": 0, "snapshot_every": 1}, checkpoint={"every": 4, "keep": 0, "busy": "skip"},
        faults=[late(4), {"kill": "pp1.dp0", "step": 7, "at": "backward"}],
    )  # fmt: skip
    driver = train(job)
    driver.until(savers, "a saver")
    (saver,) = savers()
    saver.suspend()
    driver.until(lambda: lines_of(job, kind="recovered"), "the repair")
    driver.until(lambda: steps_of(job, "save_waits"), "the last step, which waits for the checkpoint before")
    os.kill(lines_of(job, kind="membership")[-1]["cells"]["pp0.dp1.cp0.tp0"]["pid"], signal.SIGKILL)
    driver.until(lambda: len(lines_of(job, kind="membership")) == 3, "the second repair")
    assert steps_of(job, "saved") == []
    saver.resume()
    assert driver.finish() == 0, driver.output
    assert steps_of(job, "saved") == [4, STEPS]
    assert len(lines_of(job, kind="recovered")) == 2
    assert_right(job, calm)


@pytest.mark.timeout(300)
def test_what_the_storage_refuses_is_told_and_training_goes_on(standing, train, documents, tmp_path, calm):
    job = write_job(
        tmp_path, "refused", corpus=documents, address=standing.address, steps=STEPS, layout=LAYOUT,
        checkpoint={"every": 4, "keep": 0},
    )  # fmt: skip
    blocked = folder_of(job) / "checkpoints" / "step-000000004"
    blocked.parent.mkdir(parents=True)
    blocked.write_text("in the way")
    driver = train(job)
    assert driver.finish() == 0, driver.output
    (line,) = lines_of(job, kind="save_failed")
    assert line["step"] == 4 and str(blocked) in line["message"] and "can't be written" in line["message"]
    assert "the checkpoint of step 4 could not be written" in driver.output
    assert steps_of(job, "saved") == [8, STEPS]
    assert_right(job, calm)

    last = folder_of(job) / "checkpoints" / "step-000000014"
    last.write_text("in the way")
    more = ["--set", "run.steps=14", "--allow-change", "run.steps"]
    failed = train(job, *more)
    assert failed.finish() == 1, failed.output
    assert "the checkpoint of step 14 could not be written" in failed.errors and str(last) in failed.errors
    last.unlink()
    again = train(job, *more)
    assert again.finish() == 0, again.output
    assert [read_manifest(folder).step for folder in checkpoints_of(job)] == [14, STEPS, 8]


@pytest.mark.timeout(300)
def test_a_checkpoint_that_is_not_whole_is_passed_over(standing, train, documents, tmp_path, calm):
    job = write_job(
        tmp_path, "damaged", corpus=documents, address=standing.address, steps=STEPS, layout={"dp": 2},
        checkpoint={"every": 2, "keep": 0},
    )  # fmt: skip
    stopped = train(job, "--set", "run.stop_at=8")
    assert stopped.finish() == 75, stopped.output
    newest, before = checkpoints_of(job)[:2]
    shard = max(read_manifest(newest).shards, key=lambda shard: shard.num_bytes)
    flip(newest.path / shard.file, shard.offset + 3)
    short = before.path / read_manifest(before).shards[0].file
    short.write_bytes(short.read_bytes()[:-5])
    again = train(job, "--set", "layout.dp=1", "--set", "layout.pp=2")
    assert again.finish() == 0, again.output
    assert f"passed over {newest.name}, which is not whole" in again.output and shard.file in again.output
    assert f"passed over a checkpoint that is not whole: {short}" in again.output
    assert "goes on after step 4" in again.output
    assert_right(job, calm)


def flip(path, at):
    data = bytearray(path.read_bytes())
    data[at] ^= 0x40
    path.write_bytes(data)


@pytest.mark.timeout(300)
def test_checkpoints_on_an_object_store(standing, train, documents, tmp_path, calm, monkeypatch):
    server = pytest.importorskip("moto.server").ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    try:
        host, port = server.get_host_and_port()
        uri = f"s3://key:secret@bucket/runs/one?endpoint_override={host}:{port}&scheme=http&region=us-east-1"
        from pyarrow import fs

        system, _ = fs.FileSystem.from_uri(f"{uri}&allow_bucket_creation=true")
        system.create_dir("bucket")
        job = write_job(
            tmp_path, "stored", corpus=documents, address=standing.address, steps=STEPS, layout=LAYOUT,
            checkpoint={"every": 2, "keep": 2, "dir": uri},
        )  # fmt: skip
        stopped = train(job, "--set", "run.stop_at=6")
        assert stopped.finish() == 75, stopped.output
        again = train(job, "--set", "layout.dp=1")
        assert again.finish() == 0, again.output
        assert "goes on after step 6 of s3://bucket/runs/one/step-000000006" in again.output
        assert "secret" not in stopped.output + again.output
        found = find_checkpoints(uri)
        assert [read_manifest(folder).step for folder in found] == [STEPS, 10]
        assert list(inspect.problems(found[0], read_manifest(found[0]), on_bytes=lambda _: None)) == []
        assert curve_of(job) == curve_of(calm) and hash_of(job) == hash_of(calm)
        assert "secret" not in found[0].read("manifest.json").decode()
    finally:
        server.stop()
    until(lambda: not standing.live("stored/"), "actors and placement groups to go")
