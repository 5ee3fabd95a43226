"""Families, formats and kernels on one GPU: the same bits twice and under every option that may not change them."""

import json
import subprocess
import sys

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

BASE = {"layers": 3, "hidden": 128, "heads": 4, "ffn": 192, "vocab": 257}
FAMILIES = {
    "llama": {**BASE, "kv_heads": 2},
    "qwen3": {**BASE, "kv_heads": 2, "head_dim": 64, "qk_norm": True},
    "qwen2": {**BASE, "qkv_bias": True, "tie_embeddings": True},
    "gpt2": {
        **BASE,
        "norm": "layernorm",
        "activation": "gelu_tanh",
        "position": "learned",
        "max_positions": 64,
        "bias": True,
        "tie_embeddings": True,
    },
}
DROPPING = {"dropout": 0.1, "attention_dropout": 0.1}


def run(folder, name, model, device="cuda", **sections):
    """Losses and state hash of five steps in a process of their own."""
    job = {
        "run": {"name": name, "dir": str(folder / "runs"), "steps": 5},
        "model": model,
        "batch": {"global": 8, "micro": 2, "seq": 64, "virtual_ranks": 2},
        "data": {"train": [{"path": "python-stdlib"}]},
        "cluster": {"device": device},
        "observe": {"progress": "none"},
        **sections,
    }
    path = folder / f"{name}.yaml"
    path.write_text(json.dumps(job))
    done = subprocess.run([sys.executable, "-m", "rayformer.cell", str(path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = (folder / "runs" / name / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines], json.loads(lines[-1])["state_hash"]


@pytest.mark.parametrize("params", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_bits_come_twice_and_near_those_of_the_cpu(tmp_path, family, params):
    precision = {"precision": {"params": params}}
    first = run(tmp_path, "first", FAMILIES[family], **precision)
    assert run(tmp_path, "second", FAMILIES[family], **precision) == first
    on_cpu, _ = run(tmp_path, "cpu", FAMILIES[family], "cpu")
    assert first[0] == pytest.approx(on_cpu, rel=1e-4 if params == "fp32" else 2e-2)


@pytest.mark.parametrize(
    "option",
    [
        {"recompute": {"mode": "full"}},
        {"recompute": {"mode": "selective", "modules": ["core_attn", "mlp", "act", "norm"]}},
        {"optim": {"overlap": False}},
        {"optim": {"zero": 0}},
    ],
    ids=str,
)
def test_options_that_only_cost_memory_or_time_keep_the_bits(tmp_path, option):
    model = {**FAMILIES["gpt2"], **DROPPING}
    precision = {"precision": {"params": "bf16"}}
    assert run(tmp_path, "with", model, **precision, **option) == run(tmp_path, "without", model, **precision)


@pytest.mark.parametrize(("impl", "package"), [("flash", "flash_attn"), ("te", "transformer_engine")])
def test_kernels_of_other_packages_follow_torchs(tmp_path, impl, package):
    pytest.importorskip(package)
    model, precision = FAMILIES["llama"], {"precision": {"params": "bf16"}}
    ours = run(tmp_path, "sdpa", model, **precision)
    theirs = run(tmp_path, impl, {**model, "attention_impl": impl}, **precision)
    assert theirs[0] == pytest.approx(ours[0], rel=1e-2)
    assert run(tmp_path, "again", {**model, "attention_impl": impl}, **precision) == theirs


def test_compiled_blocks_follow_the_plain_ones(tmp_path):
    plain = run(tmp_path, "plain", FAMILIES["llama"])
    compiled = run(tmp_path, "compiled", {**FAMILIES["llama"], "compile": True})
    assert compiled[0] == pytest.approx(plain[0], rel=1e-4)
