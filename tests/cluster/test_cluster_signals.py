"""Signals to a running command with a Ray of its own: a checkpoint first, then the end, and nothing left behind."""

import os
import signal

import pytest
from rayjobs import alive, curve_of, descendants, folder_of, lines_of, until, write_job

from rayformer.ckpt.manifest import find_checkpoints, read_manifest


@pytest.fixture
def job(documents, tmp_path):
    """A job that goes on for long."""
    return write_job(tmp_path, "long", corpus=documents, steps=100_000, layout={"dp": 2})


def newest_step(job):
    return read_manifest(find_checkpoints(folder_of(job) / "checkpoints")[0]).step


def started(train, job, more_than):
    """The command, when it has done more than so many steps, and all processes that belong to it."""
    driver = train(job)
    driver.until(lambda: len(lines_of(job)) > more_than + 2, "the first steps")
    family = descendants(driver.pid)
    names = " ".join(family.values())
    assert all(part in names for part in ("raylet", "gcs_server", "ray::Worker", "ray::Controller"))
    return driver, family


@pytest.mark.timeout(300)
def test_the_first_signal_stops_with_a_checkpoint_and_the_second_at_once(train, start, job):
    driver, family = started(train, job, 0)
    second = start("rayformer.cell", job, "--set", "layout.dp=1")
    assert second.finish() == 1
    assert f"is live: driver pid {driver.pid} on host" in second.errors

    # Ctrl-C: the terminal tells every process of the group
    os.killpg(driver.pid, signal.SIGINT)
    assert driver.finish() == 75, driver.output
    until(lambda: not alive(family), f"{alive(family)} to end")
    step = newest_step(job)
    assert lines_of(job)[-1]["step"] == step and lines_of(job)[-1]["state_hash"]
    assert f"stopped: {step} of 100000 steps" in driver.output

    # SIGTERM to the driver alone, as a scheduler does
    driver, family = started(train, job, step)
    assert f"goes on after step {step} " in driver.output
    os.kill(driver.pid, signal.SIGTERM)
    assert driver.finish() == 75, driver.output
    until(lambda: not alive(family), f"{alive(family)} to end")
    assert newest_step(job) > step
    assert list(curve_of(job)) == list(range(1, newest_step(job) + 1))

    # twice: the driver does not wait
    driver, family = started(train, job, newest_step(job))
    os.killpg(driver.pid, signal.SIGINT)
    driver.until(lambda: "once more to stop at once" in driver.output, "an answer to the first signal")
    os.killpg(driver.pid, signal.SIGINT)
    assert driver.finish() == 130, driver.output
    until(lambda: not alive(family), f"{alive(family)} to end", deadline_s=30)


@pytest.mark.timeout(120)
def test_a_signal_while_ray_starts_ends_that_too(train, job):
    driver = train(job)
    driver.until(lambda: "raylet" in " ".join(descendants(driver.pid).values()), "the raylet to come up")
    family = descendants(driver.pid)
    os.kill(driver.pid, signal.SIGTERM)
    assert driver.finish() == 130, driver.output
    family |= descendants(driver.pid)
    until(lambda: not alive(family), f"{alive(family)} to end", deadline_s=30)
    assert not lines_of(job)
