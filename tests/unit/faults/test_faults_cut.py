"""What a rehearsal makes of a job: small, valid, and in the layout it has."""

from copy import deepcopy
from functools import partial

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from rayformer.cell.problems import job_problems
from rayformer.config.load import job_from_tree
from rayformer.config.rules import batch_problems
from rayformer.errors import ConfigError
from rayformer.faults.cut import SAVED, STEPS, STRUCK, cut, trials
from rayformer.faults.plan import fault_problems

TREE = {
    "run": {"name": "mine", "steps": 1000, "stop_at": 500},
    "model": {"layers": 8, "hidden": 64, "heads": 4, "ffn": 96, "vocab": 257},
    "batch": {"global": 64, "micro": 4, "seq": 32},
    "optim": {"warmup_steps": 100},
    "data": {"train": [{"path": "python-stdlib"}]},
}
CHECKS = (partial(job_problems, fresh=True), fault_problems)
OWN = {"factory": "json:loads", "hidden": 64, "vocab": 257}


def changed(tree, values):
    """``tree`` with ``{"section.key": value}``."""
    tree = deepcopy(tree)
    for key, value in values.items():
        section, _, name = key.partition(".")
        if name:
            tree.setdefault(section, {})[name] = value
        else:
            tree[section] = value
    return tree


def job_of(values, checks=CHECKS):
    return job_from_tree(changed(TREE, values), checks)


def short_of(job, checks=CHECKS):
    return job_from_tree(changed(job.dump(), cut(job)), checks)


def trials_of(job):
    return {trial.kind: trial for trial in trials(short_of(job), job.run.name)}


@pytest.mark.parametrize(
    ("values", "layers"),
    [
        ({}, 2),
        ({"model.layers": 1}, 1),
        ({"layout.pp": 2}, 2),
        ({"layout.pp": 4}, 4),
        ({"layout.pp": 8}, 8),
        ({"layout.pp": 2, "layout.tp": 2, "layout.dp": 2}, 2),
    ],
    ids=str,
)
def test_every_stage_keeps_a_layer_and_the_model_two(values, layers):
    assert short_of(job_of(values)).model.layers == layers


@pytest.mark.parametrize(
    ("drawn", "pp", "left", "layers"),
    [
        ("Et*4|t*4L", 2, "Et|tL", 2),
        ("E|t*4|t*4|L", 4, "E|t|t|L", 2),
        ("E|t*8|L", 3, "E|tt|L", 2),
        ("Ett|(ttt|)*2L", 4, "Et|t|t|L", 3),
    ],
)
def test_a_drawing_keeps_its_stages(drawn, pp, left, layers):
    short = short_of(job_of({"layout.stages": drawn, "layout.pp": pp}))
    assert (short.layout.stages, short.model.layers) == (left, layers)


TABLE = "F0 F1 B0 B1\nF0 B0 F1 B1"


@pytest.mark.parametrize(
    ("values", "left"),
    [
        ({"schedule.name": "interleaved", "layout.virtual_stages": 2, "schedule.group": 8}, "interleaved"),
        ({"schedule.name": "table", "schedule.table": TABLE, "batch.global": 8}, "1f1b"),
        ({"schedule.name": "zbv", "layout.virtual_stages": 2}, "zbv"),
    ],
)
def test_the_schedule_fits_the_trials(values, left):
    short = short_of(job_of({"layout.pp": 2, **values}))
    assert (short.schedule.name, short.schedule.group, short.schedule.table) == (left, None, "")
    for trial in trials(short, "mine"):
        assert job_from_tree(changed(short.dump(), {k: v for k, v in trial.changes.items() if "[" not in k}), CHECKS)


def test_more_chunks_than_ranks_need_as_many_layers():
    job = job_of({"layout.pp": 2, "layout.virtual_stages": 3}, checks=[batch_problems])  # no schedule has them so far
    assert short_of(job, [batch_problems]).model.layers == 6


@pytest.mark.parametrize(
    ("values", "size", "micro", "dp"),
    [
        ({}, 8, 2, 2),  # room for a second replica of one microbatch
        ({"batch.micro": 1}, 4, 2, 2),  # one microbatch of twice the size must be possible too
        ({"batch.micro": 3, "batch.global": 63}, 6, 1, 2),
        ({"layout.dp": 2}, 8, 2, 1),
        ({"layout.dp": 2, "layout.pp": 2}, 16, 2, 1),  # two microbatches in each pipeline
        ({"layout.dp": 2, "layout.pp": 2, "batch.virtual_ranks": 4}, 16, 2, 1),  # which that many shares are already
        ({"layout.dp": 2, "layout.pp": 4, "batch.virtual_ranks": 3, "batch.global": 120}, 24, 2, 1),
        ({"layout.dp": 3, "batch.global": 60}, 12, 2, 1),
        ({"layout.dp": 8}, 32, 2, 4),
        ({"layout.dp": 8, "batch.virtual_ranks": 16}, 64, 2, 4),
        ({"batch.micro": 1, "batch.global": 3}, 2, 2, 2),  # as near to that as the batch goes
        ({"batch.global": 4}, 4, 2, 2),  # no larger than it was; the second replica is then refused
    ],
    ids=str,
)
def test_the_batch_is_the_smallest_that_the_trials_can_share(values, size, micro, dp):
    job = job_of(values)
    found = trials_of(job)
    assert short_of(job).batch.global_ == size and short_of(job).batch.micro == job.batch.micro
    assert found["micro"].changes["batch.micro"] == micro and found["dp"].changes["layout.dp"] == dp


def test_a_growing_batch_grows_in_the_step_in_which_the_cell_is_lost():
    ramp = {"start": 16, "increment": 16, "samples": 1000}
    batch = short_of(job_of({"layout.dp": 2, "batch.rampup": ramp})).batch
    sizes, consumed = [], 0
    for _ in range(STEPS):
        sizes.append(batch.size_after(consumed))
        consumed += sizes[-1]
    assert sizes == [8] * (STRUCK - 1) + [16] * (STEPS - STRUCK + 1)


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"optim.decay_steps": 300},
        {"optim.decay": "wsd", "optim.wsd_steps": 200},
        {"run.steps": 2, "run.stop_at": None, "optim.warmup_steps": 2},
    ],
    ids=str,
)
def test_the_rate_is_that_of_the_first_steps_of_the_whole_job(values):
    job = job_of(values)
    decay_steps = job.run.steps if job.optim.decay_steps == "auto" else job.optim.decay_steps
    assert short_of(job).optim == job.optim.model_copy(update={"decay_steps": decay_steps})


@pytest.mark.parametrize(("every", "left"), [("auto", "auto"), (0, 0), (1, 1), (2, 2), (50, 2)])
def test_there_is_a_snapshot_to_repair_from_if_the_job_takes_any(every, left):
    assert short_of(job_of({"recovery.snapshot_every": every})).recovery.snapshot_every == left


def test_what_is_rehearsed_stays_as_it_is():
    values = {
        "layout.tp": 2,
        "layout.sequence_parallel": True,
        "precision.params": "bf16",
        "recompute.mode": "full",
        "recovery.max_failures": 0,
        "recovery.standbys_per_node": 3,
        "cluster.device": "cuda",
        "cluster.address": "auto",
        "model.dropout": 0.1,
        "run.seed": 7,
        "schedule.name": "gpipe",
    }
    job = job_of(values)
    left = set(cut(job)) - {key for key in cut(job) if key.startswith(("checkpoint.", "eval."))}
    assert left == {
        "model.layers", "run.steps", "run.stop_at", "batch.global", "optim.decay_steps", "cluster.dashboard",
        "observe.progress",
    }  # fmt: skip


def test_folders_and_faults_of_the_job_have_no_part_in_it():
    job = job_of({"checkpoint.dir": "/elsewhere", "checkpoint.every": 0, "faults": [{"raise": "pp0", "step": 3}]}, [])
    short = short_of(job)
    assert (short.checkpoint.dir, short.checkpoint.every, short.checkpoint.keep) == ("auto", SAVED, 0)
    assert short.faults == ()
    names = [trial.changes["run.name"] for trial in trials_of(job).values()]
    assert names == [f"mine-rehearsal-{kind}" for kind in ("calm", "struck", "micro", "dp")]


def test_a_long_name_leaves_room_for_the_ending():
    job = job_of({"run.name": "x" * 64})
    for trial in trials_of(job).values():
        assert job_from_tree(changed(short_of(job).dump(), trial.changes)).run.name.endswith(f"-rehearsal-{trial.kind}")


def test_there_is_nothing_to_cut_in_a_model_of_the_users_own():
    job = job_from_tree({**TREE, "model": OWN}, [batch_problems])
    assert not [key for key in cut(job) if key.startswith(("model", "layout"))]


@pytest.mark.parametrize(
    ("values", "possible"),
    [
        ({}, ["pp0.dp0.cp0.tp0"]),
        ({"layout.dp": 2}, ["pp0.dp1.cp0.tp0"]),
        ({"layout.pp": 2, "layout.tp": 2}, ["pp0.dp0.cp0.tp1", "pp1.dp0.cp0.tp0", "pp1.dp0.cp0.tp1"]),
    ],
    ids=str,
)
def test_the_lost_cell_is_not_the_first_unless_there_is_no_other(values, possible):
    first, again = (trials_of(job_of(values))["struck"] for _ in range(2))
    (fault,) = first.changes["faults"]
    assert first == again and fault["kill"] in possible
    assert first.about == {"faults[0].kill": fault["kill"]} and (fault["step"], fault["at"]) == (STRUCK, "backward")


def test_standbys_wait_only_where_a_cell_is_lost():
    with_standbys = [
        trial.kind for trial in trials_of(job_of({})).values() if "recovery.standbys_per_node" not in trial.changes
    ]
    assert with_standbys == ["struck"]


@pytest.mark.parametrize(("dp", "waits"), [(1, 30.0), (2, None)])
def test_devices_that_the_job_does_not_need_are_not_waited_for_long(dp, waits):
    assert trials_of(job_of({"layout.dp": dp}))["dp"].changes.get("cluster.wait_s") == waits


@pytest.mark.parametrize(
    ("values", "ranks"), [({"layout.dp": 2}, 2), ({"layout.dp": 2, "batch.virtual_ranks": 4}, 4), ({}, 2)], ids=str
)
def test_the_virtual_ranks_stay_when_the_width_changes_unless_there_were_too_few(values, ranks):
    assert trials_of(job_of(values))["dp"].changes["batch.virtual_ranks"] == ranks


@settings(max_examples=300)
@given(
    dp=st.integers(1, 9),
    pp=st.integers(1, 8),
    micro=st.integers(1, 12),
    ranks=st.one_of(st.just("auto"), st.integers(1, 20)),
    times=st.integers(1, 6),
    ramp=st.booleans(),
)
def test_every_valid_job_is_cut_to_a_valid_one_of_which_nothing_more_is_cut(dp, pp, micro, ranks, times, ramp):
    unit = micro * max(dp, 1 if ranks == "auto" else ranks)
    values = {
        "layout.dp": dp,
        "layout.pp": pp,
        "batch.micro": micro,
        "batch.virtual_ranks": ranks,
        "batch.global": unit * times,
    }
    if ramp:
        assume(times > 1)
        values["batch.rampup"] = {"start": unit, "increment": unit, "samples": 100}
    job = job_of(values, [batch_problems])
    short = short_of(job, [batch_problems])
    assert cut(short) == {}
    assert short.batch.global_ <= job.batch.global_
    if pp > 1 and times > 1 and not ramp:
        assert fewest_microbatches(short) >= 2
    for trial in trials(short, job.run.name):
        try:
            job_from_tree(changed(short.dump(), trial.changes), [batch_problems, fault_problems])
        except ConfigError:
            assert trial.resumes and (times == 1 or ramp), trial


def fewest_microbatches(job):
    """Of the replica that has the fewest, in one step."""
    dp, ranks = job.layout.dp, job.batch.virtual_ranks
    ranks = max(dp, 1 if ranks == "auto" else ranks)
    return job.batch.num_microbatches // ranks * (ranks // dp)
