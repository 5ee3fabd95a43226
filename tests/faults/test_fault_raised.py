"""A program raises: in cells, for a token that the model does not have, and in the controller, for want of disk."""

import re
import resource

import pytest
from rayjobs import folder_of, lines_of, until, write_corpus, write_job


@pytest.mark.timeout(240)
def test_a_bad_token_is_told_once_with_the_cells_that_read_it_before_those_that_lost_them(standing, train, tmp_path):
    corpus = write_corpus(tmp_path / "damaged", bad_token=300)
    job = write_job(tmp_path, "token", corpus=corpus, address=standing.address, layout={"pp": 2, "dp": 2}, steps=100)
    driver = train(job)
    assert driver.finish() == 1, driver.output
    first, *rest = driver.errors.splitlines()
    pattern = r"error: the run token failed: cell (pp.\.dp(.)\.cp0\.tp0) \((worker-000.)\): DataError: .*300"
    cause = re.match(pattern, first)
    assert cause, driver.errors
    _, replica, worker = cause.groups()
    assert "Traceback" not in driver.output
    # both ends of the pipeline read the sample; the other replica only lost them
    assert re.fullmatch(rf"  the same in 1 more: pp.\.dp{replica}\.cp0\.tp0", rest[0])
    other = 1 - int(replica)
    lost = rest[1].removeprefix("  cells that only lost their connection to it: ").split(", ")
    assert sorted(lost) == [f"pp0.dp{other}.cp0.tp0", f"pp1.dp{other}.cp0.tp0"]
    assert rest[2:] == [f"  logs: {folder_of(job)}/logs", f"  report: {folder_of(job)}/report.html"]
    text = (folder_of(job) / "logs" / f"{worker}.log").read_text()
    assert f"{worker} ERROR failed" in text and "Traceback" in text and "DataError" in text
    until(lambda: not standing.live("token/"), "actors and placement groups to go")


@pytest.mark.timeout(240)
def test_a_controller_that_cannot_write_its_files_says_so_and_leaves_nothing(standing, train, documents, tmp_path):
    job = write_job(tmp_path, "full", corpus=documents, address=standing.address, steps=100_000)
    driver = train(job)
    driver.until(lambda: len(lines_of(job)) > 3, "the first steps")
    size = (folder_of(job) / "journal.jsonl").stat().st_size
    resource.prlimit(standing.pid_of("full/controller"), resource.RLIMIT_FSIZE, (size, size))  # as good as a full disk
    assert driver.finish() == 1, driver.output
    assert driver.errors.startswith("error: the run full failed: OSError: ")
    assert "Traceback" not in driver.output
    until(lambda: not standing.live("full/"), "actors and placement groups to go")


@pytest.mark.timeout(240)
def test_an_exception_that_comes_again_is_repaired_as_often_as_allowed_and_then_told(
    standing, train, documents, tmp_path
):  # B80, B84
    faults = [{"raise": "pp0.dp1", "step": 3, "at": "forward", "times": 100}]
    job = write_job(
        tmp_path, "again", corpus=documents, address=standing.address, layout={"dp": 2}, steps=100, faults=faults,
        recovery={"max_failures": 2},
    )  # fmt: skip
    driver = train(job)
    assert driver.finish() == 1, driver.output
    assert len(lines_of(job, kind="fault")) == 3  # one and two repairs
    told = driver.errors.splitlines()
    message = "RuntimeError: fault 0 of the job: raise pp0.dp1.cp0.tp0 at forward of step 3"
    assert re.fullmatch(rf"error: the run again failed: cell pp0\.dp1\.cp0\.tp0 \(worker-....\): {message}", told[0])
    assert told[1] == (
        "  then the controller: it was failure 3 of its kind in a row without a new step, and more than"
        " recovery.max_failures=2 are not repaired"
    )
    assert [line["step"] for line in lines_of(job)] == [1, 2]
    until(lambda: not standing.live("again/"), "actors and placement groups to go")
