"""What rehearse tries, prints and returns; the training itself is replaced by folders made by hand."""

import json

import pytest
import yaml

from rayformer.cli import rehearse
from rayformer.cli.main import main
from rayformer.config.load import load_job
from rayformer.observe.rundir import RunDir

CELL = "pp0.dp1.cp0.tp0"
JOB = {
    "run": {"name": "r", "steps": 400},
    "model": {"layers": 4, "hidden": 64, "heads": 4, "ffn": 96, "vocab": 257},
    "layout": {"dp": 2},
    "batch": {"global": 64, "micro": 2, "seq": 32},
    "data": {"train": [{"path": "python-stdlib"}]},
}
KINDS = ["calm", "struck", "micro", "dp"]


def step(number):
    last = {"state_hash": "ab" * 8} if number == 6 else {}
    return {
        "step": number,
        "loss": 5.0 - number / 8,
        "grad_norm": 0.5 * number,
        "step_s": 0.5,
        "skipped": False,
    } | last


class Stage:
    """A folder with a job, and a training that writes lines instead; ``runs`` are the jobs it was asked for.

    ``statuses``, ``journals`` and ``printed`` are what a run of that kind ends with, where it is not what it should be.
    """

    def __init__(self, path, monkeypatch):
        self.path, self.runs, self.seconds = path, {}, 0.0
        self.statuses, self.journals, self.printed = {}, {}, {}
        (path / "job.yaml").write_text(yaml.safe_dump(JOB))
        monkeypatch.chdir(path)
        monkeypatch.setattr(rehearse, "train_apart", self.train)

    def train(self, job_file, settings, output):
        job = load_job(job_file, settings, [])
        kind = job.run.name.rpartition("-")[2]
        self.runs[kind] = job
        files = RunDir(self.path / "runs" / job.run.name)
        assert files.logs.is_dir() and not files.metrics.exists()
        output.write(self.printed.get(kind, f"this is {kind}\n").encode())
        files.metrics.write_text(
            "".join(json.dumps(step(n)) + "\n" for n in range(4 if kind in ("micro", "dp") else 1, 7))
        )
        journal = self.journals.get(kind, [] if not job.faults else self.repaired(job))
        files.journal.write_text("".join(json.dumps(line) + "\n" for line in journal))
        (files.checkpoints / "step-000000003").mkdir(parents=True)
        return self.statuses.get(kind, 0)

    def repaired(self, job):
        (fault,) = job.faults
        return [
            {"kind": "fault", "effect": "kill", "cell": fault.kill, "step": fault.step, "at": fault.at},
            {"kind": "recovered", "cells": [fault.kill], "source": "holder", "step": 4, "total_s": 1.5},
        ]

    def run(self, *sets):
        return main(["rehearse", "job.yaml", "--json", "out.json", *(p for text in sets for p in ("--set", text))])

    @property
    def result(self):
        return json.loads((self.path / "out.json").read_text())


@pytest.fixture
def stage(tmp_path, monkeypatch):
    return Stage(tmp_path, monkeypatch)


def test_a_job_that_survives_is_told_what_it_survives(stage, capsys):
    assert stage.run() == 0
    out, err = capsys.readouterr()
    assert err == ""
    *head, calm, struck, micro, dp, last = out.splitlines()
    assert "r, cut: model.layers 4 -> 2, run.steps 400 -> 6, batch.global 64 -> 4, " in head[0]
    assert head[-1] == "  what the runs print: runs/r-rehearsal-*/logs/driver.log"
    for row, (what, words) in zip(
        (calm, struck, micro, dp),
        [
            ("the job, undisturbed", "6 steps of 0.500 s, saved after 3"),
            (f"the loss of {CELL}", "repaired in 1.50 s from holder, no step done again; the same bits"),
            ("a resume with batch.micro=1", "went on after step 3; losses 0 apart, 1e-05 being rounding"),
            ("a resume with layout.dp=1", "went on after step 3; the same bits"),
        ],
    ):
        assert row.startswith(f"  {what} ") and " held " in row and row.endswith(f" s  {words}")
    assert last == f"this job survives: the loss of {CELL}, a resume with batch.micro=1, a resume with layout.dp=1"

    assert list(stage.runs) == KINDS
    assert [job.batch.micro for job in stage.runs.values()] == [2, 2, 1, 2]
    assert [job.layout.dp for job in stage.runs.values()] == [2, 2, 2, 1]
    start = str(stage.path / "runs" / "r-rehearsal-calm" / "checkpoints" / "step-000000003")
    assert [job.checkpoint.resume for job in stage.runs.values()] == ["auto", "auto", start, start]

    result = stage.result
    assert result["survives"] is True and result["errors"] == []
    assert result["cut"]["model.layers"] == {"from": 4, "to": 2}
    assert [(one["kind"], one["outcome"], one["status"]) for one in result["trials"]] == [(k, "held", 0) for k in KINDS]


def test_checkpoints_are_kept_only_of_a_job_that_does_not_survive(stage):
    assert stage.run() == 0
    assert list((stage.path / "runs").rglob("step-*")) == []
    stage.statuses["struck"] = 1
    assert stage.run() == 1
    assert len(list((stage.path / "runs").rglob("step-*"))) == 4


def test_what_an_earlier_rehearsal_and_the_run_itself_left_stays(stage):
    own = stage.path / "runs" / "r" / "metrics.jsonl"
    own.parent.mkdir(parents=True)
    own.write_text("mine")
    assert stage.run() == 0 and stage.run() == 0
    assert own.read_text() == "mine"
    assert len([path for path in (stage.path / "runs").iterdir() if ".before-" in path.name]) == 4


def test_a_loss_that_ends_the_run_is_told_with_the_remedy_and_the_rest_is_still_tried(stage, capsys):
    stage.statuses["struck"], stage.printed["struck"] = 1, "".join(f"line {n}\n" for n in range(50))
    assert stage.run("recovery.max_failures=0") == 1
    out, err = capsys.readouterr()
    assert "this job survives" not in out and list(stage.runs) == KINDS
    log, *lines, error = err.splitlines()
    assert log == f"the end of {stage.path}/runs/r-rehearsal-struck/logs/driver.log:"
    assert lines == [f"  | line {n}" for n in range(30, 50)]
    assert error.startswith(f"error: recovery.max_failures=0: the loss of {CELL} in step 5 ended the run")
    assert stage.result["errors"] == [error.removeprefix("error: ")] and stage.result["survives"] is False


def test_a_job_that_fails_undisturbed_is_not_tried_further(stage, capsys):
    stage.statuses["calm"], stage.printed["calm"] = 1, "error: the run r failed\n"
    assert stage.run() == 1
    assert list(stage.runs) == ["calm"]
    assert capsys.readouterr().err.splitlines()[1:] == [
        "  | error: the run r failed",
        "error: run.name=r-rehearsal-calm: it ended with status 1, undisturbed; mend the job first",
    ]


def test_what_is_refused_only_where_it_runs_is_a_bad_job(stage, capsys):
    stage.statuses["calm"], stage.printed["calm"] = 2, "error: cluster.device=cuda, world=2: no; use cpu\n"
    assert stage.run() == 2
    assert capsys.readouterr().err == "error: cluster.device=cuda, world=2: no; use cpu\n"


def test_what_is_not_valid_or_has_no_devices_is_skipped_and_said_so(stage, capsys):
    stage.statuses["dp"], stage.journals["dp"] = 1, [{"kind": "placement_failed", "missing": "1 of 2 bundles is out"}]
    assert stage.run("layout.dp=1", "batch.micro=1", "batch.global=1", "batch.virtual_ranks=1") == 0
    out, err = capsys.readouterr()
    *_, micro, dp, last = out.splitlines()
    assert err == "" and list(stage.runs) == ["calm", "struck"]
    assert "a resume with batch.micro=2  skipped        -  batch.global=1, batch.micro=2, " in micro
    assert "a resume with layout.dp=2    skipped        -  batch.global=1, batch.micro=1, " in dp
    assert last.endswith("; not tried: a resume with batch.micro=2, a resume with layout.dp=2")
    assert stage.run("layout.dp=1") == 0
    assert "skipped    0.0 s  1 of 2 bundles is out" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("kind", "status", "journal", "ended"),
    [
        ("calm", 130, [], 130),
        ("calm", 75, [{"kind": "stop_asked"}], 75),
        ("struck", 75, [{"kind": "stop_asked"}], 75),
        ("dp", 130, [], 130),
        ("struck", 75, [{"kind": "no_room"}], 1),  # waited in vain
    ],
)
def test_a_signal_ends_it_with_the_status_of_the_run_it_came_to(stage, kind, status, journal, ended):
    stage.statuses[kind], stage.journals[kind] = status, journal
    assert stage.run() == ended
    assert list(stage.runs) == (KINDS if ended == 1 else KINDS[: KINDS.index(kind) + 1])
    assert (stage.path / "out.json").exists() is (ended == 1)


@pytest.mark.parametrize(
    ("sets", "keys"),
    [
        (["layout.dp=auto", "batch.micro=5"], ["batch.global=64, batch.micro=5", "layout.dp=auto"]),
        (["model.heads=5", "optim.lrr=1"], ["optim.lrr=1", "model.hidden=64, model.heads=5"]),
    ],
)
def test_a_bad_job_is_refused_before_anything_starts(stage, capsys, sets, keys):
    assert stage.run(*sets) == 2
    lines = capsys.readouterr().err.splitlines()
    assert [line.removeprefix("error: ").partition(": ")[0].split(", layout")[0] for line in lines] == keys
    assert stage.runs == {} and not (stage.path / "runs").exists()


def test_a_result_that_could_not_be_written_is_told_first(stage, capsys):
    assert main(["rehearse", "job.yaml", "--json", "nowhere/out.json"]) == 2
    assert capsys.readouterr().err.startswith("error: --json=nowhere/out.json: there is no such folder; ")


def test_a_model_of_the_users_own_stays_whole(stage, capsys):
    (stage.path / "mine.py").write_text(
        "from rayformer.config.model import ModelConfig\nfrom rayformer.models import decoder\n"
        "def build(section):\n"
        "    return decoder.build(ModelConfig(layers=3, heads=2, ffn=64, hidden=section.hidden, vocab=section.vocab))\n"
    )
    tree = {**JOB, "model": {"factory": "mine:build", "hidden": 32, "vocab": 257}}
    (stage.path / "job.yaml").write_text(yaml.safe_dump(tree))
    assert stage.run() == 0
    assert "the model of mine:build stays whole" in capsys.readouterr().out
