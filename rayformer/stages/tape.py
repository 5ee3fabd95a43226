"""One microbatch's way through a stage: forward keeps what its backward will need.

Each run of segments that forward makes at a time has a graph of its own, cut from its neighbours', so that backward can
stop between two of them. A recomputed segment keeps only its input, and is simply run again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from rayformer.ops.dropout import Moment
from rayformer.stages.stage import Stage


class Tape:
    """The segments that ``samples`` of ``step`` have passed on ``stage`` and not yet gone back through.

    The stage's last segment may end in the loss: give ``labels``, and ``loss`` is the sum of the token losses.
    """

    def __init__(
        self, stage: Stage, *, step: int | None, samples: tuple[int, ...], labels: torch.Tensor | None = None
    ) -> None:
        self._stage, self._step, self._samples, self._labels = stage, step, samples, labels
        self._graphs: list[_Graph] = []
        self.output: torch.Tensor | None = None
        self.loss: torch.Tensor | None = None
        self.input_grad: torch.Tensor | None = None

    def forward(self, x: torch.Tensor, first: int, stop: int) -> None:
        """Run the segments [first, stop) on ``x``; ``output`` is what goes on."""
        self._enter()
        for start, end in self._runs(first, stop):
            x = x.detach().requires_grad_(x.is_floating_point())
            recomputed = self._stage.segments[start].recomputed
            with torch.set_grad_enabled(not recomputed):
                y = self._run(x, start, end)
            self._graphs.append(_Graph(start, end, x, None if recomputed else y))
            x = y.detach()
        self.output = x

    def backward(self, grad: torch.Tensor | None, first: int) -> None:
        """Go back from where it stands through segment ``first``; ``input_grad`` is what goes on."""
        self._enter()
        self.output = None
        while self._graphs and self._graphs[-1].start >= first:
            graph = self._graphs.pop()
            y = graph.output
            if y is None:
                with torch.enable_grad():
                    y = self._run(graph.input, graph.start, graph.stop)
            torch.autograd.backward(y if grad is None else _Seeded.apply(y, grad))
            grad, graph.input.grad = graph.input.grad, None
        self.input_grad = grad

    def _runs(self, first: int, stop: int) -> Iterator[tuple[int, int]]:
        """The segments [first, stop) in as few runs as there can be when recomputed ones are by themselves."""
        start = first
        for number in range(first, stop):
            if self._stage.segments[number].recomputed:
                if start < number:
                    yield start, number
                yield number, number + 1
                start = number + 1
        if start < stop:
            yield start, stop

    def _run(self, x: torch.Tensor, first: int, stop: int) -> torch.Tensor:
        for number in range(first, stop):
            x = self._stage.run(number, x)
        if self._labels is None or stop < len(self._stage.segments):
            return x
        total = self._stage.token_losses(x, self._labels).sum()
        self.loss = total.detach()
        return total

    def _enter(self) -> None:
        moment: Moment = self._stage.moment
        moment.step, moment.samples = self._step, self._samples


class _Seeded(torch.autograd.Function):
    """A scalar whose backward begins with ``grad`` as the gradient of ``y``.

    ``torch.autograd.backward(y, grad)`` does the same, but loads torch's symbolic shapes and sympy to compare two
    shapes: 0.3 s in the first step of a process, for which all other cells wait after a repair.
    """

    @staticmethod
    def forward(ctx: Any, y: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        assert y.shape == grad.shape, f"a gradient of shape {grad.shape} for {y.shape}"
        ctx.grad = grad
        return y.new_empty(())

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.grad, None


@dataclass(frozen=True)
class _Graph:
    """The segments [start, stop), what went in, and what came out, or None if it is to be computed again."""

    start: int
    stop: int
    input: torch.Tensor
    output: torch.Tensor | None
