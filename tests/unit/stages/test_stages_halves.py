import pytest
import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

from rayformer.groups import single
from rayformer.ops.embedding import table_rows
from rayformer.ops.linear import column_linear
from rayformer.ops.norm import _RMSNorm
from rayformer.stages.halves import input_half

HIDDEN = 32


class Block(nn.Module):
    """A pre-norm block with every way in which a layer uses its parameters."""

    def __init__(self):
        super().__init__()
        self.norm, self.root = nn.LayerNorm(HIDDEN), nn.RMSNorm(HIDDEN)
        self.up, self.down = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN, bias=False)
        self.scale = nn.Parameter(torch.randn(HIDDEN))

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.root(self.norm(x))))) * self.scale


class Doubled(torch.autograd.Function):
    calls = 0

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx, grad):
        Doubled.calls += 1
        x, weight = ctx.saved_tensors
        return grad * weight, (grad * x).flatten(0, -2).sum(0)


class Python(nn.Module):
    """A parameter used by a function written in Python."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(HIDDEN))

    def forward(self, x):
        return Doubled.apply(x, self.weight)


class Shared(nn.Module):
    """A parameter used twice."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(HIDDEN, HIDDEN))

    def forward(self, x):
        return nn.functional.linear(nn.functional.linear(x, self.weight).relu(), self.weight.t())


class Ours(nn.Module):
    """Functions of our own, which leave the gradients of their weights for later."""

    def __init__(self):
        super().__init__()
        self.norm = nn.Parameter(torch.randn(HIDDEN))
        self.weight, self.bias = nn.Parameter(torch.randn(HIDDEN, HIDDEN)), nn.Parameter(torch.randn(HIDDEN))

    def forward(self, x):
        x = _RMSNorm.apply(x, self.norm, 1e-5)
        return column_linear(x, self.weight, self.bias, single(), sequence_parallel=False)


class Table(nn.Module):
    """A look-up that adds to the rows of its gradient."""

    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.randn(11, HIDDEN))

    def forward(self, ids):
        return table_rows(ids, self.table, complete=True)


def model_of(kind):
    torch.manual_seed(1)
    if kind == "table":
        return nn.Sequential(Table(), Ours()), torch.randint(0, 11, (3, 5))
    if kind == "tokens":
        return nn.Sequential(nn.Embedding(11, HIDDEN), Block(), nn.Linear(HIDDEN, 7)), torch.randint(0, 11, (3, 5))
    middle = {"blocks": Block, "python": Python, "shared": Shared, "ours": Ours}[kind]
    return nn.Sequential(Block(), middle(), Block()), torch.randn(3, 5, HIDDEN, requires_grad=True)


@pytest.mark.parametrize("kind", ["blocks", "python", "shared", "tokens", "ours", "table"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_both_halves_together_are_one_backward_to_the_bit(kind, dtype):
    found = []
    for halves in (False, True):
        Doubled.calls = 0
        model, x = model_of(kind)
        model = model.to(dtype)
        x = x.detach().to(dtype).requires_grad_() if x.is_floating_point() else x
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        y = (model(x).float() ** 2).sum()
        if halves:
            input_grad, weights = input_half(get_gradient_edge(y), torch.ones(()), x)
            assert all(torch.equal(p.grad, torch.ones_like(p)) for p in model.parameters()), "too early"
            weights.run()
        else:
            y.backward()
            input_grad = x.grad
        assert Doubled.calls == (kind == "python"), "a function that may send messages runs once"
        found.append([input_grad, *(p.grad for p in model.parameters())])
    for whole, half in zip(*found):
        assert (whole is None and half is None) or torch.equal(whole, half)


def test_only_what_cannot_be_put_off_is_done_in_the_first_half():
    for kind, held, left in (
        ("blocks", 0, 0), ("python", 1, 0), ("shared", 1, 0), ("tokens", 0, 0), ("ours", 0, 3), ("table", 0, 4),
    ):  # fmt: skip
        model, x = model_of(kind)
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        _, weights = input_half(get_gradient_edge(model(x).sum()), torch.ones(()), x)
        assert len(weights.held) == held
        assert sum(len(parameters) for parameters, _ in weights.left) == left
        assert sum(len(parameters) for _, _, parameters in weights.edges) == len(list(model.parameters())) - held - left
