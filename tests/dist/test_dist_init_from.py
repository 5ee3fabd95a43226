"""A run that starts from weights: whose they may be, what it takes of them, and that it does so once."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from cells import job_tree
from hf_models import hf_model, load_weights, random_weights, token_losses
from safetensors.torch import load_file

from rayformer.cell.origin import shown_job
from rayformer.cell.problems import job_problems
from rayformer.ckpt.manifest import read_manifest, step_folder
from rayformer.ckpt.reader import read_boxes
from rayformer.cli.main import main
from rayformer.config.load import job_from_tree
from rayformer.shards import whole

MODEL = {"layers": 2, "hidden": 32, "heads": 4, "kv_heads": 2, "ffn": 48, "vocab": 257, "norm_eps": 3.7e-4}
OPTIM = {"lr": 1e-3, "min_lr": 1e-4, "warmup_steps": 4, "decay": "cosine", "decay_steps": 20}
PEAK = [2.5e-4, 5e-4, 7.5e-4, 1e-3]  # of the first steps


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    """A folder that transformers saved, with a tokenizer's files in it."""
    folder = tmp_path_factory.mktemp("theirs")
    model = hf_model(MODEL)
    load_weights(model, random_weights(MODEL))
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")
    (folder / "merges.txt").write_text("a b")
    return folder


@pytest.fixture
def job(corpus, tmp_path):
    """``job(init_from, name=..., **sections)``: the plain values of a job of ten steps."""

    def make(init_from, *, name="run", model=None, **sections):
        tree = job_tree(corpus, model=MODEL | (model or {}), optim=OPTIM, **sections)
        tree["run"] |= {"name": name, "dir": str(tmp_path / "runs"), "steps": 10}
        return tree | {"checkpoint": {"init_from": str(init_from), "every": 2}, "cluster": {"device": "cpu"}}

    return make


def run(tree, folder, *arguments, status=0):
    """Run the job in one process; what it printed."""
    path = folder / "job.yaml"
    path.write_text(yaml.safe_dump(tree))
    command = [sys.executable, "-m", "rayformer.cell", str(path), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=folder, check=False)
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout + done.stderr


def tensors_of(folder, kind):
    """All tensors of a kind in a checkpoint."""
    manifest, found = read_manifest(folder), {}
    for tensor, shape in manifest.shapes().items():
        if tensor.endswith(f"@{kind}"):
            found[tensor] = np.empty(shape, np.float32)
            read_boxes(folder, manifest, [(tensor, whole(shape), found[tensor])])
    return found


def metrics_of(tree):
    path = f"{tree['run']['dir']}/{tree['run']['name']}/metrics.jsonl"
    with open(path) as lines:
        return [json.loads(line) for line in lines]


def checkpoint_of(tree, step):
    return Path(tree["run"]["dir"]) / tree["run"]["name"] / "checkpoints" / step_folder(step)


def test_the_initial_state_is_theirs_with_nothing_else(theirs, job, tmp_path):  # B60
    tree = job(f"hf:{theirs}")
    run(tree, tmp_path, "--set", "run.stop_at=0", status=75)
    for kind in ("exp_avg", "exp_avg_sq"):
        assert not any(value.any() for value in tensors_of(checkpoint_of(tree, 0), kind).values())
    assert main(["ckpt", "export", str(checkpoint_of(tree, 0)), str(tmp_path / "back")]) == 0
    back, expected = (load_file(folder / "model.safetensors") for folder in (tmp_path / "back", theirs))
    assert back.keys() == expected.keys() and all(torch.equal(back[name], value) for name, value in expected.items())
    for name in ("tokenizer.json", "merges.txt", "generation_config.json"):
        assert (tmp_path / "back" / name).read_bytes() == (theirs / name).read_bytes()


@pytest.mark.parametrize("zero", [0, 1])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_step_that_changes_nothing_leaves_the_weights_as_loaded(theirs, job, tmp_path, dtype, zero):  # B74
    tree = job(f"hf:{theirs}", precision={"params": dtype})
    tree["optim"] = {**OPTIM, "lr": 1e-30, "min_lr": 0.0, "weight_decay": 0.0, "zero": zero}  # rounds away
    run(tree, tmp_path, "--set", "run.stop_at=1", status=75)
    assert any(value.any() for value in tensors_of(checkpoint_of(tree, 1), "exp_avg").values()), "it did step"
    masters = ["--dtype", "fp32"]
    assert main(["ckpt", "export", str(checkpoint_of(tree, 1)), str(tmp_path / "back"), *masters]) == 0
    back, expected = (load_file(folder / "model.safetensors") for folder in (tmp_path / "back", theirs))
    assert back.keys() == expected.keys() and all(torch.equal(back[name], value) for name, value in expected.items())


def test_a_run_starts_at_step_one_and_goes_on_from_its_own_checkpoints(theirs, job, tmp_path):
    mine = tmp_path / "mine"
    shutil.copytree(theirs, mine)
    tree = job("hf:mine")  # relative to where the command is given
    said = run(tree, tmp_path, "--set", "run.stop_at=2", status=75)
    assert "starts from the weights of hf:mine" in said
    shutil.rmtree(mine)  # from now on they are not needed
    said = run(tree, tmp_path)
    assert "starts from the weights" not in said
    lines = metrics_of(tree)
    assert [line["step"] for line in lines if "loss" in line][:10] == list(range(1, 11))
    assert [line["lr"] for line in lines[:4]] == pytest.approx(PEAK)
    unbroken = job(f"hf:{theirs}", name="unbroken")
    run(unbroken, tmp_path)
    assert [line["loss"] for line in metrics_of(unbroken)] == [line["loss"] for line in lines]
    assert metrics_of(unbroken)[-1]["state_hash"] == lines[-1]["state_hash"]


def test_weights_of_a_run_and_imported_ones_start_another(theirs, job, tmp_path):
    first = job(f"hf:{theirs}", name="first")
    run(first, tmp_path, "--set", "run.stop_at=4", status=75)
    second = job(tmp_path / "runs" / "first", name="second")
    run(second, tmp_path, "--set", "run.stop_at=2", status=75)
    line = metrics_of(second)[0]
    assert (line["step"], line["consumed_samples"]) == (1, 8) and line["lr"] == pytest.approx(PEAK[0])
    third = job(tmp_path / "runs" / "first", name="third")
    run(third, tmp_path, "--set", "run.stop_at=0", status=75)
    weights, moments = (tensors_of(checkpoint_of(third, 0), kind) for kind in ("master", "exp_avg"))
    for name, value in tensors_of(checkpoint_of(first, 4), "master").items():
        assert np.array_equal(weights[name], value)
    assert not any(value.any() for value in moments.values())

    assert main(["ckpt", "import", str(theirs), str(tmp_path / "imported")]) == 0
    fourth = job(tmp_path / "imported", name="fourth")
    run(fourth, tmp_path, "--set", "run.stop_at=1", status=75)
    assert metrics_of(fourth)[0]["loss"] == metrics_of(first)[0]["loss"]
    assert main(["ckpt", "export", str(tmp_path / "runs" / "fourth"), str(tmp_path / "out")]) == 0
    assert (tmp_path / "out" / "merges.txt").read_text() == "a b"


def problems(tree):
    """The lines that tell what is wrong with a job."""
    return [str(problem) for problem in job_problems(job_from_tree(tree))]


def test_a_section_that_says_the_same_in_other_words_is_theirs(theirs, job):
    assert problems(job(f"hf:{theirs}")) == []
    assert problems(job(f"hf:{theirs}", model={"head_dim": 8, "dropout": 0.1})) == []


def test_every_key_that_differs_is_one_line(theirs, job):
    where = f"hf:{theirs}"
    changed = {"ffn": 64, "norm_eps": 1e-5, "qkv_bias": True, "tie_embeddings": True, "head_dim": 16}
    expected = {"ffn": (64, 48), "norm_eps": (1e-5, 3.7e-4), "qkv_bias": ("true", False)}
    expected |= {"tie_embeddings": ("true", False), "head_dim": (16, 8)}
    assert sorted(problems(job(where, model=changed))) == sorted(
        f"model.{key}={asked}: the weights of checkpoint.init_from={where} are of a model with {found};"
        " set it to that, or start from others"
        for key, (asked, found) in expected.items()
    )


def test_weights_that_are_not_whole_are_told_before_the_start(theirs, job, tmp_path):
    (told,) = problems(job("hf:nowhere"))
    assert told.startswith("checkpoint.init_from=hf:nowhere: ") and "there is no config.json" in told
    (told,) = problems(job(tmp_path))
    assert told.startswith(f"checkpoint.init_from={tmp_path}: {tmp_path}: there is no checkpoint")
    broken = tmp_path / "broken"
    broken.mkdir()
    for name in ("config.json", "model.safetensors"):
        (broken / name).write_bytes((theirs / name).read_bytes()[:-4] if "safe" in name else (theirs / name).read_bytes())
    (told,) = problems(job(f"hf:{broken}"))
    assert told.startswith(f"checkpoint.init_from=hf:{broken}: {broken}/model.safetensors: it ends at byte ")


def test_keys_to_a_storage_are_not_written_down(job):
    told = shown_job(job_from_tree(job("hf:s3://name:secret@bucket/weights")))
    assert told["checkpoint"]["init_from"] == "hf:s3://bucket/weights"


def test_a_sequence_longer_than_the_window_is_refused(theirs, job, tmp_path):
    folder = tmp_path / "mistral"
    folder.mkdir()
    config = json.loads((theirs / "config.json").read_text()) | {"model_type": "mistral", "sliding_window": 12}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_bytes((theirs / "model.safetensors").read_bytes())
    assert main(["ckpt", "import", str(folder), str(tmp_path / "imported")]) == 0
    for where in (f"hf:{folder}", str(tmp_path / "imported")):
        (told,) = problems(job(where))
        assert told.startswith("batch.seq=16: ") and "sees 12 tokens at most" in told
        assert told.endswith("; use at most 12")
        assert problems(job(where, batch={"seq": 12})) == []
