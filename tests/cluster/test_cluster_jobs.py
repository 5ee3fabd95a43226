"""``ray job submit``: a run that is followed to its end, found in the dashboard, and stopped with a checkpoint."""

import json
import subprocess
import sys

import pytest
from rayjobs import ENVIRON, RAY, REPO, folder_of, lines_of, until, write_job

from rayformer.ckpt.manifest import find_checkpoints, read_manifest


def ray_job(standing, *arguments):
    """The output of ``ray job``, which must go well."""
    command = [RAY, "job", arguments[0], "--address", standing.dashboard, *arguments[1:]]
    done = subprocess.run(command, env=ENVIRON, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.mark.timeout(240)
def test_a_submitted_job_is_followed_to_its_end_and_its_cells_stand_in_the_dashboard(standing, documents, tmp_path):
    job = write_job(tmp_path, "sent", corpus=documents, steps=4, layout={"dp": 2})  # its address is local
    entry = [sys.executable, str(REPO / "jobs" / "pretrain.py"), str(job)]
    output = ray_job(standing, "submit", "--submission-id", "sent-1", "--", *entry)
    assert "finished: 4 of 4 steps" in output and "'sent-1' succeeded" in output
    assert [line["step"] for line in lines_of(job)] == [1, 2, 3, 4]

    assert "sent-1" in ray_job(standing, "list")
    cells = {"sent g1 pp0.dp0.cp0.tp0", "sent g1 pp0.dp1.cp0.tp0"}
    until(lambda: cells <= {row["name"] for row in standing.listed("tasks")}, "the cells in the list of tasks")
    actors = {row["name"] for row in standing.listed("actors")}
    assert {"sent/controller", "sent/worker-0000", "sent/worker-0001"} <= actors


@pytest.mark.timeout(240)
def test_ray_job_stop_gives_a_checkpoint_if_the_job_asks_for_time(standing, documents, tmp_path):
    job = write_job(tmp_path, "halt", corpus=documents, steps=100_000)
    environ = json.dumps({"env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": "100"}})
    entry = [sys.executable, str(REPO / "jobs" / "pretrain.py"), str(job)]
    ray_job(standing, "submit", "--no-wait", "--submission-id", "halt-1", "--runtime-env-json", environ, "--", *entry)
    until(lambda: len(lines_of(job)) > 3, "the first steps")
    assert "was stopped" in ray_job(standing, "stop", "halt-1")
    newest = find_checkpoints(folder_of(job) / "checkpoints")[0]
    last = lines_of(job)[-1]
    assert (read_manifest(newest).step, read_manifest(newest).state_hash) == (last["step"], last["state_hash"])
    assert "stopped: " in ray_job(standing, "logs", "halt-1")
