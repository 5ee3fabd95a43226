"""Workers are killed one after the other while a run goes on: each is replaced alone, and the curve keeps its bits."""

import os
import signal
import sys

import pytest
from rayjobs import Driver, curve_of, folder_of, hash_of, lines_of, until, write_job

STEPS = 400
FIRST, LAST = "pp0.dp0.cp0.tp0", "pp1.dp1.cp0.tp0"


def members(job):
    return lines_of(job, kind="membership")[-1]["cells"]


def recoveries(job):
    return lines_of(job, kind="recovered")


def kill(driver, job, cell, *, after):
    """Kill the owner of ``cell`` when so many steps are told; the ``recovered`` line, and the members before."""
    driver.until(lambda: len(lines_of(job)) >= after, f"{after} steps")
    before, known = members(job), len(recoveries(job))
    os.kill(before[cell]["pid"], signal.SIGKILL)
    driver.until(lambda: len(recoveries(job)) > known, f"{cell} to be replaced")
    return recoveries(job)[-1], before


@pytest.fixture(scope="module")
def undisturbed(documents, tmp_path_factory):
    """The job in one process, which nothing happens to."""
    folder = tmp_path_factory.mktemp("undisturbed")
    job = write_job(folder, "calm", corpus=documents, steps=STEPS)
    driver = Driver([sys.executable, "-m", "rayformer.cell", job], folder=folder)
    assert driver.finish() == 0, driver.output
    return job


@pytest.mark.timeout(300)
def test_killed_workers_are_replaced_alone_and_the_curve_keeps_its_bits(
    standing, train, documents, tmp_path, undisturbed
):
    job = write_job(
        tmp_path, "killed", corpus=documents, address=standing.address, steps=STEPS, layout={"pp": 2, "dp": 2},
        recovery={"standbys_per_node": 1, "snapshot_every": 1}, checkpoint={"every": 0},
    )  # fmt: skip
    driver = train(job)
    for cell, after in ((LAST, 4), (FIRST, 30)):
        line, before = kill(driver, job, cell, after=after)
        assert line["cells"] == [cell] and line["source"] == "holder" and "died" in line["cause"]
        assert line["steps_redone"] <= 1 and line["disk_bytes"] == 0
        own = 3 * 4 * 80_000 // 4  # at most the masters and moments of one cell of four
        assert 0 < line["bytes_moved"] <= 4 * own  # survivors that were a step ahead go back to it
        after_it = members(job)
        assert after_it[cell]["pid"] != before[cell]["pid"]
        assert {c: m for c, m in after_it.items() if c != cell} == {c: m for c, m in before.items() if c != cell}
    assert driver.finish() == 0, driver.output
    assert curve_of(job) == curve_of(undisturbed)
    assert list(curve_of(job)) == list(range(1, STEPS + 1))
    assert hash_of(job) == hash_of(undisturbed)
    assert driver.output.count("recovered ") == 2 and len(recoveries(job)) == 2
    until(lambda: not standing.live("killed/"), "actors and placement groups to go")
    assert not list(folder_of(job).glob("checkpoints/*.tmp"))


@pytest.mark.timeout(300)
def test_a_frozen_worker_is_found_named_and_replaced(standing, train, documents, tmp_path, undisturbed):
    job = write_job(
        tmp_path, "frozen", corpus=documents, address=standing.address, steps=STEPS, layout={"pp": 2},
        recovery={"standbys_per_node": 1, "snapshot_every": 1},
    )  # fmt: skip
    driver = train(job)
    driver.until(lambda: len(lines_of(job)) >= 10, "some steps")
    cell = "pp1.dp0.cp0.tp0"
    frozen = members(job)[cell]["pid"]
    os.kill(frozen, signal.SIGSTOP)
    driver.until(lambda: recoveries(job), "it to be replaced")
    (stall,) = lines_of(job, kind="stall")
    assert stall["cell"] == cell and stall["reason"] == "its process is stopped" and stall["instruction"]
    assert recoveries(job)[0]["cells"] == [cell] and "its process is stopped" in recoveries(job)[0]["cause"]
    assert driver.finish() == 0, driver.output
    assert curve_of(job) == curve_of(undisturbed) and hash_of(job) == hash_of(undisturbed)
    until(lambda: not os.path.exists(f"/proc/{frozen}"), "the frozen process to end")


@pytest.mark.timeout(120)
def test_the_only_cell_of_a_run_is_replaced_and_that_is_told(standing, train, documents, tmp_path):
    job = write_job(
        tmp_path, "alone", corpus=documents, address=standing.address, steps=8,
        faults=[{"kill": "pp0", "step": 5, "at": "backward"}], recovery={"snapshot_every": 1},
    )  # fmt: skip
    driver = train(job)
    assert driver.finish() == 0, driver.output
    (line,) = recoveries(job)
    assert (line["cells"], line["source"], line["step"]) == (["pp0.dp0.cp0.tp0"], "holder", 4)
    assert line["total_s"] >= line["restore_s"] > 0 and driver.output.count("recovered ") == 1
