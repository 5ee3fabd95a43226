"""A pipeline whose stages sleep instead of computing, for those that run it: ours, a loop by hand, and torch's own.

For torch and for ours beside it a stage is one function for the input, whose backward sleeps for the gradient of the
input, and one for a weight, whose backward sleeps for the gradient of the weight: so whoever divides backward divides
it here too. A loop by hand only sleeps; beside it ours is the executor and its channel with tapes that only sleep.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining import schedules as torch_schedules

from rayformer.config.recompute import RecomputeConfig
from rayformer.groups import Groups
from rayformer.models.block import Block
from rayformer.nn.context import Context
from rayformer.ops.later import now_or_later
from rayformer.stages import executor
from rayformer.stages.channel import Channel
from rayformer.stages.executor import Executor, Feed
from rayformer.stages.instructions import Compute, Forward, InputGrad, StageMap, WeightGrad
from rayformer.stages.schedules import get_schedule
from rayformer.stages.stage import Stage

SHAPE = (1, 16, 64)  # a message of 4 KiB
_NAP_S = 0.00012  # what a sleep may take longer than asked


@dataclass(frozen=True, kw_only=True)
class Times:
    """Seconds of a stage's forward, input gradient and weight gradient."""

    forward: float
    input_grad: float
    weight_grad: float

    def of(self, op: Compute) -> float:
        parts = {Forward: self.forward, InputGrad: self.input_grad, WeightGrad: self.weight_grad}
        return parts.get(type(op), self.input_grad + self.weight_grad)


def sleep(seconds: float) -> None:
    """Return after so long: sleep for most of it, and look at the clock for the rest."""
    until = time.perf_counter() + seconds
    if seconds > _NAP_S:
        time.sleep(seconds - _NAP_S)
    while time.perf_counter() < until:
        pass


class _Input(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, times: Times) -> torch.Tensor:
        ctx.times = times
        sleep(times.forward)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        sleep(ctx.times.input_grad)
        return grad.contiguous(), None  # torch sends it as it is


class _Weight(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, times: Times) -> torch.Tensor:
        ctx.times = times
        ctx.save_for_backward(weight)
        return weight.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, None]:
        (weight,) = ctx.saved_tensors

        def compute() -> list[torch.Tensor]:
            sleep(ctx.times.weight_grad)
            return [grad]

        (d_weight,) = now_or_later((weight,), compute)
        return d_weight, None


class Sleeper(nn.Module):
    """x [B, S, H] to itself plus a weight [1]."""

    def __init__(self, times: Times) -> None:
        super().__init__()
        self.times = times
        self.weight = nn.Parameter(torch.zeros(1))
        self.weight.grad = torch.zeros(1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Input.apply(x, self.times) + _Weight.apply(self.weight, self.times)


class _Tokens(nn.Module):
    """Token ids [B, S] to the same [B, S, H] for all; a weight has it need a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(SHAPE))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.weight * 1.0


def step_of(who: str, name: str, *, groups: Groups, chunks: int, microbatches: int, times: Times) -> Callable[[], None]:
    """What runs one step of the schedule ``name`` on this rank: one of the four that WHO names."""
    stage_map = StageMap(pp=groups.layout.pp, chunks=chunks, vee=get_schedule(name).vee)
    make = {"ours": _ours, "executor": _executor, "by hand": _by_hand, "torch": _torch}[who]
    return make(name, groups, stage_map, microbatches, times)


class _NoParallel:
    def close_leaf(self, leaf: int, chunk: int) -> None: ...

    def reduce(self, bucket: int) -> None: ...

    def await_params(self, bucket: int) -> None: ...


def _ours(name: str, groups: Groups, stage_map: StageMap, microbatches: int, times: Times) -> Callable[[], None]:
    layers = [Block(name=str(i), kind="layer", build=lambda _: Sleeper(times)) for i in range(stage_map.last + 1)]
    blocks = [
        Block(name="input", kind="input", build=lambda _: _Tokens()),
        *layers,
        Block(name="output", kind="output", build=lambda _: nn.Identity()),
    ]
    numbers = [range(i + (i > 0), i + 2 + (i == stage_map.last)) for i in range(stage_map.last + 1)]
    rank = groups.cell.pp
    stages = [
        Stage(
            blocks,
            lambda output, labels, tp: output.sum(-1),
            numbers=numbers[stage_map.stage(rank, chunk)],
            ctx=Context(),
            recompute=RecomputeConfig(),
        )
        for chunk in range(stage_map.chunks)
    ]
    for stage in stages:
        for parameter in stage.parameters():
            parameter.grad = torch.zeros_like(parameter)
    channel = Channel(groups.pp, shape=SHAPE, dtype=torch.float32)
    ours = Executor(stages, channel, stage_map=stage_map, rank=rank, waited_s=lambda: groups.waited_s)
    program = get_schedule(name).programs(stage_map.pp, stage_map.chunks, microbatches)[rank]
    ids = {v: torch.zeros(SHAPE[:2], dtype=torch.int64) for v in range(microbatches)}
    feed = Feed(
        samples={v: (v,) for v in range(microbatches)}, tokens=ids, labels=ids, counts=dict.fromkeys(ids, SHAPE[1])
    )
    return lambda: ours.run(program, feed, _NoParallel()) and None


class _SleepingTape:
    """Sleeps as long as a stage of ``Times``, and gives tensors of the right shape; ``times`` is set by who patches."""

    times: Times
    loss = torch.zeros(())

    def __init__(self, stage: Stage, **of_microbatch: Any) -> None:
        pass

    def forward(self, x: torch.Tensor, first: int, stop: int) -> torch.Tensor:
        sleep(self.times.forward)
        return _PAYLOAD

    def backward(self, grad: torch.Tensor, first: int, *, weights: bool = True) -> torch.Tensor:
        sleep(self.times.input_grad + (self.times.weight_grad if weights else 0.0))
        return _PAYLOAD

    def accumulate(self, first: int) -> None:
        sleep(self.times.weight_grad)


_PAYLOAD = torch.zeros(SHAPE)


def _executor(name: str, groups: Groups, stage_map: StageMap, microbatches: int, times: Times) -> Callable[[], None]:
    step = _ours(name, groups, stage_map, microbatches, times)
    tape = type("Tape", (_SleepingTape,), {"times": times})

    def run() -> None:
        with patch.object(executor, "Tape", tape):
            step()

    return run


def _by_hand(name: str, groups: Groups, stage_map: StageMap, microbatches: int, times: Times) -> Callable[[], None]:
    """All receives are posted at once, sends are waited for at the end, and nothing but that is done."""
    rank = groups.cell.pp
    order = get_schedule(name)(stage_map.pp, stage_map.chunks, microbatches)[rank]

    def neighbour(op: Compute, step: int) -> int | None:
        stage = stage_map.stage(rank, op.chunk) + step
        inside = stage_map.first <= stage <= stage_map.last
        return stage_map.rank(stage) if inside and stage_map.rank(stage) != rank else None

    def tag(op: Compute, towards: int) -> int:
        """One number for each message, by the stage that it leaves."""
        stage = stage_map.stage(rank, op.chunk) + towards
        return (stage * microbatches + op.microbatch) * 2 + isinstance(op, Forward)

    def run() -> None:
        arriving: dict[Compute, dist.Work] = {}
        for op in order:
            if not isinstance(op, WeightGrad):
                origin = neighbour(op, step := -1 if isinstance(op, Forward) else 1)
                if origin is not None:
                    arriving[op] = dist.irecv(torch.empty(SHAPE), origin, tag=tag(op, step))
        sent = []
        for op in order:
            if op in arriving:
                arriving.pop(op).wait()
            sleep(times.of(op))
            if not isinstance(op, WeightGrad):
                target = neighbour(op, 1 if isinstance(op, Forward) else -1)
                if target is not None:
                    sent.append(dist.isend(_PAYLOAD, target, tag=tag(op, 0)))
        for work in sent:
            work.wait()

    return run


TORCH = {
    "gpipe": "ScheduleGPipe",
    "1f1b": "Schedule1F1B",
    "interleaved": "ScheduleInterleaved1F1B",
    "zb_h1": "ScheduleInterleavedZeroBubble",  # with one stage on each rank
    "zbv": "ScheduleZBVZeroBubble",
}


def _torch(name: str, groups: Groups, stage_map: StageMap, microbatches: int, times: Times) -> Callable[[], None]:
    rank = groups.cell.pp
    stages = [
        PipelineStage(
            Sleeper(times),
            stage_map.stage(rank, chunk),
            stage_map.last + 1,
            torch.device("cpu"),
            input_args=torch.zeros(SHAPE, requires_grad=True),
            output_args=torch.zeros(SHAPE, requires_grad=True),
        )
        for chunk in range(stage_map.chunks)
    ]
    kind = getattr(torch_schedules, TORCH[name])
    several = issubclass(kind, torch_schedules.PipelineScheduleMulti)
    schedule = kind(stages if several else stages[0], n_microbatches=microbatches, loss_fn=_loss, scale_grads=False)
    batch = torch.zeros(microbatches, *SHAPE[1:]).requires_grad_()
    arguments: Sequence[torch.Tensor] = [batch] if rank == stage_map.rank(stage_map.first) else []
    keywords = {"target": torch.zeros(microbatches, *SHAPE[1:])} if rank == stage_map.rank(stage_map.last) else {}
    return partial(_quietly, schedule.step, arguments, keywords)


def _loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return output.sum()


def _quietly(step: Callable[..., Any], arguments: Sequence[torch.Tensor], keywords: dict[str, torch.Tensor]) -> None:
    step(*arguments, **keywords)
