"""A run that is stopped and submitted again goes on on the same curve, and what must not change is refused."""

import pytest
import yaml
from rayjobs import curve_of, folder_of, hash_of, lines_of, write_job

from rayformer.ckpt.manifest import find_checkpoints, read_manifest


@pytest.mark.timeout(300)
def test_a_stopped_run_goes_on_with_other_degrees_on_the_same_curve(standing, train, documents, tmp_path, one_process):
    job = write_job(tmp_path, "go", corpus=documents, address=standing.address)

    first = train(job, "--set", "run.stop_at=4", "--set", "layout.pp=2")
    assert first.finish() == 75, first.output
    assert "stopped: 4 of 8 steps; " in first.output

    second = train(job, "--set", "layout.dp=2")
    assert second.finish() == 0, second.output
    assert f"goes on after step 4 of {folder_of(job)}/checkpoints/step-000000004" in second.output
    assert curve_of(job) == curve_of(one_process) and hash_of(job) == hash_of(one_process)
    assert [line["attempt"] for line in lines_of(job)] == [1] * 4 + [2] * 4
    assert [len(line["cells"]) for line in lines_of(job, kind="membership")] == [2, 2]

    a_finished_run_says_so_and_starts_nothing(train, job)
    a_changed_rate_is_refused_with_both_values(train, job)
    nothing_is_lost_when_it_starts_anew(train, job, hash_of(one_process))


def a_finished_run_says_so_and_starts_nothing(train, job):
    before = (folder_of(job) / "journal.jsonl").read_bytes()
    again = train(job, "--set", "layout.dp=2", "--set", "cluster.address=127.0.0.1:1")
    assert again.finish() == 0, again.output
    assert "finished: 8 of 8 steps" in again.output
    assert (folder_of(job) / "journal.jsonl").read_bytes() == before


def a_changed_rate_is_refused_with_both_values(train, job):
    refused = train(job, "--set", "optim.lr=2e-3", "--set", "cluster.address=127.0.0.1:1")
    assert refused.finish() == 2, refused.output
    (line,) = refused.errors.splitlines()
    assert line.startswith("error: optim.lr=0.002: ") and "0.001" in line and "--allow-change optim.lr" in line


def nothing_is_lost_when_it_starts_anew(train, job, final):
    """With --fresh and stop_at 0 the new run holds the initial state, and the old one all that it had."""
    fresh = train(job, "--fresh", "--set", "run.stop_at=0")
    assert fresh.finish() == 75, fresh.output
    assert lines_of(job) == []
    (initial,) = find_checkpoints(folder_of(job) / "checkpoints")
    assert initial.name == "step-000000000"
    (aside,) = [path for path in folder_of(job).parent.iterdir() if path.name.startswith("go.before-")]
    old, half = find_checkpoints(aside / "checkpoints")
    assert (read_manifest(old).step, read_manifest(old).state_hash) == final and half.name == "step-000000004"
    assert len((aside / "metrics.jsonl").read_text().splitlines()) == 8
    assert {"job.yaml", "journal.jsonl", "logs"} <= {path.name for path in aside.iterdir()}

    allowed = train(job, "--set", "run.stop_at=1", "--set", "optim.lr=2e-3", "--allow-change", "optim.lr")
    assert allowed.finish() == 75, allowed.output
    assert [(line["step"], line["lr"]) for line in lines_of(job)] == [(1, 1e-3)]  # half of 2e-3: the rate warms up
    assert yaml.safe_load((folder_of(job) / "job.yaml").read_text())["optim"]["lr"] == 2e-3
