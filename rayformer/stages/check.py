"""Check: run all ranks' programs against a clock, and refuse those that would go wrong or hang."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import TypeAlias

from rayformer.errors import RayformerError
from rayformer.stages.instructions import (
    Backward,
    Compute,
    Forward,
    InputGrad,
    Instruction,
    Program,
    Recv,
    RecvAct,
    RecvGrad,
    Send,
    SendAct,
    SendGrad,
    StageMap,
    WeightGrad,
    stages_of,
)


class ScheduleError(RayformerError):
    """Programs of a pipeline's ranks don't fit together; the message names the ranks and their instructions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Time of one chunk's work on one microbatch, in any unit; messages take none.

    ``weight`` is the part of ``backward`` that a schedule may put off, half of it unless told.
    """

    forward: float = 1.0
    backward: float = 2.0
    weight: float | None = None

    def of(self, op: Compute) -> float:
        weight = self.backward / 2 if self.weight is None else self.weight
        match op:
            case Forward():
                return self.forward
            case Backward():
                return self.backward
            case InputGrad():
                return self.backward - weight
            case WeightGrad():
                return weight


DEFAULT_COSTS = Costs()


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """One computation and when it ran."""

    op: Compute
    start: float
    end: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What a step costs under these programs: times in the unit of the costs, one entry per rank."""

    timeline: tuple[tuple[Slot, ...], ...]
    peak_live: tuple[int, ...]
    """Most activations held at once, in chunks of microbatches: from a Forward to its Backward or WeightGrad."""

    @property
    def busy(self) -> tuple[float, ...]:
        return tuple(sum(slot.end - slot.start for slot in slots) for slots in self.timeline)

    @property
    def makespan(self) -> float:
        return max(slot.end for slots in self.timeline for slot in slots)

    @property
    def ideal(self) -> float:
        """The makespan of a rank that never waits."""
        return max(self.busy)

    @property
    def idle(self) -> tuple[float, ...]:
        return tuple(self.makespan - busy for busy in self.busy)

    @property
    def bubble_of_total(self) -> float:
        """The share of the makespan that is lost."""
        return 1 - self.ideal / self.makespan

    @property
    def bubble_of_ideal(self) -> float:
        """How much longer than ideal the step takes, as a share of ideal."""
        return self.makespan / self.ideal - 1


def check(
    programs: Sequence[Program],
    *,
    costs: Costs | Sequence[Costs] = DEFAULT_COSTS,
    rendezvous: bool,
    vee: bool = False,
) -> Report:
    """Simulate a step; with `rendezvous` a send blocks until its receive is posted, without it sends never block.

    Without it a receive does not block either: what uses it waits until it is there. ``costs`` are those of every
    stage, or one for each in the order of the model.

    Raises ScheduleError if

    1. a rank computes something not exactly once, or uses what it has not computed or received yet;
    2. a chunk's weight gradients are not accumulated in the order of the microbatches, on which the bits depend;
    3. between two ranks, activations or gradients are not received just as they are sent;
    4. ranks wait for each other forever.
    """
    stages = stages_of(programs, vee=vee)
    ops = [op for program in programs for op in program if isinstance(op, Compute)]
    for rank, program in enumerate(programs):
        _check_computed_once(rank, program, ops)
        _check_accumulation(rank, program)
        _check_dependencies(rank, program, stages)
    _check_channels(programs, stages)
    each = [costs] * (stages.last + 1) if isinstance(costs, Costs) else costs
    timeline = _Simulation(programs, stages, each, rendezvous).run()
    return Report(timeline=timeline, peak_live=tuple(map(_peak_live, programs)))


def _check_computed_once(rank: int, program: Program, ops: Sequence[Compute]) -> None:
    """Whatever one rank does with one of its chunks, every rank does with each of its chunks.

    A Backward is as much as an InputGrad and a WeightGrad.
    """
    count = Counter(part for op in program if isinstance(op, Compute) for part in _parts(op))
    whole = any(isinstance(op, Backward) for op in program)
    kinds = dict.fromkeys(type(part) for op in ops for part in _parts(op))
    microbatches = dict.fromkeys(op.microbatch for op in ops)
    chunks = dict.fromkeys(op.chunk for op in ops)
    for kind, microbatch, chunk in product(kinds, microbatches, chunks):
        if (times := count[kind(microbatch, chunk)]) != 1:
            shown = Backward if whole and kind is not Forward else kind
            raise ScheduleError(f"pp{rank} has {shown(microbatch, chunk)} {times} times, not once")


def _parts(op: Compute) -> tuple[Compute, ...]:
    """What a computation does, a Backward both parts of it."""
    if isinstance(op, Backward):
        return (InputGrad(op.microbatch, op.chunk), WeightGrad(op.microbatch, op.chunk))
    return (op,)


def _check_accumulation(rank: int, program: Program) -> None:
    before: dict[int, Compute] = {}
    for op in program:
        if isinstance(op, Backward | WeightGrad):
            last = before.get(op.chunk, op)
            if last.microbatch > op.microbatch:
                raise ScheduleError(f"pp{rank} has {op} after {last}: weight gradients are added in ascending order")
            before[op.chunk] = op


def _check_dependencies(rank: int, program: Program, stages: StageMap) -> None:
    done: set[Instruction] = set()
    for op in program:
        for needed in _needs(op, rank, stages):
            if needed not in done:
                raise ScheduleError(f"pp{rank} has {op} without {needed} before it")
        done.update(_parts(op) if isinstance(op, Compute) else (op,))


def _needs(op: Instruction, rank: int, stages: StageMap) -> list[Instruction]:
    """What the same rank must have done before `op`."""
    match op:
        case Forward(v, chunk):
            return _from_neighbour(Forward, RecvAct, v, stages, stages.stage(rank, chunk), -1)
        case Backward(v, chunk) | InputGrad(v, chunk):
            stage = stages.stage(rank, chunk)
            return [Forward(v, chunk), *_from_neighbour(InputGrad, RecvGrad, v, stages, stage, +1)]
        case WeightGrad(v, chunk) | SendGrad(v, chunk):
            return [InputGrad(v, chunk)]
        case SendAct(v, chunk):
            return [Forward(v, chunk)]
        case _:
            return []


def _from_neighbour(
    computed: type[Forward | InputGrad],
    received: type[RecvAct | RecvGrad],
    v: int,
    stages: StageMap,
    stage: int,
    step: int,
) -> list[Instruction]:
    """What a stage needs of the one before or after it, which may lie on the same rank."""
    origin = stage + step
    if not stages.first <= origin <= stages.last:
        return []
    if stages.rank(origin) == stages.rank(stage):
        return [computed(v, stages.chunk(origin))]
    return [received(v, stages.chunk(stage), peer=stages.rank(origin))]


_Channel: TypeAlias = tuple[int, int, str]  # sender, receiver, payload


def _channel(rank: int, op: Send | Recv) -> _Channel:
    return (rank, op.peer, op.payload) if isinstance(op, Send) else (op.peer, rank, op.payload)


def _check_channels(programs: Sequence[Program], stages: StageMap) -> None:
    sent: defaultdict[_Channel, list[Recv]] = defaultdict(list)  # each send as the receive that must meet it
    received: defaultdict[_Channel, list[Recv]] = defaultdict(list)
    for rank, program in enumerate(programs):
        for op in program:
            if isinstance(op, Send):
                sent[_channel(rank, op)].append(_counterpart(rank, op, stages))
            elif isinstance(op, Recv):
                received[_channel(rank, op)].append(op)
    for channel in sent | received:
        sends, receives = sent[channel], received[channel]
        sender, receiver, payload = channel
        for lost in Counter(receives) - Counter(sends):
            raise ScheduleError(f"pp{receiver} has {lost}, but pp{sender} has no send for it")
        for lost in Counter(sends) - Counter(receives):
            raise ScheduleError(f"pp{sender} sends to pp{receiver}, but pp{receiver} has no {lost}")
        for place, (arriving, expected) in enumerate(zip(sends, receives, strict=True)):
            if arriving != expected:
                raise ScheduleError(
                    f"pp{receiver} has {expected} where pp{sender} sends for {arriving}: {payload} {place} between them"
                )


def _counterpart(rank: int, op: Send, stages: StageMap) -> Recv:
    stage = stages.stage(rank, op.chunk)
    if isinstance(op, SendAct):
        return RecvAct(op.microbatch, stages.chunk(stage + 1), peer=rank)
    return RecvGrad(op.microbatch, stages.chunk(stage - 1), peer=rank)


class _Simulation:
    """All ranks' clocks and program counters, moved until every rank has ended."""

    def __init__(self, programs: Sequence[Program], stages: StageMap, costs: Sequence[Costs], rendezvous: bool) -> None:
        self.programs = programs
        self.stages = stages
        self.costs = costs
        self.rendezvous = rendezvous
        self.counters = [0] * len(programs)
        self.clocks = [0.0] * len(programs)
        self.timeline: list[list[Slot]] = [[] for _ in programs]
        self.sent: dict[tuple[int, Recv], float] = {}  # by receiver and the receive that it is for

    def run(self) -> tuple[tuple[Slot, ...], ...]:
        moved = True
        while moved:
            moved = False
            for rank in range(len(self.programs)):
                while (op := self.current(rank)) is not None and self.advance(rank, op):
                    moved = True
        waiting = [
            f"pp{rank} at {op} waits for pp{peer}"
            for rank in range(len(self.programs))
            if (op := self.current(rank)) is not None
            for peer in self.peers(rank, op)
        ]
        if waiting:
            sends = "rendezvous" if self.rendezvous else "buffered"
            raise ScheduleError(f"deadlock with {sends} sends: {'; '.join(waiting)}")
        return tuple(map(tuple, self.timeline))

    def current(self, rank: int) -> Instruction | None:
        program, counter = self.programs[rank], self.counters[rank]
        return program[counter] if counter < len(program) else None

    def peers(self, rank: int, op: Instruction) -> list[int]:
        """For whom an instruction that does not advance waits."""
        return [op.peer] if isinstance(op, Send | Recv) else [recv.peer for recv in self.inputs(rank, op)]

    def inputs(self, rank: int, op: Instruction) -> list[Recv]:
        return [needed for needed in _needs(op, rank, self.stages) if isinstance(needed, Recv)]

    def advance(self, rank: int, op: Instruction) -> bool:
        """Execute the rank's current instruction, or return False if it must wait."""
        match op:
            case Forward() | Backward() | InputGrad() | WeightGrad():
                arrivals = [] if self.rendezvous else [self.sent.get((rank, recv)) for recv in self.inputs(rank, op)]
                if None in arrivals:
                    return False
                start = max([self.clocks[rank], *(time for time in arrivals if time is not None)])
                end = start + self.costs[self.stages.stage(rank, op.chunk)].of(op)
                self.timeline[rank].append(Slot(op=op, start=start, end=end))
                self.clocks[rank] = end
            case SendAct() | SendGrad() if self.rendezvous:
                return self.meet(rank, op)
            case SendAct() | SendGrad():
                self.sent[op.peer, _counterpart(rank, op, self.stages)] = self.clocks[rank]
            case RecvAct() | RecvGrad() if self.rendezvous:
                return False  # it ends with its send
            case _:
                pass
        self.counters[rank] += 1
        return True

    def meet(self, rank: int, op: Send) -> bool:
        """Let a rendezvous send and its receive end together, or return False if the receive is not posted."""
        posted = self.current(op.peer)
        if not isinstance(posted, Recv) or _channel(op.peer, posted) != _channel(rank, op):
            return False
        self.clocks[rank] = self.clocks[op.peer] = max(self.clocks[rank], self.clocks[op.peer])
        self.counters[rank] += 1
        self.counters[op.peer] += 1
        return True


def _peak_live(program: Program) -> int:
    ops = [op for op in program if isinstance(op, Compute)]
    if all(isinstance(op, Forward) for op in ops):
        return min(len(ops), 1)  # nothing is kept for a backward
    live = peak = 0
    for op in ops:
        live += isinstance(op, Forward) - isinstance(op, Backward | WeightGrad)
        peak = max(peak, live)
    return peak
