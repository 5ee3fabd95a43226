"""Our model is Megatron's: losses of 5 steps, logits, token losses and gradients from the same weights.

The golden values were made by megatron-core in fp32 from weights that a formula gives, see tests/golden.
"""

import json
import re
from functools import cache
from math import sqrt
from pathlib import Path
from zlib import crc32

import numpy as np
import pytest
from cells import assembled, job_tree, the_same_on_all, world_of
from fixed_samples import run_given, train_given

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "megatron_gpt.json").read_text())["arch"]
COMMON = {"layers": 2, "hidden": 64, "heads": 4, "vocab": 128}
ROTARY = {**COMMON, "kv_heads": 2, "ffn": 96}
GPT2 = {
    "kv_heads": None,
    "ffn": 256,
    "norm": "layernorm",
    "activation": "gelu",
    "position": "learned",
    "max_positions": 32,
    "bias": True,
    "tie_embeddings": True,
}
SECTIONS = {
    "llama": ROTARY,
    "qwen3": {**ROTARY, "head_dim": 24, "qk_norm": True, "tie_embeddings": True},
    "gpt2": {**COMMON, **GPT2},
}
OPTIM = {"lr": 1e-2, "decay": "constant", "weight_decay": 0.0, "betas": [0.9, 0.999], "eps": 1e-8, "clip": 0.0}
# The rows of a fused qkv, and the halves of a gated first matrix, lie in Megatron as they do here.
_NAMES = {
    "embedding.word_embeddings": "embedding",
    "embedding.position_embeddings": "position",
    "decoder.layers": "layers",
    "input_layernorm": "attention_norm",
    "self_attention.linear_qkv": "attention.qkv",
    "self_attention.q_layernorm": "attention.q_norm",
    "self_attention.k_layernorm": "attention.k_norm",
    "self_attention.linear_proj": "attention.out",
    "pre_mlp_layernorm": "mlp_norm",
    "mlp.linear_fc2": "mlp.down",
    "decoder.final_layernorm": "output.norm",
    "output_layer": "output.linear",
}


def our_name(megatron, section):
    first = "mlp.up" if section.get("activation") else "mlp.gate_up"
    for theirs, ours in {**_NAMES, "mlp.linear_fc1": first}.items():
        megatron = megatron.replace(theirs, ours)
    return megatron


def golden_weights(arch):
    """The weights, by the formula of the golden file, under our names."""
    found = {}
    for name, entry in GOLDEN[arch]["parameters"].items():
        k = np.arange(np.prod(entry["shape"]), dtype=np.float64).reshape(entry["shape"])
        around = float(re.search(r"norm\.weight$", name) is not None)
        value = 0.05 * np.sin(0.37 * k + crc32(name.encode()) % 1000) + around
        found[our_name(name, SECTIONS[arch])] = value.astype(np.float32)
    return found


def samples():
    """Tokens and labels [2, 32]."""
    block = (np.arange(2 * 33) * 37 + 11).reshape(2, 33) % 128
    return block[:, :-1].copy(), block[:, 1:].copy()


@pytest.fixture(scope="module")
def trained(run_cells, corpus):
    """``trained(arch, tp)``: curve of 5 steps and first gradient, in one process or over tp with the sequence split."""

    @cache
    def run(arch, tp):
        layout = {"tp": tp, "sequence_parallel": True} if tp > 1 else {}
        batch = {"global": 2, "micro": 1, "seq": 32}
        tree = job_tree(corpus, model=SECTIONS[arch], layout=layout, batch=batch, optim=OPTIM)
        results = run_cells(world_of(tree), train_given, tree, golden_weights(arch), *samples(), 5)
        return the_same_on_all([curve for curve, _, _ in results]), assembled([grads for _, grads, _ in results])

    return run


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("arch", SECTIONS)
def test_losses_of_five_steps_are_those_of_megatron(trained, arch, tp):
    curve, _ = trained(arch, tp)
    assert [loss for loss, _ in curve] == pytest.approx(GOLDEN[arch]["losses"], rel=1e-5)


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("arch", SECTIONS)
def test_gradients_are_those_of_megatron(trained, arch, tp):
    ((_, norm), *_), gradients = trained(arch, tp)
    golden = {our_name(name, SECTIONS[arch]): entry for name, entry in GOLDEN[arch]["parameters"].items()}
    assert gradients.keys() == golden.keys()
    assert norm == pytest.approx(sqrt(sum(entry["grad_norm"] ** 2 for entry in golden.values())), rel=1e-5)
    for name, entry in golden.items():
        assert np.linalg.norm(gradients[name]) == pytest.approx(entry["grad_norm"], rel=1e-5), name
        near = pytest.approx(entry["grad_head"], rel=1e-5, abs=1e-5 * entry["grad_norm"])
        assert gradients[name].reshape(-1)[:4].tolist() == near, name


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("arch", SECTIONS)
def test_logits_and_token_losses_are_those_of_megatron(run_cells, corpus, arch, tp):
    layout = {"tp": tp, "sequence_parallel": True} if tp > 1 else {}
    tree = job_tree(corpus, model=SECTIONS[arch], layout=layout, batch={"global": 2, "micro": 2, "seq": 32})
    results = run_cells(world_of(tree), run_given, tree, golden_weights(arch), *samples())
    logits = np.concatenate([part for part, _ in results], axis=-1)
    assert list(logits.shape) == GOLDEN[arch]["logits_shape"]
    assert logits[0, 5, :6].tolist() == pytest.approx(GOLDEN[arch]["logits_head"], rel=1e-5, abs=1e-6)  # 6 decimals
    losses = the_same_on_all([losses.tolist() for _, losses in results])
    assert losses[0][:6] == pytest.approx(GOLDEN[arch]["per_token_loss_head"], rel=1e-5)
