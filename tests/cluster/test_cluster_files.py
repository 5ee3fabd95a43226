"""The files that users start from: the cluster's, by Ray's own rules, and the jobs, by ours."""

import re
from pathlib import Path

import pytest
import yaml

from rayformer.cell.problems import job_problems
from rayformer.config.load import load_job

REPO = Path(__file__).parents[2]


def test_the_cluster_file_is_valid_by_the_schema_of_ray(monkeypatch):
    from ray.autoscaler._private.util import prepare_config, validate_config

    monkeypatch.chdir(REPO)
    config = yaml.safe_load((REPO / "cluster.yaml").read_text())
    validate_config(prepare_config(config))
    assert config["provider"]["type"] == "local" and len(config["provider"]["worker_ips"]) == config["max_workers"]


def test_every_node_of_the_cluster_file_sets_how_it_is_trusted_and_the_head_when_a_node_counts_as_dead():
    config = yaml.safe_load((REPO / "cluster.yaml").read_text())
    (head,) = [command for command in config["head_start_ray_commands"] if "ray start --head" in command]
    (worker,) = [command for command in config["worker_start_ray_commands"] if "ray start" in command]
    assert "RAY_AUTH_MODE=" in head and "RAY_AUTH_MODE=" in worker
    names = {name for name, _ in re.findall(r"RAY_health_check_(\w+)=(\d+)", head)}
    assert names == {"initial_delay_ms", "period_ms", "timeout_ms", "failure_threshold"}
    assert "\n" not in head, "a line break would end the command"


@pytest.mark.parametrize("job", sorted((REPO / "jobs").glob("*.yaml")), ids=lambda path: path.stem)
def test_the_jobs_that_come_along_have_no_problems(job, tmp_path):
    assert load_job(job, [f"run.dir={tmp_path}"], [job_problems]).run.name
