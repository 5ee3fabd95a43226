"""One training step of one cell, and one evaluation.

1 begin     read the microbatches, execute the program, finish the reductions, measure
2 vote      every cell is alive and knows whether to stop; until here nothing has changed
3 finish    clip, AdamW on the own shard, start to gather the parameters
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from rayformer.cell.build import Cell
from rayformer.cell.measure import Measured, Meter
from rayformer.cell.nonfinite import Origins
from rayformer.cell.progress import NoProgress, Phase, Progress
from rayformer.cell.snapshot import Snapshots
from rayformer.data.loader import HeldOutOrder, TrainingOrder
from rayformer.events import Span, StepTrace
from rayformer.optim.lr import learning_rate, weight_decay
from rayformer.optim.reduction import BucketReduction, sum_partial
from rayformer.stages.executor import Feed
from rayformer.stages.instructions import Instruction

_REDUCTIONS_IN_FLIGHT = 4


@dataclass(frozen=True, kw_only=True)
class Vote:
    """What all cells agreed on: whether any was asked to stop, or is busy with the checkpoint before."""

    stop: bool
    busy: bool = False


class StepRunner:
    """Runs steps of one cell. ``finish`` may only follow ``begin`` of the same step.

    ``phase_s`` is how many seconds of this process the last step took in each phase: data, forward, backward, optimizer
    without waiting, and communication, the waiting that nothing hid.
    """

    def __init__(self, cell: Cell, progress: Progress | None = None) -> None:
        self._cell = cell
        self._progress = progress or NoProgress()
        self._step, self._consumed_samples = 0, 0
        self._groups = cell.groups
        self._meter = Meter(cell)
        self._origins = Origins()
        self._pending: deque[tuple[int, BucketReduction]] = deque()
        self._shards: dict[int, torch.Tensor] = {}
        self._partial = _partial_ranges(cell)
        self._seed = 1.0
        self.phase_s: dict[str, float] = {}
        self._spans: list[tuple[str, str, int, int, int]] | None = [] if cell.job.observe.trace else None
        # Only the ends of the pipeline read data, and all must know whether there is any to evaluate on.
        self._can_evaluate = any(cell.groups.model.gather_values(cell.held_out is not None))

    def begin(self, step: int, consumed_samples: int) -> Measured:
        """Read, execute and measure step number ``step``; no state has changed when this returns."""
        cell, batch = self._cell, self._cell.job.batch
        size = batch.size_after(consumed_samples)
        self._step, self._consumed_samples = step, consumed_samples + size
        self._progress.at("data", step)
        self.phase_s = dict.fromkeys(("data", "forward", "backward", "communication", "optimizer"), 0.0)
        self._seed = _seed(cell)
        if self._spans is not None:
            self._spans.clear()
        with self._timed("data"):
            feed = self._feed(cell.training, consumed_samples, size)
        feed = replace(feed, step=step, seed=self._seed)
        cell.grads.start_step()
        self._origins.start_step()
        cell.executor.seconds.clear()
        cell.executor.on_instruction = None if isinstance(self._progress, NoProgress) else self._note
        cell.executor.on_done = None if self._spans is None else self._trace
        losses = cell.executor.run(cell.programs.train(size), feed, self)
        for kind, seconds in cell.executor.seconds.items():
            self.phase_s[_PHASES.get(kind, "communication")] += seconds
        with self._timed("optimizer", "reduce"):
            self._progress.at("reduce", step)
            while self._pending:
                self._settle()
            self._progress.at("vote", step)
            shards = [self._shards[i] for i in range(len(cell.parameters.plan.buckets))]
            sum_partial(shards, self._partial, self._groups.tp)
            cell.optimizer.tied.add_gradients(shards)
            measured = self._meter.measure(losses, self.shards, num_microbatches=size // batch.micro, seed=self._seed)
            if measured.nonfinite:
                where = self._origins.find(str(self._groups.cell), measured.nonfinite, self._groups.world)
                measured = replace(measured, nonfinite=where)
        return measured

    @property
    def shards(self) -> list[torch.Tensor]:
        """The own shard of the summed gradient, one per owned bucket, between ``begin`` and ``finish``."""
        return [self._shards[i] for i in range(len(self._cell.parameters.plan.owned))]

    def vote(self, *, stop: bool, busy: bool = False) -> Vote:
        """Meet every cell of the run; returns when all have come this far."""
        self._progress.at("vote", self._step)
        with self._timed("communication", "vote"):
            ballot = torch.tensor([1.0, float(stop), float(busy)], dtype=torch.float64, device=self._groups.device)
            self._groups.world.all_reduce(ballot).wait()
            present, stops, busies = ballot.tolist()
        assert present == self._groups.world.size
        return Vote(stop=stops > 0, busy=busies > 0)

    def finish(self, measured: Measured, lr: float) -> None:
        """Clip, update and start to gather, unless the gradient was not finite."""
        optimizer, section, position = self._cell.optimizer, self._cell.job.optim, self._cell.position
        overflow = bool(measured.nonfinite)
        self._progress.at("update", self._step)
        grads = [] if overflow else self._owned_grads()
        position.is_whole = False
        optimizer.loss_scale = optimizer.loss_scale.after(self._cell.job.precision, overflow=overflow)
        if not overflow:
            with self._timed("optimizer", "update"):
                factor = min(1.0, section.clip / (measured.norm + 1e-6)) if section.clip else 1.0
                scale = factor / max(measured.valid_tokens, 1) / self._seed
                for grad in grads:
                    grad.mul_(scale)
                optimizer.update(grads, lr=lr, weight_decay=weight_decay(optimizer.num_updates + 1, section))
        skipped = position.skipped_in_row + 1 if overflow else 0
        position.move_to(self._step, consumed_samples=self._consumed_samples, skipped_in_row=skipped)
        self._shards.clear()
        if not overflow:
            with self._timed("optimizer", "gather"):
                self._progress.at("gather", self._step)
                optimizer.start_gather()
        self._progress.worked(self._step, sum(self.phase_s.values()) - self.phase_s["communication"])

    def snapshot(self, snapshots: Snapshots) -> None:
        """Copy the state as it is now out of this process."""
        self._progress.at("snapshot", self._step)
        snapshots.take()
        self.phase_s["snapshot"] = snapshots.seconds
        self._span("snapshot", "snapshot", snapshots.seconds, 0.0)

    def trace(self) -> StepTrace:
        """What all cells did in the step; all must call it."""
        told = self._groups.world.gather_values([str(self._groups.cell), self._spans])
        spans = {
            cell: [
                Span(name=name, phase=phase, start_us=start, length_us=length, waited_us=waited)
                for name, phase, start, length, waited in of_cell
            ]
            for cell, of_cell in told
        }
        return StepTrace(generation=self._groups.generation, step=self._step, spans=spans)

    def next_lr(self) -> float:
        """The rate that the next update will use."""
        return learning_rate(self._cell.optimizer.num_updates + 1, self._cell.job.optim)

    def evaluate(self, batches: int) -> float | None:
        """The held-out loss per token over ``batches`` global batches; None without held-out data."""
        if not self._can_evaluate:
            return None
        cell, batch = self._cell, self._cell.job.batch
        self._progress.at("eval", self._cell.position.step)
        cell.executor.on_instruction = None
        cell.optimizer.await_parameters()
        total, count = 0.0, 0
        for number in range(batches):
            feed = self._feed(cell.held_out, number * batch.global_, batch.global_)
            losses = cell.executor.run(cell.programs.evaluate(), feed, self)
            measured = self._meter.measure_losses(losses, num_microbatches=batch.num_microbatches)
            total, count = total + measured.loss_sum, count + measured.valid_tokens
        return total / max(count, 1)

    def _note(self, instruction: Instruction) -> None:
        kind = type(instruction).__name__
        self._progress.at(_PHASE_OF[kind], self._step, kind, getattr(instruction, _NUMBER_OF.get(kind, "microbatch")))

    # The instructions about gradients and parameters, see stages.executor.DataParallel.

    def close_leaf(self, leaf: int, chunk: int) -> None:
        self._cell.grads.close_leaf(leaf, chunk)

    def reduce(self, bucket: int) -> None:
        if len(self._pending) == _REDUCTIONS_IN_FLIGHT:  # each holds memory of its bucket's size
            self._settle()
        place = self._cell.parameters.plan.buckets[bucket]
        parts = self._cell.grads.close_bucket(place)
        self._origins.watch(place, [part for _, part in parts])
        num_leaves = self._cell.job.batch.num_virtual_ranks
        self._pending.append((bucket, BucketReduction(place, parts, num_leaves=num_leaves, dp=self._groups.dp)))

    def await_params(self, bucket: int) -> None:
        self._cell.optimizer.await_bucket(bucket)

    def _settle(self) -> None:
        bucket, reduction = self._pending.popleft()
        self._shards[bucket] = reduction.result()

    def _feed(self, order: TrainingOrder | HeldOutOrder | None, first_sample: int, batch_size: int) -> Feed:
        """The own microbatches of the batch that starts at ``first_sample``; ``order`` is None between the ends."""
        stages, micro = self._cell.stages, self._cell.job.batch.micro
        mine = self._cell.samples(batch_size)
        places = range(len(mine) // micro)
        feed = Feed(samples={v: tuple(mine[v * micro : (v + 1) * micro]) for v in places})
        if order is None:
            return feed
        tokens, labels = order.batch(first_sample + mine.start, len(mine))
        for v in places:
            rows = slice(v * micro, (v + 1) * micro)
            if stages[0].is_first:
                feed.tokens[v] = torch.from_numpy(tokens[rows]).to(self._groups.device)
            if stages[-1].is_last:
                feed.labels[v] = torch.from_numpy(labels[rows]).to(self._groups.device)
                feed.counts[v] = int((labels[rows] >= 0).sum())
        return feed

    def _owned_grads(self) -> list[torch.Tensor]:
        """The gradient of what the optimizer owns: the own shards, or with zero 0 everybody's."""
        buckets, shards = self._cell.parameters.plan.owned, self.shards
        if self._cell.job.optim.zero == 1:
            return shards
        whole = [shard.new_empty(bucket.stop - bucket.start) for shard, bucket in zip(shards, buckets)]
        tickets = [self._groups.dp.all_gather(out, shard) for out, shard in zip(whole, shards)]
        for ticket in tickets:
            ticket.wait()
        return whole

    @contextmanager
    def _timed(self, phase: str, name: str | None = None) -> Iterator[None]:
        """Add the time of this block to ``phase``, but its waiting to communication; in a trace it is ``name``."""
        started, waited = time.perf_counter(), self._groups.waited_s
        yield
        waited, took = self._groups.waited_s - waited, time.perf_counter() - started
        self.phase_s["communication"] += waited
        self.phase_s[phase] += took - waited
        self._span(name or phase, name or phase, took, waited)

    def _trace(self, instruction: Instruction, took: float, waited: float) -> None:
        self._span(str(instruction), _PHASE_OF[type(instruction).__name__], took, waited)

    def _span(self, name: str, phase: str, took: float, waited: float) -> None:
        """Note what has just ended."""
        if self._spans is not None:
            start = time.time() - took
            self._spans.append((name, phase, int(1e6 * start), int(1e6 * took), int(1e6 * waited)))


_PHASE_OF: dict[str, Phase] = {
    "Forward": "forward",
    "SendAct": "forward",
    "RecvAct": "forward",
    "AwaitParams": "gather",
    "Backward": "backward",
    "InputGrad": "backward",
    "WeightGrad": "backward",
    "SendGrad": "backward",
    "RecvGrad": "backward",
    "FoldGrads": "reduce",
    "ReduceGrads": "reduce",
}
_NUMBER_OF = {"AwaitParams": "bucket", "ReduceGrads": "bucket", "FoldGrads": "leaf"}
_PHASES = {
    "Forward": "forward",
    **dict.fromkeys(("Backward", "InputGrad", "WeightGrad", "FoldGrads", "ReduceGrads"), "backward"),
}


def _seed(cell: Cell) -> float:
    """What backward starts with as the gradient of the sum of the token losses.

    Under fp16 the loss scale is that of a mean, so that it does not depend on the size of a microbatch; other formats
    divide once, at the end.
    """
    job = cell.job
    if job.precision.params != "fp16":
        return 1.0
    return cell.optimizer.loss_scale.scale / 2.0 ** math.ceil(math.log2(job.batch.micro * job.batch.seq))


def _partial_ranges(cell: Cell) -> list[tuple[int, int, int]]:
    """Where in the own shards gradients lie that tp ranks hold parts of: bucket, start and stop within its shard."""
    ranges = []
    plan = cell.parameters.plan
    for i, bucket in enumerate(plan.owned):
        lo, hi = plan.shard(bucket, cell.groups.dp.rank)
        for slot in bucket.slots:
            start, stop = max(lo, slot.start), min(hi, slot.stop)
            if cell.specs[slot.name].partial and start < stop:
                ranges.append((i, start - lo, stop - lo))
    return ranges
