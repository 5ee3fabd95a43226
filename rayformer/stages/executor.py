"""The executor: runs one program of a pipeline rank, instruction by instruction, and knows nothing of its schedule."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch

from rayformer.stages.channel import Channel
from rayformer.stages.instructions import (
    Backward,
    FoldGrads,
    Forward,
    Instruction,
    Program,
    RecvAct,
    RecvGrad,
    ReduceGrads,
    SendAct,
    SendGrad,
)
from rayformer.stages.stage import Stage


class GradSink(Protocol):
    """Where the instructions about gradients go."""

    def close_leaf(self, leaf: int) -> None: ...

    def reduce(self, bucket: int) -> None: ...


@dataclass(kw_only=True)
class Feed:
    """The microbatches of one step: token ids on the first stage, labels on the last, each [B, S] by number."""

    tokens: Mapping[int, torch.Tensor] = field(default_factory=dict)
    labels: Mapping[int, torch.Tensor] = field(default_factory=dict)


@dataclass(kw_only=True)
class Losses:
    """What the last stage found: per microbatch the sum of its token losses, and how many tokens have one."""

    sums: dict[int, torch.Tensor] = field(default_factory=dict)
    counts: dict[int, int] = field(default_factory=dict)


class Executor:
    """Runs programs on one stage. ``counter`` is the last instruction begun, readable from another thread."""

    def __init__(self, stage: Stage, channel: Channel) -> None:
        self._stage, self._channel = stage, channel
        self.counter: Instruction | None = None

    def run(self, program: Program, feed: Feed, grads: GradSink | None = None) -> Losses:
        """Execute ``program``; one without Backward runs without recording a graph."""
        losses = Losses()
        inputs: dict[int, torch.Tensor] = {}
        outputs: dict[int, torch.Tensor] = {}
        output_grads: dict[int, torch.Tensor] = {}
        trains = any(isinstance(instruction, Backward) for instruction in program)
        with torch.set_grad_enabled(trains):
            for instruction in program:
                self.counter = instruction
                match instruction:
                    case Forward(microbatch=v):
                        x = feed.tokens[v] if self._stage.is_first else inputs[v] if trains else inputs.pop(v)
                        outputs[v] = self._forward(v, x, feed, losses)
                    case Backward(microbatch=v):
                        torch.autograd.backward(outputs.pop(v), output_grads.pop(v, None))
                    case SendAct(microbatch=v):
                        output = outputs[v] if trains else outputs.pop(v)
                        self._channel.send(instruction, output.detach())
                    case RecvAct(microbatch=v):
                        inputs[v] = self._channel.recv(instruction).requires_grad_(trains)
                    case SendGrad(microbatch=v):
                        gradient = inputs.pop(v).grad
                        assert gradient is not None
                        self._channel.send(instruction, gradient)
                    case RecvGrad(microbatch=v):
                        output_grads[v] = self._channel.recv(instruction)
                    case FoldGrads(leaf=leaf):
                        assert grads is not None
                        grads.close_leaf(leaf)
                    case ReduceGrads(bucket=bucket):
                        assert grads is not None
                        grads.reduce(bucket)
                    case _:
                        raise AssertionError(f"no such instruction: {instruction!r}")
        self._channel.flush()
        self.counter = None
        return losses

    def _forward(self, v: int, x: torch.Tensor, feed: Feed, losses: Losses) -> torch.Tensor:
        output = self._stage(x)
        if not self._stage.is_last:
            return output
        labels = feed.labels[v]
        total = self._stage.token_losses(output, labels).sum()
        losses.sums[v] = total.detach()
        losses.counts[v] = int((labels >= 0).sum())
        return total
