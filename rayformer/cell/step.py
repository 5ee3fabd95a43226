"""One training step of one cell, and one evaluation.

1 begin     read the microbatches, execute the program, finish the reductions, measure
2 vote      every cell is alive and knows whether to stop; until here nothing has changed
3 finish    clip, AdamW on the own shard, gather the parameters
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rayformer.cell.build import Cell
from rayformer.cell.measure import Measured, Meter
from rayformer.data.loader import HeldOutOrder, TrainingOrder
from rayformer.optim.lr import learning_rate
from rayformer.optim.reduction import BucketReduction
from rayformer.stages.executor import Feed


@dataclass(frozen=True, kw_only=True)
class Vote:
    """What all cells agreed on: whether any of them was asked to stop."""

    stop: bool


class StepRunner:
    """Runs steps of one cell. ``finish`` may only follow ``begin`` of the same step."""

    def __init__(self, cell: Cell) -> None:
        self._cell = cell
        self._groups = cell.groups
        self._meter = Meter(cell)
        self._reductions: list[BucketReduction] = []
        self._shards: list[torch.Tensor] = []
        # Only the ends of the pipeline read data, and all must know whether there is any to evaluate on.
        self._can_evaluate = any(cell.groups.model.gather_values(cell.held_out is not None))

    def begin(self, consumed_samples: int) -> Measured:
        """Read, execute and measure one step; no state has changed when this returns."""
        cell = self._cell
        cell.grads.start_step()
        self._reductions.clear()
        losses = cell.executor.run(cell.train_program, self._feed(cell.training, consumed_samples), self)
        self._shards = [reduction.result() for reduction in self._reductions]
        return self._meter.measure(losses, self._shards)

    def vote(self, *, stop: bool) -> Vote:
        """Meet every cell of the run; returns when all have come this far."""
        ballot = torch.tensor([1.0, float(stop)], dtype=torch.float64, device=self._groups.device)
        self._groups.world.all_reduce(ballot).wait()
        present, stops = ballot.tolist()
        assert present == self._groups.world.size
        return Vote(stop=stops > 0)

    def finish(self, measured: Measured, lr: float) -> None:
        """Clip, update and gather, unless the gradient was not finite."""
        if measured.nonfinite:
            return
        clip = self._cell.job.optim.clip
        factor = min(1.0, clip / (measured.norm + 1e-6)) if clip else 1.0
        scale = factor / max(measured.valid_tokens, 1)
        for shard in self._shards:
            shard.mul_(scale)
        self._cell.optimizer.update(self._owned_grads(), lr)
        self._cell.optimizer.gather_parameters()

    def next_lr(self) -> float:
        """The rate that the next update will use."""
        return learning_rate(self._cell.optimizer.num_updates + 1, self._cell.job.optim)

    def evaluate(self, batches: int) -> float | None:
        """The held-out loss per token over ``batches`` global batches; None without held-out data."""
        if not self._can_evaluate:
            return None
        total, count = 0.0, 0
        for batch in range(batches):
            first = batch * self._cell.job.batch.global_
            losses = self._cell.executor.run(self._cell.eval_program, self._feed(self._cell.held_out, first))
            measured = self._meter.measure_losses(losses)
            total, count = total + measured.loss_sum, count + measured.valid_tokens
        return total / max(count, 1)

    # The two instructions about gradients, see stages.executor.GradSink.

    def close_leaf(self, leaf: int) -> None:
        self._cell.grads.close_leaf(leaf)

    def reduce(self, bucket: int) -> None:
        self._reductions.append(
            BucketReduction(
                self._cell.parameters.plan.buckets[bucket],
                self._cell.grads.parts,
                num_leaves=self._cell.job.batch.num_virtual_ranks,
                dp=self._groups.dp,
            )
        )

    def _feed(self, order: TrainingOrder | HeldOutOrder | None, first_sample: int) -> Feed:
        """The own microbatches of the batch that starts at ``first_sample``; ``order`` is None between the ends."""
        stage, mine, micro = self._cell.stage, self._cell.microbatches, self._cell.job.batch.micro
        feed = Feed()
        if order is None:
            return feed
        tokens, labels = order.batch(first_sample + mine.start * micro, len(mine) * micro)
        for v in range(len(mine)):
            rows = slice(v * micro, (v + 1) * micro)
            if stage.is_first:
                feed.tokens[v] = torch.from_numpy(tokens[rows]).to(self._groups.device)
            if stage.is_last:
                feed.labels[v] = torch.from_numpy(labels[rows]).to(self._groups.device)
        return feed

    def _owned_grads(self) -> list[torch.Tensor]:
        """The gradient of what the optimizer owns: the own shards, or with zero 0 everybody's."""
        if self._cell.job.optim.zero == 1:
            return self._shards
        buckets = self._cell.parameters.plan.buckets
        whole = [shard.new_empty(bucket.stop - bucket.start) for shard, bucket in zip(self._shards, buckets)]
        tickets = [self._groups.dp.all_gather(out, shard) for out, shard in zip(whole, self._shards)]
        for ticket in tickets:
            ticket.wait()
        return whole
