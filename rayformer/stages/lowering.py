"""Lowering: from the order in which ranks compute to the complete programs they execute."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from rayformer.stages.check import ScheduleError
from rayformer.stages.instructions import (
    AwaitParams,
    Backward,
    Compute,
    FoldGrads,
    Forward,
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
    stages_of,
)


def lower(compute: Sequence[Sequence[Compute]], *, vee: bool = False) -> tuple[Program, ...]:
    """Add the sends and receives between stages, in an order that can't deadlock even if every send waits.

    The ranks are walked together, each as far as it gets. When none gets further, one message is appended to the
    sender's and the receiver's program *in the same moment*. So all programs are cuts of one global list, and its first
    unfinished entry can always run: everything before it, on both ranks, is done. Each rank sends an output right after
    computing it, and receives an input right before using it; only where two ranks wait to send to each other does one
    of them receive first, and only if all wait to send to ranks that need something else does one receive early.
    Between two chunks of one rank nothing is sent.

    Raises ScheduleError if the orders themselves can't be executed, with or without waiting sends.
    """
    stages = stages_of(compute, vee=vee)
    programs: list[list[Instruction]] = [[] for _ in compute]
    todo = [list(reversed(order)) for order in compute]
    outbox: list[_Message | None] = [None for _ in compute]
    delivered: set[_Message | None] = {None}

    def wanted(rank: int) -> _Message | None:
        return _input(todo[rank][-1], rank, stages) if todo[rank] else None

    def reluctance(message: _Message) -> int:
        receiver = stages.rank(message.to_stage)
        if wanted(receiver) != message:
            return 2
        return 0 if outbox[receiver] is None else 1

    while True:
        for rank, program in enumerate(programs):
            while todo[rank] and outbox[rank] is None and wanted(rank) in delivered:
                program.append(op := todo[rank].pop())
                output = _output(op, rank, stages)
                if output is not None and stages.rank(output.to_stage) == rank:
                    delivered.add(output)
                else:
                    outbox[rank] = output
        pending = [message for message in outbox if message is not None]
        if not pending:
            break
        message = min(pending, key=reluctance)
        sender, receiver = stages.rank(message.from_stage), stages.rank(message.to_stage)
        programs[sender].append(message.send(stages))
        programs[receiver].append(message.recv(stages))
        outbox[sender] = None
        delivered.add(message)

    stuck = [f"pp{rank} at {rest[-1]}" for rank, rest in enumerate(todo) if rest]
    if stuck:
        raise ScheduleError(f"these wait for inputs that are never computed: {', '.join(stuck)}")
    return tuple(map(tuple, programs))


def with_reductions(
    program: Program,
    *,
    leaf_of_microbatch: Sequence[int],
    lowest_segment: Sequence[int],
    num_segments: int,
    overlap: bool,
) -> Program:
    """Fold each virtual rank but the last after its last Backward; of the last, reduce each bucket once it is complete.

    ``lowest_segment`` says for every bucket which of the stage's segments is the last that backward runs of those with
    a parameter in it. With ``overlap`` the last Backward is cut there, and so is its Forward, so that a bucket travels
    while the rest of backward runs; without it all reductions follow the last Backward.

    >>> program = with_reductions(
    ...     (Forward(0), Backward(0)), leaf_of_microbatch=[0], lowest_segment=[2, 0], num_segments=3, overlap=True
    ... )
    >>> " ".join(map(str, program))
    'F0[0:2] F0[2:3] B0[2:3] Reduce0 B0[0:2] Reduce1'
    """
    last = next(op for op in reversed(program) if isinstance(op, Backward))
    buckets = sorted(range(len(lowest_segment)), key=lambda bucket: -lowest_segment[bucket])
    parts = list(pairwise([*sorted({0, *lowest_segment} if overlap else {0}), num_segments]))
    remaining = Counter(leaf_of_microbatch[op.microbatch] for op in program if isinstance(op, Backward))
    complete: list[Instruction] = []
    for op in program:
        match op:
            case Forward() if (op.microbatch, op.chunk) == (last.microbatch, last.chunk):
                complete += [Forward(op.microbatch, op.chunk, part) for part in parts]
            case Backward():
                leaf = leaf_of_microbatch[op.microbatch]
                remaining[leaf] -= 1
                if op is last:
                    for part in reversed(parts):
                        complete.append(Backward(op.microbatch, op.chunk, part))
                        complete += [ReduceGrads(b) for b in buckets if part[0] <= lowest_segment[b] < part[1]]
                else:
                    complete.append(op)
                    if not remaining[leaf] and leaf != leaf_of_microbatch[last.microbatch]:
                        complete.append(FoldGrads(leaf))
            case _:
                complete.append(op)
    return tuple(complete)


def with_awaited_params(program: Program, *, first_segment: Sequence[int], num_segments: int) -> Program:
    """Cut the first microbatch's Forward so that each part waits only for the buckets whose parameters it needs.

    ``first_segment`` says for every bucket which of the stage's segments is the first with a parameter in it.

    >>> program = with_awaited_params((Forward(0), Forward(1)), first_segment=[1, 0], num_segments=3)
    >>> " ".join(map(str, program))
    'Await1 F0[0:1] Await0 F0[1:3] F1'
    """
    first = next(op for op in program if isinstance(op, Forward))
    complete: list[Instruction] = []
    for op in program:
        if not (isinstance(op, Forward) and (op.microbatch, op.chunk) == (first.microbatch, first.chunk)):
            complete.append(op)
            continue
        start, stop = op.part or (0, num_segments)
        edges = sorted({start, stop, *(segment for segment in first_segment if start < segment < stop)})
        for part in pairwise(edges):
            complete += [AwaitParams(bucket) for bucket, segment in enumerate(first_segment) if segment == part[0]]
            complete.append(Forward(op.microbatch, op.chunk, part))
    return tuple(complete)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Message:
    """What goes from one stage to a neighbour: up the model an activation, down a gradient."""

    microbatch: int
    from_stage: int
    to_stage: int

    def send(self, stages: StageMap) -> Send:
        kind = SendAct if self.from_stage < self.to_stage else SendGrad
        return kind(self.microbatch, stages.chunk(self.from_stage), peer=stages.rank(self.to_stage))

    def recv(self, stages: StageMap) -> Recv:
        kind = RecvAct if self.from_stage < self.to_stage else RecvGrad
        return kind(self.microbatch, stages.chunk(self.to_stage), peer=stages.rank(self.from_stage))


def _input(op: Compute, rank: int, stages: StageMap) -> _Message | None:
    """What a computation needs of another stage."""
    if isinstance(op, WeightGrad):
        return None
    stage = stages.stage(rank, op.chunk)
    origin = stage - 1 if isinstance(op, Forward) else stage + 1
    if not stages.first <= origin <= stages.last:
        return None
    return _Message(microbatch=op.microbatch, from_stage=origin, to_stage=stage)


def _output(op: Compute, rank: int, stages: StageMap) -> _Message | None:
    """What a computation has for another stage."""
    if isinstance(op, WeightGrad):
        return None
    stage = stages.stage(rank, op.chunk)
    target = stage + 1 if isinstance(op, Forward) else stage - 1
    if not stages.first <= target <= stages.last:
        return None
    return _Message(microbatch=op.microbatch, from_stage=stage, to_stage=target)
