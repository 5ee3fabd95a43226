"""A plan of faults: what it may say, what is drawn by its seeds, and what it becomes."""

import pytest

from rayformer.cell.progress import PHASES
from rayformer.config.faults import EFFECTS, FaultConfig
from rayformer.config.job import Job
from rayformer.config.load import job_from_tree
from rayformer.errors import ConfigError
from rayformer.faults.plan import NAMED_INSTRUCTIONS, Fault, fault_problems, resolve_faults
from rayformer.layout import Layout

LAYOUT = Layout(tp=2, pp=2, dp=2)
GOLDEN = [("pp1.dp1.cp0.tp1", 8, "data"), ("pp1.dp1.cp0.tp1", 6, "update"), ("pp0.dp1.cp0.tp0", 8, "vote")]
TREE = {
    "run": {"name": "r", "steps": 20},
    "model": {"layers": 4, "hidden": 64, "heads": 4, "ffn": 96, "vocab": 257},
    "layout": {"tp": 2, "pp": 2, "dp": 2},
    "batch": {"global": 16, "micro": 2, "seq": 32},
    "data": {"train": [{"path": "python-stdlib"}]},
}


def job_with(*entries, **layout):
    tree = {**TREE, "layout": {**TREE["layout"], **layout}, "faults": list(entries)}
    return job_from_tree(tree, [fault_problems])


def resolved(*entries, layout=LAYOUT):
    return resolve_faults([FaultConfig.model_validate(entry) for entry in entries], layout)


def problems_of(*entries, **layout):
    with pytest.raises(ConfigError) as error:
        job_with(*entries, **layout)
    return [str(problem) for problem in error.value.problems]


def test_a_fault_is_concrete_with_its_cell_written_in_full_and_numbered_in_order():
    faults = resolved(
        {"kill": "tp1.pp1", "step": 7, "at": "backward"},
        {"slow": "dp1", "step": 3, "microbatch": 2, "seconds": 0.5, "times": 4},
        {"gil": "pp0", "step": 4, "at": "RecvGrad"},
        {"drop_node": "pp1", "step": 9},
    )
    assert faults == (
        Fault(number=0, effect="kill", cell="pp1.dp0.cp0.tp1", step=7, at="backward"),
        Fault(
            number=1, effect="slow", cell="pp0.dp1.cp0.tp0", step=3, at="forward", microbatch=2, seconds=0.5, times=4
        ),
        Fault(number=2, effect="gil", cell="pp0.dp0.cp0.tp0", step=4, at="RecvGrad", seconds=600.0),
        Fault(number=3, effect="drop_node", cell="pp1.dp0.cp0.tp0", step=9, at="forward"),
    )


@pytest.mark.parametrize("effect", EFFECTS)
def test_every_effect_can_be_written(effect):
    (fault,) = resolved({effect: "pp1", "step": 1})
    assert fault.effect == effect and fault.times == 1


@pytest.mark.parametrize("at", [*PHASES, *NAMED_INSTRUCTIONS])
def test_every_phase_and_instruction_can_be_written(at):
    assert resolved({"kill": "pp1", "step": 1, "at": at})[0].at == at


def test_the_faults_of_a_job_survive_being_written_down():
    job = job_with({"raise": "pp1", "step": [3, 5], "seed": 1}, {"gil": "any", "step": 2, "seed": 4, "seconds": 2})
    assert Job.model_validate(job.dump()) == job
    assert job.dump()["faults"][0] == {"raise": "pp1", "step": [3, 5], "at": "forward", "seed": 1, "times": 1}


def test_a_concrete_fault_written_as_an_entry_is_itself_again():
    faults = resolved(
        {"kill": "any", "step": [3, 9], "at": "any", "seed": 5}, {"slow": "pp1", "step": 2, "microbatch": 1}
    )
    assert resolved(*(fault.entry() for fault in faults)) == faults


def drawn(seed, entry=None):
    return resolved(*[{"kill": "any", "step": [5, 15], "at": "any", "seed": seed, **(entry or {})}] * 3)


def test_what_is_drawn_is_the_same_every_time_and_on_every_machine():
    assert [(fault.cell, fault.step, fault.at) for fault in drawn(1)] == GOLDEN


def test_what_is_drawn_differs_by_seed_and_by_place_in_the_plan():
    assert len({drawn(seed) for seed in range(50)}) == 50
    assert len({(fault.cell, fault.step, fault.at) for fault in drawn(1)}) == 3


def test_all_that_can_be_drawn_is_drawn_by_some_seed():
    many = [fault for seed in range(200) for fault in drawn(seed)]
    assert {fault.cell for fault in many} == {str(cell) for cell in LAYOUT.cells()}
    assert {fault.step for fault in many} == set(range(5, 16))
    places = {"data", "forward", "backward", "reduce", "vote", "update", "gather", "snapshot"}
    assert {fault.at for fault in many} == places


@pytest.mark.parametrize("entry", [{"microbatch": 1}, {"kill": None, "nan": "any"}])
def test_where_a_microbatch_or_a_gradient_is_meant_only_passes_are_drawn(entry):
    assert {fault.at for seed in range(30) for fault in drawn(seed, entry)} == {"forward", "backward"}


def test_all_bad_entries_are_told_at_once_and_the_good_ones_not():
    told = problems_of(
        {"kill": "pp9.dp0", "step": 7},
        {"kill": "pp1", "step": 7},
        {"kill": "pp1", "step": "soon"},
        {"raise": "pp1", "step": 99, "at": "warp"},
    )
    assert [line.partition(":")[0] for line in told] == [
        "faults[2].step=soon",
        "faults[0].kill=pp9.dp0",
        "faults[3].at=warp",
        "faults[3].step=99, run.steps=20",
    ]


def test_a_width_that_is_not_known_yet_is_checked_once_it_is():
    job = job_with({"kill": "dp5", "step": 7}, dp="auto")
    with pytest.raises(ConfigError, match=r"faults\[0\].kill=dp5: layout.dp=2 has no dp5; use dp0 to dp1"):
        resolve_faults(job.faults, LAYOUT)
    assert resolve_faults(job.faults, Layout(dp=6))[0].cell == "pp0.dp5.cp0.tp0"


def test_one_axis_too_far_is_told_for_each_axis():
    told = problems_of({"kill": "pp2.dp2.tp7", "step": 1})
    assert [line.partition(";")[0] for line in told] == [
        f"faults[0].kill=pp2.dp2.tp7: layout.{axis}=2 has no {axis}{at}"
        for axis, at in (("tp", 7), ("dp", 2), ("pp", 2))
    ]
