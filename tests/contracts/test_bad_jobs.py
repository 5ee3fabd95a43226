"""Bad jobs: each file in bad_jobs/ is refused by the command line, all its mistakes at once, before anything starts.

A file begins with lines ``# expect: A ... B``: one line on stderr must have A and B, in this order; there are as many
lines as expectations. Its paths are relative to what the fixture `folder` makes.
"""

import os
import re
import struct
import subprocess
import sys
from pathlib import Path

import pytest

import rayformer
from rayformer.data.indexed import IndexedWriter

JOBS = sorted((Path(__file__).parent / "bad_jobs").glob("*.yaml"))
FORM = re.compile(r"error: \S[^=]*=.*: .+; .+")


def expected(job):
    lines = job.read_text().splitlines()
    return [line.removeprefix("# expect: ") for line in lines if line.startswith("# expect: ")]


def pattern(expectation):
    return re.compile(".*?".join(re.escape(part.strip(" ")) for part in expectation.split("...")))


@pytest.fixture
def folder(tmp_path):
    """Where the command is given: good corpora, damaged ones (B06), and a checkpoint that was not finished."""

    def damage(name, offset, data):
        index = tmp_path / f"{name}.idx"
        raw = bytearray(index.read_bytes())
        raw[offset : offset + len(data)] = data
        index.write_bytes(raw)

    for name in ("good", "also_good", "foreign", "version_2", "dtype_99", "cut_short"):
        with IndexedWriter(tmp_path / name, "uint16") as writer:
            for _ in range(10):
                writer.add_document(list(range(40)))
    damage("foreign", 0, b"TNTIDX\0\0")
    damage("version_2", 9, struct.pack("<Q", 2))
    damage("dtype_99", 17, b"\x63")
    (tmp_path / "cut_short.bin").write_bytes((tmp_path / "cut_short.bin").read_bytes()[:-1])
    (tmp_path / "emptied" / "step-000000007").mkdir(parents=True)
    return tmp_path


def files_in(folder):
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*")}


def refusal(folder, *arguments):
    """Give `rayformer train` in ``folder``, check that it refused as it must, and return what it told."""
    before = files_in(folder)
    command = [sys.executable, "-X", "importtime", "-m", "rayformer.cli.main", "train", *arguments]
    env = {**os.environ, "PYTHONPATH": str(Path(rayformer.__file__).parents[1])}
    result = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=120)

    stderr = result.stderr.splitlines()
    imported = {line.rpartition("|")[2].strip() for line in stderr if line.startswith("import time:")}
    assert "rayformer.config.load" in imported
    # These take seconds to import, and a job is refused in less than two.
    assert {name for name in imported if name.split(".")[0] in ("torch", "ray")} == set()

    told = [line for line in stderr if not line.startswith("import time:")]
    assert [line for line in told if not FORM.fullmatch(line)] == []
    assert result.returncode == 2
    assert result.stdout == ""
    assert files_in(folder) == before
    return told


def compare(told, expectations):
    missing = [text for text in expectations if not any(pattern(text).search(line) for line in told)]
    unexpected = [line for line in told if not any(pattern(text).search(line) for text in expectations)]
    assert (missing, unexpected) == ([], [])
    assert len(told) == len(expectations) > 0


@pytest.mark.parametrize("job", JOBS, ids=lambda job: job.stem)
def test_bad_job_is_refused_with_every_mistake_before_anything_starts(job, folder):
    compare(refusal(folder, str(job)), expected(job))


GOOD = """
run: {name: good, steps: 20}
model: {layers: 4, hidden: 64, heads: 4, ffn: 96, vocab: 257}
batch: {global: 16, micro: 2, seq: 32}
data: {train: [{path: good}]}
"""


@pytest.mark.parametrize(
    ("arguments", "expectations"),
    [
        (["absent.yaml"], ["JOB=absent.yaml: ... No such file"]),
        (["emptied"], ["JOB=emptied: ... Is a directory"]),
        (["good.bin"], ["JOB=good.bin: ..."]),
        (["job.yaml", "--set", "batch.micro=3"], ["batch.global=16, batch.micro=3, ... 15 or 18"]),
        (
            ["job.yaml", "--set", "optim.lr", "--set", "optim.lrr=1", "--set", "data.train[0].path=foreign"],
            ["--set=optim.lr: ... KEY=VALUE", "optim.lrr=1: ... optim.lr?", "data.train[0].path=foreign: ... TNTIDX"],
        ),
    ],
    ids=["absent", "folder", "binary", "override", "overrides"],
)
def test_bad_arguments_are_refused_like_bad_jobs(arguments, expectations, folder):
    (folder / "job.yaml").write_text(GOOD)
    compare(refusal(folder, *arguments), expectations)


def test_there_are_many_kinds_of_bad_jobs_and_each_says_what_it_expects():
    assert len(JOBS) >= 24
    assert all(expected(job) for job in JOBS)
