"""Runs at the same time on one machine: they do not meet, and a cluster that is full says so."""

import subprocess
import sys

import pytest
from rayjobs import ENVIRON, curve_of, hash_of, lines_of, write_job

HOLD = """
import sys, ray
from ray.util.placement_group import placement_group
ray.init(address=sys.argv[1], log_to_driver=False)
ray.get(placement_group([{"CPU": 2}]).ready())
print("held", flush=True)
sys.stdin.read()
"""


@pytest.mark.timeout(240)
def test_three_jobs_of_the_same_second_on_one_cluster_all_finish_alike(standing, train, documents, tmp_path):
    jobs = [
        write_job(tmp_path, f"job{i}", corpus=documents, address=standing.address, steps=4, layout={"dp": 2})
        for i in range(3)
    ]
    drivers = [train(job) for job in jobs]
    assert [driver.finish() for driver in drivers] == [0, 0, 0], [driver.errors for driver in drivers]
    assert curve_of(jobs[0]) == curve_of(jobs[1]) == curve_of(jobs[2])
    assert hash_of(jobs[0]) == hash_of(jobs[1]) == hash_of(jobs[2])
    pids = [member["pid"] for job in jobs for member in lines_of(job, kind="membership")[0]["cells"].values()]
    assert len(set(pids)) == 6


@pytest.mark.timeout(240)
def test_two_private_rays_of_the_same_second_do_not_meet(train, documents, tmp_path):
    jobs = []
    for place in ("here", "there"):
        (tmp_path / place).mkdir()
        jobs.append(write_job(tmp_path / place, "same", corpus=documents, steps=4, cluster={"dashboard": True}))
    drivers = [train(job) for job in jobs]
    assert [driver.finish() for driver in drivers] == [0, 0], [driver.output for driver in drivers]
    assert curve_of(jobs[0]) == curve_of(jobs[1])
    dashboards = {line for driver in drivers for line in driver.output.splitlines() if line.startswith("dashboard: ")}
    assert len(dashboards) == 2


@pytest.mark.timeout(240)
def test_a_cluster_without_room_says_what_is_missing_and_is_left_as_it_was(standing, train, documents, tmp_path):
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, standing.address], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=ENVIRON
    )
    assert holder.stdout.readline() == b"held\n"
    job = write_job(
        tmp_path, "room", corpus=documents, address=standing.address, layout={"dp": 2}, cluster={"wait_s": 2.0}
    )
    driver = train(job)
    assert driver.finish() == 1, driver.output
    holder.communicate()
    assert driver.errors.splitlines()[0] == (
        "error: the run room failed: 2 of 2 bundles of {'CPU': 1.0} found no node within cluster.wait_s=2 s;"
        " free in the cluster: {'CPU': 0.0}; add nodes, or use a smaller layout"
    )
    assert not lines_of(job) and not lines_of(job, kind="membership")


@pytest.mark.timeout(120)
@pytest.mark.parametrize("address", ["127.0.0.1:1", "ray://127.0.0.1"])
def test_an_address_where_no_ray_answers_is_named_at_once(train, documents, tmp_path, address):
    driver = train(write_job(tmp_path, "nowhere", corpus=documents, address=address))
    assert driver.finish() == 1
    (line,) = driver.output.splitlines()
    assert line.startswith(f"error: no Ray answers at cluster.address={address}: ")
