"""A worker dies in a run that repairs nothing, then the controller: one clear error, and then the run goes on."""

import os
import re
import signal

import pytest
from rayjobs import alive, curve_of, folder_of, lines_of, until, write_job

from rayformer.ckpt.manifest import find_checkpoints

FIRST, SECOND, THIRD = "pp0.dp0.cp0.tp0", "pp1.dp0.cp0.tp0", "pp2.dp0.cp0.tp0"


def started(train, job, *arguments):
    """The command, when its attempt has done some steps, and the processes of its cells."""
    attempts = len(lines_of(job, kind="membership"))
    driver = train(job, *arguments)
    driver.until(lambda: len(lines_of(job, kind="membership")) > attempts, "the cells to come up")
    steps = len(lines_of(job))
    driver.until(lambda: len(lines_of(job)) > steps + 6, "some steps")
    driver.until(lambda: lines_of(job, kind="saved"), "a checkpoint")
    members = lines_of(job, kind="membership")[-1]["cells"]
    return driver, {cell: member["pid"] for cell, member in members.items()}


def newest_step(job):
    return int(find_checkpoints(folder_of(job) / "checkpoints")[0].name.removeprefix("step-"))


@pytest.mark.timeout(300)
def test_a_lost_worker_or_controller_ends_the_run_by_name_and_the_next_submission_goes_on(
    standing, train, documents, tmp_path
):
    job = write_job(
        tmp_path, "lost", corpus=documents, address=standing.address, steps=100_000, layout={"pp": 3},
        checkpoint={"every": 5}, recovery={"max_failures": 0},
    )  # fmt: skip

    # one cell dies while another is frozen: the frozen one can't answer, and is ended with the rest
    driver, pids = started(train, job)
    os.kill(pids[THIRD], signal.SIGSTOP)
    os.kill(pids[SECOND], signal.SIGKILL)
    assert driver.finish() == 1, driver.output
    error = driver.errors.splitlines()
    assert error[0].startswith(f"error: the run lost failed: cell {SECOND} (worker-0001): its process died: ")
    frozen = rf"  then cell {THIRD} \(worker-0002\): it has been in .* in step .* for .* s: its process is stopped"
    assert re.fullmatch(frozen, error[1]), error[1]
    assert error[2:] == [
        f"  cells that only lost their connection to it: {FIRST}",
        f"  logs: {folder_of(job)}/logs",
        f"  report: {folder_of(job)}/report.html",
    ]
    assert "Traceback" not in driver.output
    until(lambda: not alive(dict.fromkeys(pids.values(), "")), "the processes of the cells to end")
    until(lambda: not standing.live("lost/"), "actors and placement groups to go")
    assert [line["kind"] for line in lines_of(job, kind="failed")] == ["failed"]

    # the controller dies, and takes its workers along; before that, nobody else may drive its run
    step = newest_step(job)
    driver, pids = started(train, job)
    assert f"goes on after step {step} of " in driver.output
    nobody_else_drives(train, job)
    os.kill(standing.pid_of("lost/controller"), signal.SIGKILL)
    assert driver.finish() == 1, driver.output
    assert driver.errors.startswith("error: the controller is gone, and its workers with it; submit the job again")
    assert len(driver.errors.splitlines()) == 1 and "Traceback" not in driver.output
    until(lambda: not standing.live("lost/"), "actors and placement groups to go")

    step = newest_step(job)
    driver = train(job, "--set", f"run.stop_at={step + 3}")
    assert driver.finish() == 75, driver.output
    assert f"goes on after step {step} of " in driver.output and newest_step(job) == step + 3
    # Steps done twice had the same bits, see curve_of. What a dying controller has not heard of is in no file, be it
    # in a checkpoint: the last steps before that.
    assert set(range(1, step + 4)) - set(curve_of(job)) <= set(range(step - 4, step + 1))


def nobody_else_drives(train, job):
    """A second driver is refused by the run's name, also from a folder of its own, and touches nothing."""
    before = sorted(folder_of(job).parent.iterdir())
    for arguments in (["--fresh"], ["--set", f"run.dir={job.parent}/elsewhere"]):
        second = train(job, *arguments)
        assert second.finish() == 1, second.output
        assert second.errors.startswith("error: the run lost is live in this cluster: its controller 'lost/controller'")
    assert sorted(folder_of(job).parent.iterdir()) == before
