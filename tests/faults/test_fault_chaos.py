"""``rayformer chaos``: every fault of a plan takes place, is proven, and the run ends with the bits of a calm one."""

import json

import pytest
import yaml
from rayjobs import write_job

PLAN = [
    {"kill_holder": "pp0.dp0", "step": 8},  # the cells go on, and take their snapshots elsewhere
    {"raise": "pp0.dp1", "step": 130, "at": "forward"},
    {"kill": "pp1.dp0", "step": 180, "at": "snapshot"},
    {"nan": "pp1.dp1", "step": 200, "at": "backward"},
    {"freeze": "pp0.dp0", "step": 220, "at": "gather"},
    {"kill": "pp0.dp0", "step": 245, "at": "backward"},
    {"kill": "pp1.dp1", "step": 245, "at": "backward"},
    {"kill_holder": "pp1.dp0", "step": 255, "at": "vote"},
    {"kill": "pp1.dp0", "step": 255, "at": "vote"},
]
CELL = "pp{}.dp{}.cp0.tp0"


@pytest.mark.timeout(290)
def test_a_plan_of_faults_is_proven_and_the_bits_are_those_of_the_calm_run(standing, start, documents, tmp_path):
    job = write_job(
        tmp_path, "storm", corpus=documents, address=standing.address, steps=260, layout={"pp": 2, "dp": 2},
        recovery={"standbys_per_node": 1, "snapshot_every": 1}, checkpoint={"every": 50},
    )  # fmt: skip
    plan, found = tmp_path / "plan.yaml", tmp_path / "found.json"
    plan.write_text(yaml.safe_dump(PLAN))
    chaos = start("rayformer.cli.main", "chaos", job, "--plan", plan, "--seed", "3", "--json", found)
    assert chaos.finish(250) == 0, chaos.output
    told = json.loads(found.read_text())
    assert "equal: the final state, and every step's loss and grad_norm" in chaos.output
    assert len(told["faults"]) == len(PLAN) and all(fault["lines"] for fault in told["faults"]), told["faults"]
    cells = [incident["cells"] for incident in told["incidents"]]
    assert cells == [[CELL.format(*at)] for at in ((0, 1), (1, 0), (0, 0))] + [
        [CELL.format(0, 0), CELL.format(1, 1)],
        [CELL.format(1, 0)],
    ]
    sources = [incident["source"] for incident in told["incidents"]]
    assert sources == ["holder"] * 4 + ["checkpoint"]  # a cell that is lost with its holder is lost with its snapshots
    why = [incident["why"] for incident in told["incidents"]]
    assert why == [None] * 4 + [f"no memory of {CELL.format(1, 0)} is left"]
