"""The executor: runs one program of a pipeline rank, instruction by instruction, and knows nothing of its schedule."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

import torch

from rayformer.stages.channel import Arrival, Channel
from rayformer.stages.instructions import (
    AwaitParams,
    Backward,
    Compute,
    FoldGrads,
    Forward,
    InputGrad,
    Instruction,
    Program,
    Recv,
    RecvAct,
    RecvGrad,
    ReduceGrads,
    Send,
    SendAct,
    SendGrad,
    StageMap,
    WeightGrad,
)
from rayformer.stages.stage import Stage
from rayformer.stages.tape import Tape


class DataParallel(Protocol):
    """Where the instructions about gradients and parameters go."""

    def close_leaf(self, leaf: int, chunk: int) -> None: ...

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
    """Runs programs on the stages of one rank, one for each chunk.

    ``counter`` is the last instruction begun, readable from another thread. ``seconds`` adds up how long training
    instructions of each kind took, without the seconds they waited, told by ``waited_s``; these are its ``waited``.
    ``on_instruction`` is told of every instruction before it begins; a receive begins where what it brings is needed.
    ``on_done`` is told of every training instruction when it is done: its seconds, and those of them that it waited.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        channel: Channel,
        *,
        stage_map: StageMap,
        rank: int,
        waited_s: Callable[[], float],
    ) -> None:
        self._stages, self._channel, self._waited_s = tuple(stages), channel, waited_s
        following = {chunk: stage_map.next_chunk(rank, chunk) for chunk in range(stage_map.chunks)}
        self._next_here = {chunk: after for chunk, after in following.items() if after is not None}
        self._previous_here = {after: chunk for chunk, after in self._next_here.items()}
        self.on_instruction: Callable[[Instruction], None] | None = None
        self.counter: Instruction | None = None
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.on_done: Callable[[Instruction, float, float], None] | None = None

    def run(self, program: Program, feed: Feed, parallel: DataParallel) -> Losses:
        """Execute ``program``; one without backwards runs without recording a graph."""
        losses = Losses()
        if any(isinstance(instruction, Backward | InputGrad) for instruction in program):
            self._channel.begin(program)
            self._train(program, feed, parallel, losses)
            self._channel.finish()
        else:
            with torch.no_grad():
                for v, logits, stage in self._outputs(program, feed.tokens):
                    losses.sums[v] = stage.token_losses(logits, feed.labels[v]).sum()
                    losses.counts[v] = feed.counts[v]
        self.counter = None
        return losses

    def infer(self, program: Program, tokens: Mapping[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        """The logits of each microbatch of ``tokens`` [B, S], on the rank of the last stage; empty on others."""
        with torch.no_grad():
            return {v: logits for v, logits, _ in self._outputs(program, tokens)}

    def _train(self, program: Program, feed: Feed, parallel: DataParallel, losses: Losses) -> None:
        passes = _Passes(seed=torch.tensor(feed.seed, device=self._channel.device))
        began, waited_before = time.perf_counter(), self._waited_s()
        for instruction in program:
            self._await_input(instruction, passes)
            if not isinstance(instruction, RecvAct | RecvGrad):
                self._begin(instruction)
            match instruction:
                case Forward():
                    self._forward(instruction, feed, passes, losses)
                case Backward() | InputGrad():
                    self._backward(instruction, passes)
                case WeightGrad(part=part):
                    first = part[0] if part else 0
                    passes.tapes[_place(instruction)].accumulate(first)
                    if first == 0:
                        del passes.tapes[_place(instruction)]
                case SendAct():
                    self._channel.send(instruction, passes.outputs.pop(_place(instruction)))
                case SendGrad():
                    self._channel.send(instruction, passes.input_grads.pop(_place(instruction)))
                case RecvAct() | RecvGrad():
                    passes.arrivals[_place(instruction), isinstance(instruction, RecvAct)] = self._channel.recv(
                        instruction
                    )
                case FoldGrads(leaf=leaf, chunk=chunk):
                    parallel.close_leaf(leaf, chunk)
                case ReduceGrads(bucket=bucket):
                    parallel.reduce(bucket)
                case AwaitParams(bucket=bucket):
                    parallel.await_params(bucket)
                case _:
                    raise AssertionError(f"no such instruction: {instruction!r}")
            ended, waited_after = time.perf_counter(), self._waited_s()
            took, waited = ended - began, waited_after - waited_before
            began, waited_before = ended, waited_after
            self.seconds["waited"] += waited
            self.seconds[type(instruction).__name__] += took - waited
            if self.on_done is not None:
                self.on_done(instruction, took, waited)

    def _await_input(self, instruction: Instruction, passes: _Passes) -> None:
        """Wait for the message that a computation needs, if it needs one that it has not got."""
        if not isinstance(instruction, Forward | Backward | InputGrad):
            return
        place = _place(instruction)
        goes_up = isinstance(instruction, Forward)
        arrival = passes.arrivals.pop((place, goes_up), None)
        if arrival is not None:
            self._begin(arrival.message)
            (passes.inputs if goes_up else passes.output_grads)[place] = arrival.wait()

    def _forward(self, op: Forward, feed: Feed, passes: _Passes, losses: Losses) -> None:
        place, v, stage = _place(op), op.microbatch, self._stages[op.chunk]
        num_segments = len(stage.segments)
        first, stop = op.part or (0, num_segments)
        if first == 0:
            labels = feed.labels[v] if stage.is_last else None
            passes.tapes[place] = Tape(stage, step=feed.step, samples=feed.samples[v], labels=labels)
        x = feed.tokens[v] if stage.is_first and first == 0 else passes.inputs.pop(place)
        y = passes.tapes[place].forward(x, first, stop)
        if stop < num_segments:
            passes.inputs[place] = y
        elif stage.is_last:
            losses.sums[v], losses.counts[v] = passes.tapes[place].loss, feed.counts[v]
            passes.output_grads[place] = passes.seed
        elif op.chunk in self._next_here:
            passes.inputs[v, self._next_here[op.chunk]] = y
        else:
            passes.outputs[place] = y

    def _backward(self, op: Backward | InputGrad, passes: _Passes) -> None:
        place, whole = _place(op), isinstance(op, Backward)
        first = op.part[0] if op.part else 0
        gradient = passes.tapes[place].backward(passes.output_grads.pop(place), first, weights=whole)
        if first > 0:
            passes.output_grads[place] = gradient
            return
        if whole:
            del passes.tapes[place]
        if op.chunk in self._previous_here:
            passes.output_grads[op.microbatch, self._previous_here[op.chunk]] = gradient
        elif gradient is not None:
            passes.input_grads[place] = gradient

    def _begin(self, instruction: Instruction) -> None:
        self.counter = instruction
        if self.on_instruction is not None:
            self.on_instruction(instruction)

    def _outputs(
        self, program: Program, tokens: Mapping[int, torch.Tensor]
    ) -> Iterator[tuple[int, torch.Tensor, Stage]]:
        """Execute ``program``, which has forwards only: each microbatch's logits, and the last stage."""
        passing: dict[_Place, torch.Tensor] = {}
        self._channel.begin(program)
        for instruction in program:
            self._begin(instruction)
            match instruction:
                case Forward(microbatch=v, chunk=chunk):
                    stage = self._stages[chunk]
                    y = stage(tokens[v] if stage.is_first else passing.pop((v, chunk)))
                    if stage.is_last:
                        yield v, y, stage
                    else:
                        passing[v, self._next_here.get(chunk, chunk)] = y
                case SendAct():
                    self._channel.send(instruction, passing.pop(_place(instruction)))
                case RecvAct():
                    passing[_place(instruction)] = self._channel.recv(instruction).wait()
                case _:
                    raise AssertionError(f"no such instruction here: {instruction!r}")
        self._channel.finish()


_Place: TypeAlias = tuple[int, int]  # microbatch and chunk


def _place(instruction: Compute | Send | Recv) -> _Place:
    return instruction.microbatch, instruction.chunk


@dataclass(kw_only=True)
class _Passes:
    """What is under way in a step, by microbatch and chunk; an arrival also by whether it is an activation."""

    seed: torch.Tensor
    tapes: dict[_Place, Tape] = field(default_factory=dict)
    inputs: dict[_Place, torch.Tensor] = field(default_factory=dict)
    outputs: dict[_Place, torch.Tensor] = field(default_factory=dict)
    output_grads: dict[_Place, torch.Tensor] = field(default_factory=dict)
    input_grads: dict[_Place, torch.Tensor] = field(default_factory=dict)
    arrivals: dict[tuple[_Place, bool], Arrival] = field(default_factory=dict)
