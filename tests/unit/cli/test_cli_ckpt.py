"""``rayformer ckpt``: what it prints of checkpoints that were written here, and with which status."""

import json
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "ckpt"))
from test_ckpt_inspect import write

from rayformer.ckpt.manifest import find_checkpoints
from rayformer.cli.main import main


@pytest.fixture
def run(tmp_path):
    """The folder of a run with two checkpoints."""
    for step in (7, 9):
        write(tmp_path / "checkpoints", step=step, seed=step)
    return tmp_path


def test_ls_lists_the_newest_first(run, capsys):
    assert main(["ckpt", "ls", str(run)]) == 0
    head, *rows = capsys.readouterr().out.splitlines()
    assert head.split()[:2] == ["step", "samples"] and [row.split()[0] for row in rows] == ["9", "7"]
    assert "dp2" in rows[0] and str(run) in rows[0]
    assert main(["ckpt", "ls", str(run), "--json"]) == 0
    assert [row["step"] for row in json.loads(capsys.readouterr().out)] == [9, 7]


def test_show_has_every_tensor(run, capsys):
    assert main(["ckpt", "show", str(run)]) == 0
    out = capsys.readouterr().out
    assert "saved from     dp2" in out and "116 B in 2 tensors" in out
    assert [line.split() for line in out.splitlines()[-2:]] == [
        ["b@master", "5", "F32", "1", "20", "B"],
        ["w@master", "6", "x", "4", "F32", "2", "96", "B"],
    ]
    assert main(["ckpt", "show", str(run), "--json"]) == 0
    assert [tensor["name"] for tensor in json.loads(capsys.readouterr().out)["of_tensors"]] == ["b@master", "w@master"]


def test_verify_and_hash(run, capsys):
    newest = run / "checkpoints" / "step-000000009"
    assert main(["ckpt", "verify", str(run)]) == 0
    told = capsys.readouterr().out
    assert main(["ckpt", "hash", str(newest)]) == 0
    assert capsys.readouterr().out.strip() in told and str(newest) in told
    file = newest / "a-0000.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\xff")
    assert main(["ckpt", "verify", str(run)]) == 1
    assert capsys.readouterr().err.startswith(f"error: {file}: the ")
    assert main(["ckpt", "hash", str(run)]) == 1


def test_diff_tells_by_its_status(run, capsys):
    first, second = (str(run / "checkpoints" / f"step-00000000{step}") for step in (7, 9))
    assert main(["ckpt", "diff", first, first]) == 0 and capsys.readouterr().out == "the same\n"
    assert main(["ckpt", "diff", first, second]) == 1
    assert "consumed_samples  56" in capsys.readouterr().out
    assert main(["ckpt", "diff", first, second, "--json"]) == 1
    assert json.loads(capsys.readouterr().out)[0] == {"what": "step", "first": "7", "second": "9"}


def test_prune_keeps_the_newest(run, capsys):
    assert main(["ckpt", "prune", str(run), "--keep", "1"]) == 0
    assert capsys.readouterr().out.startswith("dropped 1 of 2")
    assert [path.name for path in find_checkpoints(run / "checkpoints")] == ["step-000000009"]
    assert not (run / "checkpoints" / "step-000000007").exists()


@pytest.mark.parametrize("command", [["ls"], ["show"], ["verify"], ["hash"], ["prune", "--keep", "1"]])
def test_without_a_checkpoint_the_folder_is_named(command, tmp_path, capsys):
    assert main(["ckpt", command[0], str(tmp_path), *command[1:]]) == 1
    assert capsys.readouterr().err.startswith(f"error: {tmp_path}: there ")
