"""One microbatch's way through a stage: forward keeps for each segment what its backward will need.

Each segment has a graph of its own, cut from its neighbours', so that backward can stop between two of them, and a
recomputed one is simply run again.
"""

from __future__ import annotations

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
        self._kept: list[tuple[torch.Tensor, torch.Tensor | None]] = []
        self.output: torch.Tensor | None = None
        self.loss: torch.Tensor | None = None
        self.input_grad: torch.Tensor | None = None

    def forward(self, x: torch.Tensor, first: int, stop: int) -> None:
        """Run the segments [first, stop) on ``x``; ``output`` is what goes on."""
        self._enter()
        for number in range(first, stop):
            x = x.detach().requires_grad_(x.is_floating_point())
            recomputed = self._stage.segments[number].recomputed
            with torch.set_grad_enabled(not recomputed):
                y = self._run(number, x)
            self._kept.append((x, None if recomputed else y))
            x = y.detach()
        self.output = x

    def backward(self, grad: torch.Tensor | None, first: int, stop: int) -> None:
        """Go back through the segments [first, stop) with the output's gradient; ``input_grad`` is what goes on."""
        self._enter()
        self.output = None
        for number in reversed(range(first, stop)):
            x, y = self._kept.pop()
            if y is None:
                with torch.enable_grad():
                    y = self._run(number, x)
            torch.autograd.backward(y, grad)
            grad, x.grad = x.grad, None
        self.input_grad = grad

    def _run(self, number: int, x: torch.Tensor) -> torch.Tensor:
        y = self._stage.run(number, x)
        if self._labels is None or number < len(self._stage.segments) - 1:
            return y
        total = self._stage.token_losses(y, self._labels).sum()
        self.loss = total.detach()
        return total

    def _enter(self) -> None:
        moment: Moment = self._stage.moment
        moment.step, moment.samples = self._step, self._samples
