"""Tensor-parallel layers: forward and backward equal those of one process with the whole weight.

Shapes: B 2, S 3, inputs and outputs of the layers as the tables say.
"""

import numpy as np
import pytest
import torch
from torch.nn import functional

from rayformer.groups import single
from rayformer.layout import Layout
from rayformer.nn.context import Context
from rayformer.nn.embedding import VocabParallelEmbedding
from rayformer.nn.linear import ColumnParallelLinear, RowParallelLinear
from rayformer.ops.cross_entropy import vocab_parallel_cross_entropy
from rayformer.ops.tensor import copy_to, gather_from, reduce_from, scatter_to
from rayformer.shards import share_start

COLUMN = {
    "plain": (12, 16, {}),
    "units of 6 rows": (12, 24, {"unit": 6}),
    "two parts": (12, 16, {"parts": 2}),
    "uneven vocabulary": (12, 257, {}),
    "gathered": (12, 16, {"gather_output": True}),
    "gathered uneven vocabulary": (12, 257, {"gather_output": True}),
}
ROW = {
    "plain": (16, 12, {}),
    "units of 4 columns": (16, 12, {"unit": 4}),
    "uneven": (10, 12, {}),
    "whole input": (16, 12, {"input_is_parallel": False}),
    "whole uneven input": (10, 12, {"input_is_parallel": False}),
}
VOCAB, HIDDEN, SEED = 257, 8, 7


def random(*shape, seed=0):
    return torch.from_numpy(np.random.default_rng([seed, *shape]).standard_normal(shape, dtype=np.float32))


def share(length, size, rank, unit=1):
    """The range of a dim that one of ``size`` ranks holds."""
    return slice(*(share_start(length // unit, size, r) * unit for r in (rank, rank + 1)))


def rows_of(length, size, rank, unit=1, parts=1):
    """The indices along a dim that one rank holds, part after part."""
    block = np.arange(length).reshape(parts, -1)
    return block[:, share(length // parts, size, rank, unit)].reshape(-1)


def as_arrays(*tensors):
    return [tensor.detach().numpy().copy() for tensor in tensors]


def column(tp, case, x, dy):
    """Output, input gradient and weight gradient of a column layer; ``dy`` is of the whole output."""
    size_in, size_out, options = COLUMN[case]
    layer = ColumnParallelLinear(size_in, size_out, name=case, ctx=Context(tp=tp, seed=SEED), **options)
    x = x.clone().requires_grad_()
    y = layer(x)
    own = {k: v for k, v in options.items() if k in ("unit", "parts")}
    whole = options.get("gather_output", False)
    y.backward(dy if whole else dy[..., rows_of(size_out, tp.size, tp.rank, **own)])
    return as_arrays(y, x.grad, layer.weight, layer.weight.grad)


def row(tp, case, x, dy):
    """The same of a row layer; ``x`` is the whole input."""
    size_in, size_out, options = ROW[case]
    layer = RowParallelLinear(size_in, size_out, name=case, ctx=Context(tp=tp, seed=SEED), **options)
    if options.get("input_is_parallel", True):
        x = x[..., share(size_in, tp.size, tp.rank, options.get("unit", 1))]
    x = x.clone().requires_grad_()
    y = layer(x)
    y.backward(dy)
    return as_arrays(y, x.grad, layer.weight, layer.weight.grad)


def embedding(tp, tokens, dy):
    layer = VocabParallelEmbedding(VOCAB, HIDDEN, name="table", ctx=Context(tp=tp, seed=SEED))
    y = layer(tokens)
    y.backward(dy)
    return as_arrays(y, layer.weight, layer.weight.grad)


def cross_entropy(tp, logits, labels, weights):
    own = share(VOCAB, tp.size, tp.rank)
    z = logits[..., own].clone().requires_grad_()
    losses = vocab_parallel_cross_entropy(z, labels, own.start, tp)
    (losses * weights).sum().backward()
    return as_arrays(losses, z.grad)


def conjugates(tp, x, dy):
    """Forward and gradient of the four pairs, on the dim of 10 that 4 ranks share unevenly."""
    sizes = [share_start(10, tp.size, r + 1) - share_start(10, tp.size, r) for r in range(tp.size)]
    own = share(10, tp.size, tp.rank)
    found = {}
    for name, function, part, grad in (
        ("copy_to", lambda t: copy_to(t, tp), x, dy * (tp.rank + 1)),
        ("reduce_from", lambda t: reduce_from(t, tp), x * (tp.rank + 1), dy),
        ("gather_from", lambda t: gather_from(t, tp, sizes), x[..., own], dy),
        ("scatter_to", lambda t: scatter_to(t, tp, sizes), x, dy[..., own]),
    ):
        part = part.clone().requires_grad_()
        y = function(part)
        y.backward(grad)
        found[name] = as_arrays(y, part.grad)
    return found


def inputs():
    """What every rank is given."""
    ids = np.random.default_rng(1).integers(0, VOCAB, (2, 3))
    ids[0] = [0, VOCAB - 1, 128]
    labels = torch.from_numpy(ids).clone()
    labels[1, 1:] = torch.tensor([-1, -100])
    return {
        "column": {case: (random(2, 3, a), random(2, 3, b, seed=1)) for case, (a, b, _) in COLUMN.items()},
        "row": {case: (random(2, 3, a), random(2, 3, b, seed=1)) for case, (a, b, _) in ROW.items()},
        "embedding": (torch.from_numpy(ids), random(2, 3, HIDDEN)),
        "cross_entropy": (random(2, 3, VOCAB) * 5, labels, random(2, 3).abs()),
        "large logits": (random(2, 3, VOCAB) * 1e4, labels, random(2, 3).abs()),
        "conjugates": (random(2, 3, 10), random(2, 3, 10, seed=1)),
    }


def all_layers(tp):
    given = inputs()
    return {
        "column": {case: column(tp, case, *args) for case, args in given["column"].items()},
        "row": {case: row(tp, case, *args) for case, args in given["row"].items()},
        "embedding": embedding(tp, *given["embedding"]),
        "cross_entropy": cross_entropy(tp, *given["cross_entropy"]),
        "large logits": cross_entropy(tp, *given["large logits"]),
        "conjugates": conjugates(tp, *given["conjugates"]),
    }


def all_layers_of_member(member):
    groups = member.form(Layout(tp=member.world))
    found = all_layers(groups.tp)
    groups.close()
    return found


@pytest.fixture(scope="module", params=[1, 2, 4], ids="tp{}".format)
def by_rank(request, run_cells):
    """What each of 1, 2 and 4 tensor-parallel ranks found."""
    return [all_layers(single())] if request.param == 1 else run_cells(request.param, all_layers_of_member)


def near(found, expected):
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize("case", COLUMN)
def test_column_layer_equals_the_whole_one(by_rank, case):
    (size_in, size_out, options), (x, dy) = COLUMN[case], inputs()["column"][case]
    own = {k: v for k, v in options.items() if k in ("unit", "parts")}
    rows = [rows_of(size_out, len(by_rank), rank, **own) for rank in range(len(by_rank))]
    weight = np.empty((size_out, size_in), np.float32)
    for at, found in zip(rows, by_rank):
        weight[at] = found["column"][case][2]
    x, weight = x.requires_grad_(), torch.from_numpy(weight).requires_grad_()
    y = functional.linear(x, weight)
    y.backward(dy)
    assert weight.detach().std().item() == pytest.approx(0.02, rel=0.15)
    for at, found in zip(rows, by_rank):
        mine, dx, _, dw = found["column"][case]
        near(mine, (y if "gather_output" in options else y[..., at]).detach().numpy())
        near(dx, x.grad.numpy())
        near(dw, weight.grad[at].numpy())


@pytest.mark.parametrize("case", ROW)
def test_row_layer_equals_the_whole_one(by_rank, case):
    (size_in, size_out, options), (x, dy) = ROW[case], inputs()["row"][case]
    columns = [share(size_in, len(by_rank), rank, options.get("unit", 1)) for rank in range(len(by_rank))]
    weight = np.empty((size_out, size_in), np.float32)
    for at, found in zip(columns, by_rank):
        weight[:, at] = found["row"][case][2]
    x, weight = x.requires_grad_(), torch.from_numpy(weight).requires_grad_()
    y = functional.linear(x, weight)
    y.backward(dy)
    for at, found in zip(columns, by_rank):
        mine, dx, _, dw = found["row"][case]
        near(mine, y.detach().numpy())
        near(dx, (x.grad[..., at] if options.get("input_is_parallel", True) else x.grad).numpy())
        near(dw, weight.grad[:, at].numpy())


def test_embedding_equals_the_whole_one(by_rank):
    tokens, dy = inputs()["embedding"]
    weight = np.concatenate([found["embedding"][1] for found in by_rank])
    assert weight.shape == (VOCAB, HIDDEN)
    weight = torch.from_numpy(weight).requires_grad_()
    y = functional.embedding(tokens, weight)
    y.backward(dy)
    for rank, found in enumerate(by_rank):
        np.testing.assert_array_equal(found["embedding"][0], y.detach().numpy())
        near(found["embedding"][2], weight.grad[share(VOCAB, len(by_rank), rank)].numpy())


@pytest.mark.parametrize("name", ["cross_entropy", "large logits"])
def test_cross_entropy_equals_that_over_the_whole_vocabulary(by_rank, name):
    logits, labels, weights = inputs()[name]
    z = logits.requires_grad_()
    flat = functional.cross_entropy(z.view(-1, VOCAB), labels.clamp(min=-1).view(-1), ignore_index=-1, reduction="none")
    (flat.view(2, 3) * weights).sum().backward()
    assert flat[-2:].tolist() == [0, 0]
    for rank, found in enumerate(by_rank):
        losses, grad = found[name]
        near(losses, flat.view(2, 3).detach().numpy())
        assert losses[1, 1:].tolist() == [0, 0] and not grad[1, 1:].any()
        near(grad, z.grad[..., share(VOCAB, len(by_rank), rank)].numpy())


def test_conjugate_pairs_are_what_they_are_called(by_rank):
    x, dy = (tensor.numpy() for tensor in inputs()["conjugates"])
    total = sum(range(1, len(by_rank) + 1))
    for rank, found in enumerate(by_rank):
        own = share(10, len(by_rank), rank)
        expected = {
            "copy_to": (x, dy * total),
            "reduce_from": (x * total, dy),
            "gather_from": (x, dy[..., own]),
            "scatter_to": (x[..., own], dy),
        }
        for name, (y, dx) in expected.items():
            near(found["conjugates"][name][0], y)
            near(found["conjugates"][name][1], dx)
