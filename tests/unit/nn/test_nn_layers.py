"""Layers by themselves: usable without Ray or a group, and equal to what transformers computes."""

import subprocess
import sys

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaMLP,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
)

from rayformer.config.model import RopeScaling
from rayformer.nn.attention import Attention
from rayformer.nn.context import Context, parameter_specs
from rayformer.nn.embedding import VocabParallelEmbedding
from rayformer.nn.linear import ColumnParallelLinear, RowParallelLinear
from rayformer.nn.mlp import FeedForward
from rayformer.nn.norm import RMSNorm
from rayformer.ops.rotary import Rotary


def random(*shape, seed=0):
    return torch.from_numpy(np.random.default_rng([seed, *shape]).standard_normal(shape, dtype=np.float32))


def config(hidden=48, heads=6, kv_heads=2, theta=523.0, ffn=80):
    return LlamaConfig(
        hidden_size=hidden,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        intermediate_size=ffn,
        rms_norm_eps=3.7e-4,
        rope_parameters={"rope_type": "default", "rope_theta": theta},
        max_position_embeddings=64,
        attn_implementation="eager",
    )


def attention(kv_heads, **options):
    return Attention(
        48,
        heads=6,
        kv_heads=kv_heads,
        head_dim=8,
        rotary=Rotary(8, theta=523.0),
        name="a",
        ctx=Context(),
        out_std=0.02,
        **options,
    )


def near(found, expected, tolerance=1e-5):
    found, expected = found.detach().numpy(), expected.detach().numpy()
    assert found.shape == expected.shape
    assert np.abs(found - expected).max() <= tolerance * np.abs(expected).max()


USE = """
import sys
sys.modules["ray"] = None
import torch
from rayformer.nn.attention import Attention
from rayformer.nn.context import Context
from rayformer.nn.embedding import VocabParallelEmbedding
from rayformer.nn.linear import ColumnParallelLinear, RowParallelLinear
from rayformer.nn.mlp import FeedForward
from rayformer.nn.norm import RMSNorm
from rayformer.ops.cross_entropy import vocab_parallel_cross_entropy
x = VocabParallelEmbedding(257, 16, name="table")(torch.tensor([[1, 256]]))
layers = [
    RMSNorm(16, name="norm", eps=1e-5),
    Attention(
        16, heads=4, kv_heads=2, head_dim=4, rotary=None, name="attention", ctx=Context(), out_std=0.02
    ),
    FeedForward(16, 24, activation="swiglu", name="mlp", ctx=Context(), out_std=0.02),
    ColumnParallelLinear(16, 8, name="up", gather_output=True),
    RowParallelLinear(8, 16, name="down", input_is_parallel=False),
]
for layer in layers:
    x = layer(x)
x.sum().backward()
assert not any(name == "ray" or name.startswith("ray.") for name, module in sys.modules.items() if module)
"""


def test_layers_work_without_ray():
    done = subprocess.run([sys.executable, "-c", USE], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("head_dim", "theta"), [(8, 10000.0), (16, 523.0), (128, 500000.0)])
def test_rotary_is_that_of_transformers(head_dim, theta):
    q, k = random(2, 4, 33, head_dim), random(2, 2, 33, head_dim, seed=1)
    theirs = LlamaRotaryEmbedding(config(hidden=4 * head_dim, heads=4, theta=theta))
    expected = apply_rotary_pos_emb(q, k, *theirs(q, torch.arange(33)[None]))
    ours = Rotary(head_dim, theta=theta)
    for x, turned in zip((q, k), expected):
        near(ours.turn(x), turned, 1e-6)


@pytest.mark.parametrize(
    ("scaling", "parameters"),
    [
        (RopeScaling(kind="linear", factor=3.0), {"rope_type": "linear", "factor": 3.0}),
        (
            RopeScaling(kind="llama3", factor=8.0, original_positions=64),
            {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        ),
    ],
)
def test_stretched_positions_are_those_of_transformers(scaling, parameters):
    section = config(hidden=4 * 32, heads=4, theta=500.0)
    section.rope_parameters = {"rope_theta": 500.0, **parameters}
    x = random(1, 2, 99, 32)
    cos, sin = LlamaRotaryEmbedding(section)(x, torch.arange(99)[None])
    expected, _ = apply_rotary_pos_emb(x, x, cos, sin)
    near(Rotary(32, theta=500.0, scaling=scaling).turn(x), expected, 2e-5)


def test_rotary_angles_are_position_times_frequency():
    x = torch.tensor([1.0, 0.0, 0.0, 2.0]).expand(1, 1, 1001, 4)  # element 0 turns together with element 2
    turned = Rotary(4, theta=100.0).turn(x)[0, 0]
    for position in (0, 1, 1000):
        fast, slow = position, position / 10
        expected = [np.cos(fast), -2 * np.sin(slow), np.sin(fast), 2 * np.cos(slow)]
        np.testing.assert_allclose(turned[position].numpy(), expected, atol=1e-4)


def test_turning_has_the_gradient_of_its_formula():
    x = random(1, 2, 3, 4).double().requires_grad_()
    assert torch.autograd.gradcheck(Rotary(4, theta=100.0).turn, (x,), atol=1e-4)


@pytest.mark.parametrize("kv_heads", [1, 2, 6])
def test_attention_is_that_of_transformers(kv_heads):
    section = config(kv_heads=kv_heads)
    theirs = LlamaAttention(section, layer_idx=0)
    ours = attention(kv_heads)
    parts = [random(n, 48, seed=i) * 0.3 for i, n in enumerate((48, 8 * kv_heads, 8 * kv_heads))]
    out = random(48, 48, seed=9) * 0.3
    with torch.no_grad():
        for linear, value in zip((theirs.q_proj, theirs.k_proj, theirs.v_proj, theirs.o_proj), (*parts, out)):
            linear.weight.copy_(value)
        ours.qkv.weight.copy_(torch.cat([part.view(kv_heads, -1, 48) for part in parts], dim=1).view(-1, 48))
        ours.out.weight.copy_(out)
    x, dy = random(2, 9, 48), random(2, 9, 48, seed=1)
    mask = torch.full((9, 9), torch.finfo(torch.float32).min).triu(1)[None, None]
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    expected, _ = theirs(inputs[1], LlamaRotaryEmbedding(section)(x, torch.arange(9)[None]), mask)
    found = ours(inputs[0])
    near(found, expected)
    found.backward(dy)
    expected.backward(dy)
    near(inputs[0].grad, inputs[1].grad)
    near(ours.out.weight.grad, theirs.o_proj.weight.grad)
    grads = [linear.weight.grad.view(kv_heads, -1, 48) for linear in (theirs.q_proj, theirs.k_proj, theirs.v_proj)]
    near(ours.qkv.weight.grad, torch.cat(grads, dim=1).view(-1, 48))


def test_attention_does_not_look_ahead():
    layer = attention(2)
    x = random(1, 9, 48)
    y = layer(x)
    x[0, 5:] += 1
    torch.testing.assert_close(layer(x)[0, :5], y[0, :5], rtol=0, atol=1e-7)
    assert (layer(x)[0, 5:] != y[0, 5:]).any(dim=-1).all()


def test_mlp_is_that_of_transformers():
    theirs, ours = LlamaMLP(config()), FeedForward(48, 80, activation="swiglu", name="mlp", ctx=Context(), out_std=0.02)
    with torch.no_grad():
        ours.up.weight.copy_(torch.cat([theirs.gate_proj.weight, theirs.up_proj.weight]))
        ours.down.weight.copy_(theirs.down_proj.weight)
    near(ours(random(2, 3, 48)), theirs(random(2, 3, 48)))


@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e4])
def test_norm_is_that_of_transformers(scale):
    theirs, ours = LlamaRMSNorm(48, eps=3.7e-4), RMSNorm(48, name="norm", eps=3.7e-4)
    with torch.no_grad():
        for layer in (theirs, ours):
            layer.weight.copy_(random(48))
    near(ours(random(2, 3, 48) * scale), theirs(random(2, 3, 48) * scale))


def test_layers_of_one_process_are_torchs_own():
    x, ids = random(2, 3, 12), torch.tensor([[0, 256, 3]])
    for layer in (
        ColumnParallelLinear(12, 257, name="up", gather_output=True),
        ColumnParallelLinear(12, 24, name="up", unit=6),
        RowParallelLinear(12, 16, name="down", input_is_parallel=False),
        RowParallelLinear(12, 16, name="down"),
    ):
        torch.testing.assert_close(layer(x), functional.linear(x, layer.weight), rtol=0, atol=0)
    table = VocabParallelEmbedding(257, 8, name="table")
    torch.testing.assert_close(table(ids), functional.embedding(ids, table.weight), rtol=0, atol=0)


def test_every_parameter_is_made_with_its_spec():
    layers = nn.ModuleList(
        [
            VocabParallelEmbedding(257, 16, name="table"),
            RMSNorm(16, name="norm", eps=1e-5),
            Attention(16, heads=4, kv_heads=2, head_dim=4, rotary=None, name="attention", ctx=Context(), out_std=0.01),
            FeedForward(16, 24, activation="swiglu", name="mlp", ctx=Context(), out_std=0.01),
        ]
    )
    specs = parameter_specs(layers)
    assert {name: (spec.shape, spec.decay, spec.init.kind, spec.init.std) for name, spec in specs.items()} == {
        "table.weight": ((257, 16), True, "normal", 0.02),
        "norm.weight": ((16,), False, "ones", 0.02),
        "attention.qkv.weight": ((32, 16), True, "normal", 0.02),
        "attention.out.weight": ((16, 16), True, "normal", 0.01),
        "mlp.gate_up.weight": ((48, 16), True, "normal", 0.02),
        "mlp.down.weight": ((16, 24), True, "normal", 0.01),
    }
    assert sum(p.numel() for p in layers.parameters()) == sum(np.prod(spec.shape) for spec in specs.values())


def test_weights_are_a_function_of_seed_and_name():
    def weight(name, seed):
        return ColumnParallelLinear(16, 32, name=name, ctx=Context(seed=seed)).weight

    assert torch.equal(weight("a", 1), weight("a", 1))
    assert not torch.equal(weight("a", 1), weight("a", 2))
    assert not torch.equal(weight("a", 1), weight("b", 1))
