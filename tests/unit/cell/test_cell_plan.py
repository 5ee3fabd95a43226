"""Where a run starts from: a first start, its own newest checkpoint, or one that it names."""

import shutil
from pathlib import Path

import pytest

from rayformer.cell.plan import data_parallel_width, open_run, plan_run
from rayformer.cell.problems import job_problems
from rayformer.ckpt.manifest import Manifest, find_checkpoints, step_folder
from rayformer.ckpt.storage import folder_at
from rayformer.ckpt.writer import commit, prune
from rayformer.config.job import resolve
from rayformer.config.load import job_from_tree
from rayformer.errors import ConfigError, RunError

TREE = {
    "run": {"name": "r", "steps": 20},
    "model": {"layers": 2, "hidden": 32, "heads": 4, "ffn": 48, "vocab": 257},
    "batch": {"global": 12, "micro": 1, "seq": 16},
    "data": {"train": [{"path": "python-stdlib"}]},
}


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def job_of(**changes):
    tree = {section: dict(values) for section, values in TREE.items()}
    for key, value in changes.items():
        section, name = key.split("__")
        tree.setdefault(section, {})[name] = value
    return job_from_tree(tree, [])


def checkpoint(job, step, *, dp=1, folder=None):
    """A checkpoint without a tensor, of ``job`` as it would have been resolved at ``dp``."""
    folder = (folder or Path("runs/r/checkpoints")) / step_folder(step)
    folder.mkdir(parents=True)
    resolved = resolve(job, dp=dp, recorded={})
    manifest = Manifest(
        step=step,
        consumed_samples=step * 12,
        layout={"dp": dp},
        virtual_ranks=resolved.batch.num_virtual_ranks,
        order="keyed",
        job=resolved.dump(),
        environment={},
        state_hash="0" * 16,
        shards=[],
    )
    commit(folder_at(folder.parent), folder_at(folder), manifest)
    return folder


def plan(job, *, dp=1, fresh=False, allowed=()):
    return plan_run(job, dp=dp, fresh=fresh, allowed=allowed)


def told(call):
    with pytest.raises(ConfigError) as error:
        call()
    return str(error.value)


def test_a_first_start_begins_with_nothing():
    first = plan(job_of())
    assert (first.start_from, first.done_steps, first.until, first.attempt) == (None, 0, 20, 1)


def test_a_run_goes_on_from_its_newest_checkpoint():
    for step in (5, 10):
        checkpoint(job_of(), step)
    assert plan(job_of()).start_from == folder_at("runs/r/checkpoints/step-000000010")
    assert plan(job_of()).done_steps == 10
    assert plan(job_of(), fresh=True).start_from is None
    assert plan(job_of(checkpoint__resume="never")).done_steps == 0


def test_the_recorded_virtual_ranks_decide_what_divides():
    checkpoint(job_of(), 5, dp=4)
    assert plan(job_of(), dp=3).job.batch.num_virtual_ranks == 4  # 12 samples in 4 virtual ranks over 3 replicas
    assert not list(job_problems(job_of(layout__dp=3)))
    line = told(lambda: plan(job_of(batch__micro=2), dp=1))
    assert "batch.global=12, batch.micro=2" in line and "= 2 x 4 = 8" in line
    assert any("2 x 4 = 8" in str(problem) for problem in job_problems(job_of(batch__micro=2, layout__dp=1)))


def test_dp_auto_takes_what_there_is_and_then_the_batch_must_divide():
    assert data_parallel_width(job_of(layout__dp="auto"), 6, exact=False) == 6
    assert "batch.global=12" in told(lambda: plan(job_of(layout__dp="auto"), dp=5))
    assert "world=3" in told(lambda: data_parallel_width(job_of(layout__dp="auto", layout__tp=4), 3, exact=False))
    assert "world=3" in told(lambda: data_parallel_width(job_of(layout__dp=2), 3, exact=True))


def test_a_checkpoint_of_another_run_is_taken_only_if_it_is_named(tmp_path):
    shared = tmp_path / "shared"
    folder = checkpoint(job_of(run__name="other"), 5, folder=shared)
    line = told(lambda: plan(job_of(checkpoint__dir=str(shared))))
    assert "'other'" in line and "'r'" in line
    branch = plan(job_of(checkpoint__resume=str(folder)))
    assert (branch.start_from, branch.done_steps) == (folder_at(folder), 5)
    assert "checkpoint.resume=auto" in branch.go_on


def test_a_named_folder_without_a_manifest_is_refused():
    Path("empty").mkdir()
    assert "checkpoint.resume=empty: " in told(lambda: plan(job_of(checkpoint__resume="empty")))


@pytest.mark.parametrize(
    ("steps", "stop_at", "done", "outcome"),
    [
        (20, None, 20, "finished"),
        (20, 10, 10, "stopped"),
        (20, 5, 10, "stopped"),
        (20, 5, 20, "finished"),
        (20, 15, 10, None),
    ],
)
def test_what_is_done_already_is_not_done_again(steps, stop_at, done, outcome):
    checkpoint(job_of(), done)
    before = plan(job_of(run__steps=steps, run__stop_at=stop_at)).done_before
    assert (before and before.outcome) == outcome


def test_how_to_go_on_fits_how_it_was_started():
    assert plan(job_of()).go_on == "give the same command again to go on"
    assert "run.stop_at" in plan(job_of(run__stop_at=5)).go_on
    assert "--fresh" in plan(job_of(), fresh=True).go_on


def test_a_checkpoint_older_than_a_key_can_be_gone_on_from():
    folder = checkpoint(job_of(), 5)
    text = (folder / "manifest.json").read_text()
    text = text.replace('"eval": {\n   "every": 0,', '"eval": {')
    (folder / "manifest.json").write_text(text.rpartition(',\n "xxh3"')[0] + "}")
    assert '"every": 0' not in (folder / "manifest.json").read_text().split('"eval"')[1].split("}")[0]
    assert plan(job_of()).done_steps == 5


def test_a_changed_key_is_refused_with_both_values_unless_it_is_allowed():
    checkpoint(job_of(), 5)
    changed = job_of(optim__lr=0.5)
    line = told(lambda: plan(changed))
    assert "optim.lr=0.5" in line and "0.001" in line
    assert plan(changed, allowed=["optim.lr"]).done_steps == 5
    assert "--allow-change=optim.lrr" in told(lambda: plan(changed, allowed=["optim.lrr"]))


def test_going_back_makes_later_checkpoints_void_when_the_first_new_one_exists():
    for step in (5, 10, 15):
        checkpoint(job_of(), step)
    with open_run(plan(job_of(checkpoint__resume="runs/r/checkpoints/../checkpoints/step-000000005"))):
        assert find_checkpoints(Path("runs/r/checkpoints"))[0].name == "step-000000015"
    newest = checkpoint(job_of(), 6)
    prune(folder_at(newest.parent), keep=2)
    assert [folder.name for folder in find_checkpoints(newest.parent)] == ["step-000000006", "step-000000005"]
    assert (newest.parent / "step-000000015" / "manifest.json.superseded").exists()  # not deleted


def test_a_fresh_start_sets_aside_what_is_there(tmp_path):
    elsewhere = tmp_path / "elsewhere"
    fresh = job_of(checkpoint__dir=str(elsewhere))
    checkpoint(fresh, 5, folder=elsewhere)
    with open_run(plan(fresh, fresh=True)):
        assert not find_checkpoints(elsewhere)
    (moved,) = tmp_path.glob("elsewhere.before-*")
    assert find_checkpoints(moved)


def test_two_runs_cannot_share_a_checkpoint_folder_at_the_same_time(tmp_path):
    shared = str(tmp_path / "shared")
    with open_run(plan(job_of(checkpoint__dir=shared))), pytest.raises(RunError, match="is live"):  # noqa: SIM117
        with open_run(plan(job_of(run__name="s", checkpoint__dir=shared))):
            pass


def test_a_checkpoint_that_appears_between_plan_and_lock_is_noticed():
    planned = plan(job_of())
    checkpoint(job_of(), 5)
    with pytest.raises(RunError, match="has changed"), open_run(planned):
        pass
    shutil.rmtree("runs")


def test_folders_that_cannot_be_used_are_told_before_anything_starts():
    Path("file").write_text("")
    keys = [key for p in job_problems(job_of(run__dir="file", checkpoint__dir="file/below")) for key in p.keys]
    assert {"run.dir", "checkpoint.dir"} <= set(keys)
