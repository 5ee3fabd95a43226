"""The executor: runs one program of a pipeline rank, instruction by instruction, and knows nothing of its schedule."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch

from rayformer.stages.channel import Channel
from rayformer.stages.instructions import (
    AwaitParams,
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
from rayformer.stages.tape import Tape


class DataParallel(Protocol):
    """Where the instructions about gradients and parameters go."""

    def close_leaf(self, leaf: int) -> None: ...

    def reduce(self, bucket: int) -> None: ...

    def await_params(self, bucket: int) -> None: ...


@dataclass(kw_only=True)
class Feed:
    """The microbatches of one step by number.

    Token ids on the first stage and labels on the last, each [B, S], with how many labels have a loss; on every stage
    the places in the step's global batch of the samples in each. ``step`` is None when nothing
    trains. Backward starts with ``seed`` as the gradient of the sum of the token losses.
    """

    step: int | None = None
    samples: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    tokens: dict[int, torch.Tensor] = field(default_factory=dict)
    labels: dict[int, torch.Tensor] = field(default_factory=dict)
    counts: dict[int, int] = field(default_factory=dict)
    seed: float = 1.0


@dataclass(kw_only=True)
class Losses:
    """What the last stage found: per microbatch the sum of its token losses, and how many tokens have one."""

    sums: dict[int, torch.Tensor] = field(default_factory=dict)
    counts: dict[int, int] = field(default_factory=dict)


class Executor:
    """Runs programs on one stage.

    ``counter`` is the last instruction begun, readable from another thread. ``seconds`` adds up how long training
    instructions of each kind took, without the seconds they waited, told by ``waited_s``; these are its ``waited``.
    ``on_instruction`` is told of every instruction before it begins.
    """

    def __init__(self, stage: Stage, channel: Channel, *, waited_s: Callable[[], float] = float) -> None:
        self._stage, self._channel, self._waited_s = stage, channel, waited_s
        self.on_instruction: Callable[[Instruction], None] | None = None
        self.counter: Instruction | None = None
        self.seconds: defaultdict[str, float] = defaultdict(float)

    def run(self, program: Program, feed: Feed, parallel: DataParallel) -> Losses:
        """Execute ``program``; one without Backward runs without recording a graph."""
        losses = Losses()
        if any(isinstance(instruction, Backward) for instruction in program):
            self._train(program, feed, parallel, losses)
        else:
            with torch.no_grad():
                self._evaluate(program, feed, parallel, losses)
        self._channel.finish()
        self.counter = None
        return losses

    def _train(self, program: Program, feed: Feed, parallel: DataParallel, losses: Losses) -> None:
        tapes: dict[int, Tape] = {}
        inputs: dict[int, torch.Tensor] = {}
        output_grads: dict[int, torch.Tensor] = {}
        num_segments = len(self._stage.segments)
        self._channel.begin(program)
        for instruction in program:
            started, waited = time.perf_counter(), self._waited_s()
            self._begin(instruction)
            match instruction:
                case Forward(microbatch=v, part=part):
                    first, stop = part or (0, num_segments)
                    if first == 0:
                        inputs[v] = feed.tokens[v] if self._stage.is_first else inputs[v]
                        tapes[v] = Tape(self._stage, step=feed.step, samples=feed.samples[v], labels=feed.labels.get(v))
                    tapes[v].forward(inputs.pop(v), first, stop)
                    if stop < num_segments:
                        inputs[v] = tapes[v].output
                    elif self._stage.is_last:
                        losses.sums[v], losses.counts[v] = tapes[v].loss, feed.counts[v]
                        output_grads[v] = torch.tensor(feed.seed, device=feed.labels[v].device)
                case Backward(microbatch=v, part=part):
                    first, _ = part or (0, num_segments)
                    tapes[v].backward(output_grads.pop(v), first)
                    gradient = tapes[v].input_grad
                    if first == 0:
                        del tapes[v]
                    if gradient is not None:
                        output_grads[v] = gradient
                case SendAct(microbatch=v):
                    self._channel.send(instruction, tapes[v].output)
                case RecvAct(microbatch=v):
                    inputs[v] = self._channel.recv(instruction)
                case SendGrad(microbatch=v):
                    self._channel.send(instruction, output_grads.pop(v))
                case RecvGrad(microbatch=v):
                    output_grads[v] = self._channel.recv(instruction)
                case FoldGrads(leaf=leaf):
                    parallel.close_leaf(leaf)
                case ReduceGrads(bucket=bucket):
                    parallel.reduce(bucket)
                case AwaitParams(bucket=bucket):
                    parallel.await_params(bucket)
                case _:
                    raise AssertionError(f"no such instruction: {instruction!r}")
            waited = self._waited_s() - waited
            self.seconds["waited"] += waited
            self.seconds[type(instruction).__name__] += time.perf_counter() - started - waited

    def _begin(self, instruction: Instruction) -> None:
        self.counter = instruction
        if self.on_instruction is not None:
            self.on_instruction(instruction)

    def _evaluate(self, program: Program, feed: Feed, parallel: DataParallel, losses: Losses) -> None:
        passing: dict[int, torch.Tensor] = dict(feed.tokens)
        self._channel.begin(program)
        for instruction in program:
            self._begin(instruction)
            match instruction:
                case Forward(microbatch=v):
                    passing[v] = self._stage(passing[v])
                    if self._stage.is_last:
                        losses.sums[v] = self._stage.token_losses(passing.pop(v), feed.labels[v]).sum()
                        losses.counts[v] = feed.counts[v]
                case SendAct(microbatch=v):
                    self._channel.send(instruction, passing.pop(v))
                case RecvAct(microbatch=v):
                    passing[v] = self._channel.recv(instruction)
                case AwaitParams(bucket=bucket):
                    parallel.await_params(bucket)
                case _:
                    raise AssertionError(f"no such instruction here: {instruction!r}")
