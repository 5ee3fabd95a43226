"""Lowering: from the order in which ranks compute to the complete programs they execute."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf

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


@dataclass(frozen=True, slots=True)
class BucketPlace:
    """Where a bucket's parameters are used: in which chunk, and there in which segment first on the way forward."""

    chunk: int = 0
    segment: int = 0


def with_reductions(
    program: Program,
    *,
    leaf_of_microbatch: Sequence[int],
    buckets: Sequence[BucketPlace],
    num_segments: Sequence[int],
    overlap: bool,
) -> Program:
    """Fold each virtual rank but the last once a chunk has it all; of the last, reduce each bucket that is complete.

    A bucket is complete when the last Backward or WeightGrad of its chunk has gone through its first segment;
    ``num_segments`` are those of every chunk. With ``overlap`` that computation is cut there, and so is its Forward, so
    that a bucket travels while the rest of backward runs; without it the chunk's reductions follow it. Buckets go in
    one order, the last chunk's first, since all replicas must exchange them in the same.

    >>> program = with_reductions(
    ...     (Forward(0), Backward(0)),
    ...     leaf_of_microbatch=[0],
    ...     buckets=[BucketPlace(segment=2), BucketPlace(segment=0)],
    ...     num_segments=[3],
    ...     overlap=True,
    ... )
    >>> " ".join(map(str, program))
    'F0[0:2] F0[2:3] B0[2:3] Reduce0 B0[0:2] Reduce1'
    """
    accumulating = [op for op in program if isinstance(op, Backward | WeightGrad)]
    last = {op.chunk: op for op in accumulating}
    parts = {
        chunk: _parts({0, *(b.segment for b in buckets if overlap and b.chunk == chunk)}, num_segments[chunk])
        for chunk in last
    }
    todo = deque(sorted(range(len(buckets)), key=lambda i: (-buckets[i].chunk, -buckets[i].segment)))
    passed: dict[int, int] = {}  # by chunk, the lowest segment that the last computation has gone through
    remaining = Counter((op.chunk, leaf_of_microbatch[op.microbatch]) for op in accumulating)
    complete: list[Instruction] = []
    for op in program:
        match op:
            case Forward() if op.microbatch == last[op.chunk].microbatch:
                complete += [Forward(op.microbatch, op.chunk, part) for part in parts[op.chunk]]
            case Backward() | WeightGrad() if op == last[op.chunk]:
                for part in reversed(parts[op.chunk]):
                    complete.append(type(op)(op.microbatch, op.chunk, part))
                    passed[op.chunk] = part[0]
                    while todo and buckets[todo[0]].segment >= passed.get(buckets[todo[0]].chunk, inf):
                        complete.append(ReduceGrads(todo.popleft()))
            case Backward() | WeightGrad():
                complete.append(op)
                leaf = leaf_of_microbatch[op.microbatch]
                remaining[op.chunk, leaf] -= 1
                if not remaining[op.chunk, leaf] and leaf != leaf_of_microbatch[last[op.chunk].microbatch]:
                    complete.append(FoldGrads(leaf, op.chunk))
            case _:
                complete.append(op)
    return tuple(complete)


def with_awaited_params(program: Program, *, buckets: Sequence[BucketPlace], num_segments: Sequence[int]) -> Program:
    """Cut each chunk's first Forward so that each part waits only for the buckets whose parameters it needs.

    >>> program = with_awaited_params(
    ...     (Forward(0), Forward(1)), buckets=[BucketPlace(segment=1), BucketPlace(segment=0)], num_segments=[3]
    ... )
    >>> " ".join(map(str, program))
    'Await1 F0[0:1] Await0 F0[1:3] F1'
    """
    first: dict[int, Forward] = {}
    for op in program:
        if isinstance(op, Forward):
            first.setdefault(op.chunk, op)
    complete: list[Instruction] = []
    for op in program:
        if not (isinstance(op, Forward) and op.microbatch == first[op.chunk].microbatch):
            complete.append(op)
            continue
        start, stop = op.part or (0, num_segments[op.chunk])
        own = {i: bucket.segment for i, bucket in enumerate(buckets) if bucket.chunk == op.chunk}
        for part in _parts({start, *(segment for segment in own.values() if start < segment < stop)}, stop):
            complete += [AwaitParams(i) for i, segment in own.items() if segment == part[0]]
            complete.append(Forward(op.microbatch, op.chunk, part))
    return tuple(complete)


def _parts(starts: set[int], stop: int) -> list[tuple[int, int]]:
    return list(pairwise([*sorted(starts), stop]))


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
