"""A node dies: its cells go on elsewhere from copies that another node keeps; without room the run stops in order."""

import os
import sys

import pytest
from ray.cluster_utils import Cluster
from rayjobs import Driver, curve_of, hash_of, lines_of, write_job

from rayformer.ckpt.manifest import find_checkpoints

FAST = {
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 500,
    "health_check_timeout_ms": 1000,
    "health_check_failure_threshold": 3,
}
STEPS = 600
# Steps of some tenths of a second: a copy on another node is that old, and must be of a step that all still have.


@pytest.fixture
def cluster():
    """A head that computes nothing, and nodes added by the test."""
    os.environ["RAY_AUTH_MODE"] = "disabled"
    made = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False, "_system_config": FAST}
    )
    yield made
    made.shutdown()


def members(job):
    return lines_of(job, kind="membership")[-1]["cells"]


@pytest.mark.timeout(280)
def test_a_lost_node_is_replaced_by_a_spare_bundle_and_then_by_later_room(cluster, train, documents, tmp_path):
    nodes = [cluster.add_node(num_cpus=2) for _ in range(3)]
    job = write_job(
        tmp_path, "nodes", corpus=documents, address=cluster.address, steps=STEPS, layout={"tp": 2, "pp": 2},
        batch={"global": 32, "micro": 1, "seq": 16, "virtual_ranks": 1},
        recovery={"standbys_per_node": 0, "spare_bundles": 1, "snapshot_every": 1},
        checkpoint={"every": 0}, cluster={"wait_s": 2.0},
    )  # fmt: skip
    driver = train(job)
    driver.until(lambda: len(lines_of(job)) >= 6, "some steps")
    before = members(job)
    lost = next(node for node in nodes if node.node_id == before["pp1.dp0.cp0.tp0"]["node"])
    cluster.remove_node(lost)
    driver.until(lambda: lines_of(job, kind="recovered"), "the node's cells to go on elsewhere")
    (line,) = lines_of(job, kind="recovered")
    assert line["cells"] == ["pp1.dp0.cp0.tp0", "pp1.dp0.cp0.tp1"] and line["source"] == "second_holder"
    after = members(job)
    for cell in ("pp0.dp0.cp0.tp0", "pp0.dp0.cp0.tp1"):
        assert after[cell] == before[cell]
    assert len({after[cell]["node"] for cell in line["cells"]}) == 1  # a tp group never spans nodes
    assert lost.node_id not in {member["node"] for member in after.values()}

    second = next(node for node in nodes if node.node_id == after["pp1.dp0.cp0.tp0"]["node"])
    steps = len(lines_of(job))
    driver.until(lambda: len(lines_of(job)) >= steps + 5, "more steps")
    cluster.remove_node(second)
    assert driver.finish() == 75, driver.output
    (checkpoint,) = find_checkpoints(tmp_path / "runs" / "nodes" / "checkpoints")
    stopped = int(checkpoint.name.removeprefix("step-"))
    assert stopped >= steps and f"stopped: {stopped} of {STEPS} steps" in driver.output

    cluster.add_node(num_cpus=2)
    again = train(job, "--set", f"run.stop_at={stopped + 20}", "--set", "recovery.spare_bundles=0")
    assert again.finish() == 75, again.output
    assert f"goes on after step {stopped} of " in again.output

    calm = write_job(
        tmp_path, "calm", corpus=documents, steps=STEPS, layout={"tp": 2, "pp": 2},
        batch={"global": 32, "micro": 1, "seq": 16, "virtual_ranks": 1}, run={"stop_at": stopped + 20},
    )  # fmt: skip
    arguments = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4", "-m", "rayformer.cell", calm]
    undisturbed = Driver([sys.executable, *arguments], folder=tmp_path)
    undisturbed.finish()  # torchrun makes a 1 of it
    assert curve_of(job) == curve_of(calm) and hash_of(job) == hash_of(calm)
