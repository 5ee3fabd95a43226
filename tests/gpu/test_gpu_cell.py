"""A cell on a GPU: the same bits in every run, and the CPU's losses to rounding."""

import json
import subprocess
import sys

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

JOB = """
run:    {name: NAME, dir: DIR, steps: 5}
model:  {layers: 2, hidden: 64, heads: 4, kv_heads: 2, ffn: 96, vocab: 257}
batch:  {global: 8, micro: 2, seq: 32, virtual_ranks: 2}
data:   {train: [{path: python-stdlib}]}
observe: {progress: none}
"""


def losses(folder, name, device):
    job = folder / f"{name}.yaml"
    job.write_text(JOB.replace("NAME", name).replace("DIR", str(folder / "runs")))
    command = [sys.executable, "-m", "rayformer.cell", str(job), "--set", f"cluster.device={device}"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    lines = (folder / "runs" / name / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines], json.loads(lines[-1])["state_hash"]


def test_a_gpu_gives_the_same_bits_twice(tmp_path):
    assert losses(tmp_path, "first", "cuda") == losses(tmp_path, "second", "cuda")


def test_a_gpu_gives_the_losses_of_the_cpu(tmp_path):
    on_gpu, _ = losses(tmp_path, "gpu", "cuda")
    on_cpu, _ = losses(tmp_path, "cpu", "cpu")
    assert on_gpu == pytest.approx(on_cpu, rel=1e-4)
