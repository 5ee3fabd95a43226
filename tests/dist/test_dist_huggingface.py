"""Our model is Hugging Face's of its family: the same loss, gradients and updated weights from the same weights."""

import json
from functools import cache
from itertools import combinations, product
from math import sqrt
from pathlib import Path
from unittest.mock import patch
from zlib import crc32

import numpy as np
import pytest
import torch
from cells import assembled, job_tree, the_same_on_all, world_of
from fixed_samples import run_given, train_given
from hf_models import (
    gradients_of,
    hf_model,
    load_weights,
    parameters_of,
    random_weights,
    to_hugging_face,
    to_ours,
    token_losses,
)

from rayformer.ops.dropout import Moment, keep_masks

LLAMA = {
    "layers": 3,
    "hidden": 48,
    "heads": 6,
    "kv_heads": 2,
    "ffn": 80,
    "vocab": 131,
    "norm_eps": 3.7e-4,
    "rope_theta": 523.0,
}
QWEN2 = {**LLAMA, "qkv_bias": True, "tie_embeddings": True}
GPT2 = {
    "layers": 3,
    "hidden": 48,
    "heads": 6,
    "kv_heads": None,
    "ffn": 80,
    "vocab": 131,
    "norm_eps": 3.7e-4,
    "norm": "layernorm",
    "activation": "gelu_tanh",
    "position": "learned",
    "max_positions": 20,
    "bias": True,
    "tie_embeddings": True,
}
# Of the 4 frequencies of LLAMA's heads, llama3 leaves the fastest, blends the next, and slows the other two.
STRETCHED = {"kind": "llama3", "factor": 5.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_positions": 64}
FAMILIES = {
    "llama": LLAMA,
    "llama, linear rope scaling": {**LLAMA, "rope_scaling": {"kind": "linear", "factor": 3.0}},
    "llama, llama3 rope scaling": {**LLAMA, "rope_scaling": STRETCHED},
    "mistral": {**LLAMA, "head_dim": 12},
    "qwen2": QWEN2,
    "qwen3": {**LLAMA, "qk_norm": True, "head_dim": 14},
    "gpt2": GPT2,
}
LAYOUTS = [{}, {"tp": 2}, {"tp": 2, "sequence_parallel": True}, {"pp": 2}]
OPTIM = {"lr": 2e-3, "decay": "constant", "betas": [0.8, 0.9], "eps": 1e-4, "weight_decay": 0.3, "clip": 0.5}
GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "hf_reference.json").read_text())["llama"]


def samples():
    """Tokens and labels [4, 16] in which the samples have 15, 1, 16 and 8 labels."""
    block = np.random.default_rng(3).integers(0, LLAMA["vocab"], (4, 17))
    labels = block[:, 1:].copy()
    labels[0, 5] = labels[1, :15] = labels[3, ::2] = -1
    return block[:, :-1].copy(), labels


@pytest.fixture(scope="module")
def hugging_face():
    """``hugging_face(family)``: what Hugging Face and torch make of random weights in one clipped AdamW step.

    Loss, norm, and by our names the weights before it, the gradients and the weights after it.
    """

    @cache
    def run(family):
        section = FAMILIES[family]
        model, weights = hf_model(section), random_weights(section)
        load_weights(model, weights)
        losses, labels = hf_losses(model)
        loss = losses.sum() / (labels >= 0).sum()
        loss.backward()
        gradients = gradients_of(model)
        norm = clipped_adamw(list(model.parameters()))
        named = [to_ours(tensors, section) for tensors in (weights, gradients, parameters_of(model))]
        return loss.item(), norm, *named

    return run


def clipped_adamw(parameters):
    """torch's step with the options of OPTIM; the norm."""
    norm = torch.nn.utils.clip_grad_norm_(parameters, 0.5)
    groups = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": 0.3},
        {"params": [p for p in parameters if p.dim() == 1], "weight_decay": 0.0},
    ]
    torch.optim.AdamW(groups, lr=2e-3, betas=(0.8, 0.9), eps=1e-4).step()
    return norm.item()


def hf_losses(model):
    """The token losses of `samples`, and the labels."""
    tokens, labels = map(torch.from_numpy, samples())
    return token_losses(model, tokens, labels), labels


@pytest.mark.parametrize(
    ("family", "layout"), [*product(FAMILIES, LAYOUTS), ("llama", {"pp": 3}), ("gpt2", {"pp": 3})], ids=str
)
def test_one_step_is_that_of_hugging_face_and_torch(run_cells, corpus, hugging_face, family, layout):
    loss, norm, weights, gradients, updated = hugging_face(family)
    tree = job_tree(corpus, model=FAMILIES[family], layout=layout, batch={"global": 4, "micro": 2}, optim=OPTIM)
    results = run_cells(world_of(tree), train_given, tree, weights, *samples())
    ((found_loss, found_norm),) = the_same_on_all([result[0] for result in results])
    assert found_loss == pytest.approx(loss, rel=1e-5) and found_norm == pytest.approx(norm, rel=1e-5)
    assert norm > 1  # so the clip is active
    assert_near(assembled([result[1] for result in results]), gradients)
    assert_near(assembled([result[2] for result in results]), updated)
    for name, value in updated.items():
        assert np.abs(value - weights[name]).max() > 1e-3, f"{name} was not updated"


def assert_near(found, expected):
    """Every tensor to 1e-5 of its largest element."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert np.abs(found[name] - value).max() <= 1e-5 * np.abs(value).max(), name


def masks_in_the_order_of_gpt2(share):
    """Let torch's dropout, as Hugging Face's GPT-2 calls it, drop what ours drops in the first step."""
    layers = (f"layers.{i}.{part}" for i in range(GPT2["layers"]) for part in ("attention.", "attention", "mlp"))
    sites = iter(["embedding", *layers])

    def dropout(x, *_, **__):
        moment = Moment(seed=1234, step=1, samples=tuple(range(len(x))))
        options = {"moment": moment, "device": x.device, "generator": torch.Generator()}
        site = next(sites)
        if site.endswith("."):  # probabilities of every head [B, N, S, S]
            keep = [keep_masks(x.shape[-2:], share, site=f"{site}{head}", **options) for head in range(x.shape[1])]
            return x * torch.stack(keep, dim=1) / (1 - share)
        return x * keep_masks(x.shape[1:], share, site=site, **options) / (1 - share)

    return patch("torch.nn.functional.dropout", dropout)


@pytest.mark.parametrize("layout", [*LAYOUTS, {"dp": 2}], ids=str)
def test_dropout_stands_where_gpt2_has_it(run_cells, corpus, layout):
    model, weights = hf_model(GPT2), random_weights(GPT2)
    load_weights(model, weights)
    with masks_in_the_order_of_gpt2(0.3):
        losses, labels = hf_losses(model)
    loss = losses.sum() / (labels >= 0).sum()
    loss.backward()
    section = {**GPT2, "dropout": 0.3, "attention_dropout": 0.3}
    tree = job_tree(corpus, model=section, layout=layout, batch={"global": 4, "micro": 2})
    results = run_cells(world_of(tree), train_given, tree, to_ours(weights, GPT2), *samples())
    ((found, _),) = the_same_on_all([result[0] for result in results])
    assert found == pytest.approx(loss.item(), rel=1e-5)
    assert_near(assembled([result[1] for result in results]), to_ours(gradients_of(model), GPT2))


def test_every_token_weighs_the_same_however_samples_are_grouped(run_cells, corpus):  # B30
    tokens, labels = samples()
    labels = np.where(labels < 0, 7, labels)
    labels[::2, np.arange(16) != 7] = -1  # even samples keep 1 of 16 tokens, odd ones all
    model, weights = hf_model(LLAMA), random_weights(LLAMA)
    load_weights(model, weights)
    losses = token_losses(model, torch.from_numpy(tokens), torch.from_numpy(labels))
    loss = losses.sum().item() / (2 * 1 + 2 * 16)
    means_of_samples = losses.sum(dim=1) / torch.tensor([1, 16, 1, 16])
    assert abs(means_of_samples.mean().item() / loss - 1) > 0.1
    curves = []
    for micro, layout in [(1, {}), (2, {}), (4, {}), (1, {"dp": 4}), (2, {"dp": 2}), (1, {"pp": 2})]:
        tree = job_tree(corpus, model=LLAMA, layout=layout, batch={"global": 4, "micro": micro})
        results = run_cells(world_of(tree), train_given, tree, to_ours(weights, LLAMA), tokens, labels)
        curves.append(the_same_on_all([curve for curve, _, _ in results]))
        assert curves[-1][0] == pytest.approx(curves[0][0], rel=1e-6), (micro, layout)
    assert curves[0][0][0] == pytest.approx(loss, rel=1e-6)


def test_every_rope_scaling_changes_the_loss(hugging_face):
    losses = [hugging_face(family)[0] for family in FAMILIES if family.startswith("llama")]
    assert all(abs(a / b - 1) > 1e-3 for a, b in combinations(losses, 2))


@pytest.fixture(scope="module")
def rounded():
    """``rounded(family)``: weights that bf16 can hold, and what Hugging Face makes of them in fp32 and in bf16.

    Weights and gradients by our names; of each format the token losses and the gradients.
    """

    @cache
    def run(family):
        section = FAMILIES[family]
        weights = {k: torch.from_numpy(v).bfloat16().float().numpy() for k, v in random_weights(section).items()}
        found = []
        for dtype in (torch.float32, torch.bfloat16):
            model = hf_model(section, dtype)
            load_weights(model, weights)
            losses, labels = hf_losses(model)
            (losses.sum() / (labels >= 0).sum()).backward()
            found.append((losses.detach().numpy(), to_ours(gradients_of(model), section)))
        return to_ours(weights, section), *found

    return run


def distance(value, truth):
    """The relative distance of two arrays in Frobenius norm."""
    return np.linalg.norm(value - truth) / np.linalg.norm(truth)


def compared(gradients):
    """Every matrix, and all vectors in one: a vector is so short that its rounding errors differ by luck."""
    vectors = [value for _, value in sorted(gradients.items()) if value.ndim == 1]
    return {name: value for name, value in gradients.items() if value.ndim > 1} | {"vectors": np.concatenate(vectors)}


@pytest.fixture(scope="module")
def bf16_step(run_cells, corpus, rounded):
    """``bf16_step(family, dp)``: the loss of one step in bf16, and its gradients."""

    @cache
    def run(family, dp):
        options = {"batch": {"global": 4, "micro": 2}, "optim": OPTIM, "precision": {"params": "bf16"}}
        tree = job_tree(corpus, model=FAMILIES[family], layout={"dp": dp}, **options)
        results = run_cells(dp, train_given, tree, rounded(family)[0], *samples())
        ((loss, _),) = the_same_on_all([result[0] for result in results])
        return loss, assembled([result[1] for result in results])

    return run


@pytest.mark.parametrize("dp", [1, 2])
@pytest.mark.parametrize("family", FAMILIES)
def test_bf16_is_as_near_to_fp32_as_hugging_face_in_bf16(rounded, bf16_step, family, dp):
    _, (true_losses, true_gradients), (their_losses, their_gradients) = rounded(family)
    loss, gradients = bf16_step(family, dp)
    valid = samples()[1] >= 0
    # Errors of tokens cancel in the mean, more or less by luck, but it is never farther off than they are.
    spread = np.sqrt(np.mean((their_losses - true_losses)[valid] ** 2))
    assert 0 < abs(loss - true_losses[valid].mean()) <= spread < 0.01 * loss
    found, truth, theirs = map(compared, (gradients, true_gradients, their_gradients))
    for name, value in truth.items():
        assert 1e-4 < distance(found[name], value) <= 2 * distance(theirs[name], value) < 0.1, name


def test_bf16_gradients_are_on_average_no_farther_from_fp32_than_hugging_face(rounded, bf16_step):
    ratios = []
    for family in FAMILIES:
        _, (_, true_gradients), (_, their_gradients) = rounded(family)
        found, truth, theirs = map(compared, (bf16_step(family, 1)[1], true_gradients, their_gradients))
        ratios += [distance(found[name], truth[name]) / distance(theirs[name], truth[name]) for name in truth]
    assert np.exp(np.mean(np.log(ratios))) < 1.1  # norms rounded to bf16 before their root gave 1.2


@pytest.mark.parametrize(("family", "layout"), [("llama", {"dp": 2}), ("gpt2", {"pp": 2})], ids=str)
def test_bf16_gradients_update_weights_that_stay_in_fp32(run_cells, corpus, family, layout):
    options = {"batch": {"global": 4, "micro": 2}, "optim": OPTIM, "precision": {"params": "bf16"}}
    tree = job_tree(corpus, model=FAMILIES[family], layout=layout, **options)
    weights = to_ours(random_weights(FAMILIES[family]), FAMILIES[family])
    results = run_cells(world_of(tree), train_given, tree, weights, *samples())
    expected = {name: torch.nn.Parameter(torch.from_numpy(value.copy())) for name, value in weights.items()}
    for name, gradient in assembled([result[1] for result in results]).items():
        expected[name].grad = torch.from_numpy(gradient)
    norm = clipped_adamw(list(expected.values()))
    assert results[0][0][0][1] == pytest.approx(norm, rel=1e-5)
    updated = assembled([result[2] for result in results])
    assert_near(updated, {name: parameter.detach().numpy() for name, parameter in expected.items()})


@pytest.mark.parametrize("family", FAMILIES)
def test_bf16_token_losses_are_as_near_to_fp32_as_those_of_hugging_face(run_cells, corpus, rounded, family):
    weights, (truth, _), (theirs, _) = rounded(family)
    tree = job_tree(corpus, model=FAMILIES[family], precision={"params": "bf16"})
    ((_, losses),) = run_cells(1, run_given, tree, weights, *samples())
    assert not losses[samples()[1] < 0].any()
    assert 0 < distance(losses, truth) <= 2 * distance(theirs, truth) < 0.01


def golden_weights():
    """The weights of the golden file, by its formula."""
    shapes = GOLDEN["parameters"]

    def values(name, shape):
        k = np.arange(np.prod(shape), dtype=np.float64).reshape(shape)
        return (0.05 * np.sin(0.37 * k + crc32(name.encode()) % 1000) + ("norm" in name)).astype(np.float32)

    return {name: values(name, shape) for name, shape in shapes.items()}


def golden_job(corpus, layout):
    config = GOLDEN["config"]
    model = {
        "layers": config["num_hidden_layers"],
        "hidden": config["hidden_size"],
        "vocab": config["vocab_size"],
        "heads": config["num_attention_heads"],
        "kv_heads": config["num_key_value_heads"],
        "ffn": config["intermediate_size"],
        "norm_eps": config["rms_norm_eps"],
        "rope_theta": config["rope_parameters"]["rope_theta"],
    }
    block = (np.arange(2 * 33) * 37 + 11).reshape(2, 33) % 128
    tree = job_tree(corpus, model=model, layout=layout, batch={"global": 2, "micro": 1, "seq": 32})
    return tree, to_ours(golden_weights(), model), block[:, :-1].copy(), block[:, 1:].copy()


@pytest.mark.parametrize("layout", [{}, {"tp": 2}, {"pp": 2}], ids=str)
def test_loss_and_gradients_are_the_golden_ones(run_cells, corpus, layout):
    tree, weights, tokens, labels = golden_job(corpus, layout)
    results = run_cells(world_of(tree), train_given, tree, weights, tokens, labels)
    ((loss, norm),) = results[0][0]
    golden = GOLDEN["float64"]["grads"]
    assert loss == pytest.approx(GOLDEN["float32"]["loss"], rel=1e-6)
    assert norm == pytest.approx(sqrt(sum(entry["norm"] ** 2 for entry in golden.values())), rel=1e-5)
    found = to_hugging_face(assembled([result[1] for result in results]), tree["model"])
    assert found.keys() == golden.keys()
    for name, expected in golden.items():
        assert np.linalg.norm(found[name]) == pytest.approx(expected["norm"], rel=1e-5), name
        near = pytest.approx(expected["head"], rel=1e-4, abs=1e-5 * expected["norm"])
        assert found[name].reshape(-1)[:3].tolist() == near, name


def test_logits_are_the_golden_ones(run_cells, corpus):
    tree, weights, tokens, labels = golden_job(corpus, {})
    ((logits, _),) = run_cells(1, run_given, tree, weights, tokens, labels)
    golden = GOLDEN["float32"]
    assert logits[0, 5, :8].tolist() == pytest.approx(golden["logits_b0_t5_head"], abs=2e-6)
    assert logits[1, 31, :8].tolist() == pytest.approx(golden["logits_b1_t31_head"], abs=2e-6)
    assert np.abs(logits.astype(np.float64)).sum() == pytest.approx(golden["logits_abs_sum"], rel=1e-6)
    assert logits.astype(np.float64).sum() == pytest.approx(golden["logits_sum"], abs=1e-3)
