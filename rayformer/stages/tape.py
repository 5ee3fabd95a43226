"""One microbatch's way through a stage: forward keeps what its backward will need.

Each run of segments that forward makes at a time has a graph of its own, cut from its neighbours', so that backward can
stop between two of them. A recomputed segment keeps only its input, and is simply run again. What a run gives is not
kept: a graph hangs on the edge at which its gradient comes in.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from rayformer.ops.dropout import Moment
from rayformer.stages.halves import WeightHalf, input_half, whole
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
        self._halves: deque[tuple[int, WeightHalf]] = deque()  # by the first segment, from the end of the stage
        self.loss: torch.Tensor | None = None

    def forward(self, x: torch.Tensor, first: int, stop: int) -> torch.Tensor:
        """Run the segments [first, stop) on ``x``; what goes on."""
        self._enter()
        for start, end in self._runs(first, stop):
            x = x.detach().requires_grad_(x.is_floating_point())
            recomputed = self._stage.segments[start].recomputed
            with torch.set_grad_enabled(not recomputed):
                y = self._run(x, start, end)
            self._graphs.append(_Graph(start, end, x, None if recomputed else get_gradient_edge(y)))
            x = y.detach()
        return x

    def backward(self, grad: torch.Tensor, first: int, *, weights: bool = True) -> torch.Tensor | None:
        """Go back from where it stands through segment ``first``; the gradient that goes on, None for token ids.

        Without ``weights`` their gradients are left for ``accumulate``.
        """
        self._enter()
        going: torch.Tensor | None = grad
        while self._graphs and self._graphs[-1].start >= first:
            assert going is not None, "a gradient goes on between segments"
            graph = self._graphs.pop()
            edge = graph.edge
            if edge is None:
                with torch.enable_grad():
                    edge = get_gradient_edge(self._run(graph.input, graph.start, graph.stop))
            if weights:
                whole(edge, going)
                going, graph.input.grad = graph.input.grad, None
            else:
                going, half = input_half(edge, going, graph.input)
                self._halves.append((graph.start, half))
        return going

    def accumulate(self, first: int) -> None:
        """Add what ``backward`` has left of the gradients of weights, down to segment ``first``."""
        self._enter()
        while self._halves and self._halves[0][0] >= first:
            self._halves.popleft()[1].run()

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


@dataclass(frozen=True)
class _Graph:
    """The segments [start, stop), what went in, and where backward begins, or None if it is to be computed again."""

    start: int
    stop: int
    input: torch.Tensor = field(repr=False)
    edge: GradientEdge | None
