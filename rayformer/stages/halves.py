"""Backward in two halves: first the gradient of the input, for which another stage waits, later those of the weights.

The graph of a forward is taken as it is, whatever modules made it, and both halves run the nodes that one backward
would run, so that the bits are the same. The first half stops at every node that uses a parameter and notes the
gradient that arrives there; the second half runs each of these nodes again, for its parameters alone.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node, _engine_run_backward

from rayformer.ops.later import Left, left_for_later

_VIEWS = frozenset(
    f"{name}Backward0"
    for name in "T Transpose Permute View UnsafeView ReshapeAlias Alias ToCopy Unsqueeze Expand".split()  # noqa: SIM905
)


@dataclass(frozen=True)
class WeightHalf:
    """What is left to do: ``run`` adds the gradients of the weights to their ``.grad``, once.

    ``edges`` are where the noted ``grads`` arrived, by node, with the node's parameters; ``left`` is what functions of
    our own left; ``held`` are gradients that were not put off.
    """

    edges: Sequence[tuple[Sequence[GradientEdge], Sequence[torch.Tensor], Sequence[torch.Tensor]]]
    left: Sequence[Left]
    held: Sequence[tuple[torch.Tensor, torch.Tensor]]

    def run(self) -> None:
        for edges, grads, parameters in self.edges:
            _run(edges, grads, parameters, again=True, accumulate=True)
        with torch.no_grad():  # as autograd calls functions
            for weights, compute in self.left:
                for weight, grad in zip(weights, compute()):
                    if weight is not None and grad is not None:
                        _add(weight, grad)
        for parameter, grad in self.held:
            _add(parameter, grad)


def whole(y: GradientEdge, grad: torch.Tensor) -> None:
    """Go back from ``y``, whose gradient is ``grad``, in one: add the gradients of all leaves to their ``.grad``."""
    _run([y], [grad], (), again=False, accumulate=True)


def input_half(y: GradientEdge, grad: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor | None, WeightHalf]:
    """Go back from ``y``, whose gradient is ``grad``, to ``x``: its gradient, None if it needs none, and what remains.

    Functions written in Python compute all their gradients together, perhaps with messages; ours can leave those of
    weights, see ops.later. Not put off, but held back and added by the second half, are the gradients of a parameter
    that another such function uses, a compiled one too, and of one that several nodes use.
    """
    users = _users(y)
    alone: set[torch.Tensor] = set()
    deferred: dict[Node, list[torch.Tensor]] = defaultdict(list)
    held: list[torch.Tensor] = []
    for parameter, nodes in users.of.items():
        if not isinstance(parameter, nn.Parameter):  # x, or what a module made for itself
            continue
        [node, *others] = nodes
        if others or isinstance(node, BackwardCFunction):
            held.append(parameter)
            if not others:
                alone.add(parameter)
        else:
            deferred[node].append(parameter)
    edges = [[GradientEdge(node, number) for number in sorted(users.outputs[node])] for node in deferred]
    wanted: list[torch.Tensor | GradientEdge] = [*held, *(edge for of_node in edges for edge in of_node)]
    if x.requires_grad:
        wanted.append(x)
    with left_for_later(alone) as left_by_ours:
        found = list(_run([y], [grad], wanted, again=True, accumulate=False)) if wanted else []
    input_grad = found.pop() if x.requires_grad else None
    grads = iter(found)
    kept = [(parameter, grad) for parameter in held if (grad := next(grads)) is not None]
    left = []
    for of_node, parameters in zip(edges, deferred.values()):
        arrived = [(edge, grad) for edge in of_node if (grad := next(grads)) is not None]
        if arrived:
            left.append(([edge for edge, _ in arrived], [grad for _, grad in arrived], parameters))
    return input_grad, WeightHalf(left, left_by_ours, kept)


def _run(
    edges: Sequence[GradientEdge],
    grads: Sequence[torch.Tensor],
    inputs: Sequence[torch.Tensor | GradientEdge],
    *,
    again: bool,
    accumulate: bool,
) -> Sequence[torch.Tensor]:
    """What torch.autograd.backward and grad do, once they have compared shapes.

    For that they load torch's symbolic shapes and sympy: 0.3 s in the first step of a process, for which all other
    cells wait after a repair.
    """
    found: Sequence[torch.Tensor] = _engine_run_backward(
        tuple(edges), tuple(grads), again, False, tuple(inputs), allow_unreachable=True, accumulate_grad=accumulate
    )
    return found


def _add(parameter: torch.Tensor, grad: torch.Tensor) -> None:
    assert parameter.grad is not None, "a parameter without memory for its gradient"
    parameter.grad.add_(grad.to(parameter.grad_dtype))  # as autograd does


@dataclass(frozen=True)
class _Users:
    """Which nodes use each parameter, and which of every node's outputs are used."""

    of: dict[torch.Tensor, list[Node]]
    outputs: dict[Node, set[int]]


def _users(y: GradientEdge) -> _Users:
    """Walk the graph of ``y``; what only turns a parameter around, such as a transpose, belongs to its user."""
    users = _Users({}, defaultdict(set))
    users.outputs[y.node].add(y.output_nr)
    seen, todo = {y.node}, [y.node]
    while todo:
        node = todo.pop()
        for after, number in _next(node):
            parameter = _parameter(after)
            if parameter is not None:
                nodes = users.of.setdefault(parameter, [])
                if node not in nodes:
                    nodes.append(node)
                continue
            users.outputs[after].add(number)
            if after not in seen:
                seen.add(after)
                todo.append(after)
    return users


def _parameter(node: Node) -> torch.Tensor | None:
    """The leaf that ``node`` accumulates into, or that it is a view of."""
    while not hasattr(node, "variable"):
        if node.name() not in _VIEWS:
            return None
        following = list(_next(node))
        if len(following) != 1:
            return None
        node = following[0][0]
    leaf: torch.Tensor = node.variable
    return leaf


def _next(node: Node) -> Iterator[tuple[Node, int]]:
    return ((after, number) for after, number in node.next_functions if after is not None)
