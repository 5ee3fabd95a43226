"""What chaos makes of two run folders, and what it refuses; the training itself is replaced by folders made by hand."""

import json

import pytest
import yaml

from rayformer.cli import chaos
from rayformer.cli.chaos import chaos_command
from rayformer.cli.main import main
from rayformer.config.load import load_job
from rayformer.faults.outcome import prove
from rayformer.faults.plan import Fault, resolve_faults

JOB = {
    "run": {"name": "r", "steps": 4},
    "model": {"layers": 4, "hidden": 64, "heads": 4, "ffn": 96, "vocab": 257},
    "layout": {"pp": 2, "dp": 2},
    "batch": {"global": 16, "micro": 2, "seq": 32},
    "data": {"train": [{"path": "python-stdlib"}]},
}
PLAN = [{"kill": "pp1", "step": 2, "at": "vote"}, {"freeze": "any", "step": [3, 4], "at": "any"}]
RECOVERED = {
    "kind": "recovered",
    "cells": ["pp1.dp0.cp0.tp0"],
    "cause": "its process died: SIGKILL\nand more",
    "source": "holder",
    "step": 1,
    "steps_redone": 1,
    **dict.fromkeys(("detect_s", "drain_s", "form_s", "restore_s", "first_step_s"), 0.125),
    "total_s": 0.625,
}


def step(number, **values):
    line = {"step": number, "loss": 5.0 - number / 8, "grad_norm": 0.1 * number, "step_s": 0.5, "time": 100.0 + number}
    return line | values


def write(folder, metrics, journal):
    folder.mkdir(parents=True)
    for name, lines in (("metrics", metrics), ("journal", journal)):
        text = "".join(json.dumps({"attempt": 1, "generation": 1, **line}) + "\n" for line in lines)
        (folder / f"{name}.jsonl").write_text(text + '{"half a li')


CALM = [step(1), step(2), step(3), step(4, state_hash="ab" * 8)]


def faults_of(settings, path):
    job = load_job(path, settings, [])
    return job, resolve_faults(job.faults, job.layout.degrees)


def line_of(fault, **values):
    return {"kind": "fault", "effect": fault.effect, "cell": fault.cell, "step": fault.step, "at": fault.at} | values


class Stage:
    """A folder with a job and a plan, and a training that writes lines instead; ``runs`` are those it was asked for."""

    def __init__(self, path, monkeypatch):
        self.path, self.runs = path, []
        self.job_file, self.plan_file, self.json_file = path / "job.yaml", path / "plan.yaml", path / "out.json"
        self.job_file.write_text(yaml.safe_dump(JOB))
        self.plan_file.write_text(yaml.safe_dump(PLAN))
        self.metrics = [step(1), step(2, loss=9.0), *CALM[1:]]  # what was redone counts as it was done last
        self.journal = lambda faults: [*map(line_of, faults), RECOVERED | {"time": 102.5}]
        self.statuses = [0, 0]
        monkeypatch.chdir(path)
        monkeypatch.setattr(chaos, "train_apart", self.train)

    def train(self, job_file, settings, *flags):
        assert flags == ("--fresh",)
        job, faults = faults_of(settings, job_file)
        is_calm = not self.runs
        self.runs.append((job, faults))
        lines = [{"time": 100.0, **line} for line in ([] if is_calm else self.journal(faults))]
        write(
            self.path / "runs" / job.run.name, CALM if is_calm else self.metrics, [*lines, {"time": 104.0, "kind": "x"}]
        )
        return self.statuses[len(self.runs) - 1]

    def run(self, *sets, seed=5):
        return chaos_command(self.job_file, self.plan_file, seed, sets, self.json_file)

    @property
    def result(self):
        return json.loads(self.json_file.read_text())


@pytest.fixture
def stage(tmp_path, monkeypatch):
    return Stage(tmp_path, monkeypatch)


def test_two_equal_runs_with_proven_faults_are_a_success(stage, capsys):
    assert stage.run("run.seed=7") == 0
    (calm, none), (disturbed, faults) = stage.runs
    assert (calm.run.name, disturbed.run.name) == ("r-calm", "r-chaos")
    assert calm.run.seed == disturbed.run.seed == 7 and none == ()
    assert [fault.effect for fault in faults] == ["kill", "freeze"]

    result = stage.result
    assert result["errors"] == [] and result["differences"] == [] and not result["void"]
    assert result["equal"] == {"loss": True, "grad_norm": True, "state_hash": True}
    assert [fault["proven"] for fault in result["faults"]] == [True, True]
    assert result["faults"][0].items() >= {"effect": "kill", "cell": "pp1.dp0.cp0.tp0", "step": 2, "at": "vote"}.items()
    (incident,) = result["incidents"]
    assert incident["total_s"] == 0.625 and incident["steps_redone"] == 1 and incident["source"] == "holder"
    assert result["runs"]["chaos"].items() >= {"steps": 4, "executed": 5, "steps_s": 2.0, "wall_s": 4.0}.items()
    assert result["goodput"] == 0.5 and result["runs"]["calm"]["state_hash"] == "ab" * 8

    out, err = capsys.readouterr()
    assert "0.625 s" in out and "holder" in out and "its process died: SIGKILL" in out and "50.0% of 4.0 s" in out
    assert out.endswith("equal: the final state, and every step's loss and grad_norm\n") and err == ""


def test_the_seed_decides_what_is_drawn(stage):
    drawn = set()
    for seed in range(8):
        stage.path = stage.path / str(seed)
        stage.runs.clear()
        stage.job_file.write_text(yaml.safe_dump(JOB | {"run": JOB["run"] | {"dir": str(stage.path / "runs")}}))
        assert stage.run(seed=seed) == 0
        drawn.add(stage.runs[1][1])
    assert len(drawn) > 4


def test_a_fault_that_did_not_take_place_makes_the_run_void(stage, capsys):
    stage.journal = lambda faults: [line_of(faults[1])]
    assert stage.run() == 1
    assert [fault["proven"] for fault in stage.result["faults"]] == [False, True] and stage.result["void"]
    (error,) = capsys.readouterr().err.splitlines()
    assert error.startswith(
        "error: faults[0].kill=pp1.dp0.cp0.tp0: it did not take place at vote of step 2, so the run is void; "
    )
    assert stage.result["errors"] == [error.removeprefix("error: ")]


@pytest.mark.parametrize(
    ("change", "keys", "told"),
    [
        ({"loss": 4.0}, {"loss"}, "loss in step 4: 4.5 without faults, 4.0 with them"),
        ({"grad_norm": None}, {"grad_norm"}, "grad_norm in step 4: 0.4 without faults, None with them"),
        (
            {"state_hash": "cd" * 8},
            {"state_hash"},
            f"state_hash at the end: {'ab' * 8} without faults, {'cd' * 8} with them",
        ),
    ],
)
def test_other_bits_are_told_and_fail(stage, capsys, change, keys, told):
    stage.metrics = [*CALM[:3], {**CALM[3], **change}]
    assert stage.run() == 1
    assert {key for key, equal in stage.result["equal"].items() if not equal} == keys
    out, err = capsys.readouterr()
    assert told in out.splitlines() and "equal:" not in out
    assert err == "error: the run with the faults has other bits than the undisturbed one\n"


def test_a_step_or_a_hash_that_is_missing_is_a_difference(stage):
    stage.metrics = CALM[:3]
    assert stage.run() == 1
    assert stage.result["differences"] == [
        {"step": 4, "key": "step", "calm": "done", "chaos": None},
        {"step": None, "key": "state_hash", "calm": "ab" * 8, "chaos": None},
    ]
    assert set(stage.result["equal"].values()) == {False}


def test_a_disturbed_run_that_fails_is_told(stage, capsys):
    stage.statuses = [0, 1]
    assert stage.run() == 1
    assert "ended with status 1" in capsys.readouterr().err and stage.result["runs"]["chaos"]["status"] == 1


def test_an_undisturbed_run_that_fails_ends_it(stage, capsys):
    stage.statuses = [1]
    assert main(["chaos", str(stage.job_file), "--plan", str(stage.plan_file)]) == 1
    assert len(stage.runs) == 1
    assert capsys.readouterr().err.startswith("error: the undisturbed run ended with status 1")


@pytest.mark.parametrize("status", [75, 130])
def test_a_run_that_was_stopped_ends_it_with_its_status(stage, status):
    stage.statuses = [status]
    assert stage.run() == status and len(stage.runs) == 1


def test_a_job_that_stops_early_is_compared_up_to_there(stage):
    stage.statuses = [75, 75]
    assert stage.run("run.stop_at=4", "run.steps=9") == 0


def test_what_changes_the_numbers_happens_in_both_runs(stage):
    stage.plan_file.write_text(yaml.safe_dump([*PLAN, {"nan": "any", "step": 2, "at": "any"}]))
    assert stage.run() == 0
    (_, in_calm), (_, in_chaos) = stage.runs
    assert [(f.effect, f.cell, f.at) for f in in_calm] == [("nan", in_chaos[2].cell, in_chaos[2].at)]


@pytest.mark.parametrize(
    ("plan", "told"),
    [
        ("[{kill: pp9, step: 2}, {kill: pp1, step: 9}]", ["faults[0].kill=pp9: ", "faults[1].step=9, run.steps=4: "]),
        ("{kill: pp1, step: 2}", ["--plan=plan.yaml: a plan is a list of faults; write it like"]),
        ("[]", ["--plan=plan.yaml: a plan is a list"]),
        ("[kill", ["--plan=plan.yaml: line 1: "]),
        ("[{kill: pp1, step: 2, step: 3}]", ["[0].step=3: it is given twice"]),
        (None, ["--plan=plan.yaml: it can't be read (No such file or directory); "]),
    ],
)
def test_a_bad_plan_is_refused_before_anything_starts(stage, capsys, plan, told):
    stage.plan_file.unlink()
    if plan is not None:
        stage.plan_file.write_text(plan)
    assert main(["chaos", "job.yaml", "--plan", "plan.yaml", "--seed", "1", "--json", "out.json"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == len(told)
    for line, start in zip(lines, told):
        assert line.startswith(f"error: {start}")
    assert stage.runs == [] and not stage.json_file.exists()


def test_the_cells_must_be_known(stage, capsys):
    assert main(["chaos", "job.yaml", "--plan", "plan.yaml", "--set", "layout.dp=auto"]) == 2
    assert capsys.readouterr().err.startswith("error: layout.dp=auto: ")


def test_a_line_proves_one_fault_only():
    one, other = (Fault(number=n, effect="kill", cell="pp1.dp0.cp0.tp0", step=7, at="vote") for n in (0, 1))
    line = line_of(one, cell="pp1.dp0")
    assert [proof.is_proven for proof in prove([one, other], [line])] == [True, False]
    assert [proof.is_proven for proof in prove([one, other], [line, line])] == [True, True]
    assert [proof.is_proven for proof in prove([one, other], [line | {"number": 1}])] == [False, True]


@pytest.mark.parametrize(
    ("wrong", "proven"), [({}, True), ({"effect": "exit"}, False), ({"cell": "pp0"}, False), ({"step": 8}, False)]
)
def test_a_line_of_something_else_proves_nothing(wrong, proven):
    fault = Fault(number=0, effect="kill", cell="pp1.dp0.cp0.tp0", step=7, at="vote")
    (proof,) = prove([fault], [line_of(fault, **wrong)])
    assert proof.is_proven is proven


def test_replay_is_a_command(stage, capsys):
    assert main(["replay", "journal.jsonl"]) == 1
    assert capsys.readouterr().err.startswith("error: journal.jsonl: No such file")
