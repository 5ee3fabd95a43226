"""One training step of one cell, and one evaluation.

1 read      the step's microbatches that this cell runs
2 execute   the program: forward, backward, fold, start the reductions
3 measure   finish the reductions; norm, loss and token count, the same bits on every cell
4 vote      every cell is alive and knows whether to stop; until here nothing has changed
5 update    clip, AdamW on the own shard, gather the parameters
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from rayformer.cell.build import Cell
from rayformer.optim.lr import learning_rate
from rayformer.optim.norm import block_sums, tree_sum
from rayformer.optim.reduction import BucketReduction
from rayformer.optim.tree import Fold, Node, owned_leaves
from rayformer.stages.executor import Feed, Losses

__all__ = ["Measured", "StepRunner", "Vote"]


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What every cell knows of a step before the vote: sums over the whole global batch."""

    loss_sum: float
    valid_tokens: int
    norm: float
    nonfinite: tuple[str, ...]

    @property
    def loss(self) -> float:
        return self.loss_sum / max(self.valid_tokens, 1)


@dataclass(frozen=True, kw_only=True)
class Vote:
    """What all cells agreed on: whether any was asked to stop."""

    stop: bool


class StepRunner:
    """Runs steps of one cell. ``finish`` may only follow ``begin`` of the same step."""

    def __init__(self, cell: Cell) -> None:
        self._cell = cell
        self._groups = cell.groups
        self._plan = cell.parameters.plan
        self._reductions: list[BucketReduction] = []
        self._shards: list[torch.Tensor] = []
        job = cell.job
        self._num_leaves = job.batch.num_virtual_ranks
        self._num_microbatches = job.batch.num_microbatches
        self._widest = max(
            len(owned_leaves(self._num_leaves, self._groups.layout.dp, d)) for d in range(self._groups.layout.dp)
        ) * (self._num_microbatches // self._num_leaves)
        # The parameters of every stage, in model order.
        by_rank = self._groups.model.gather_values(list(cell.specs))
        self._stage_names = by_rank[:: self._groups.layout.tp]

    # The two instructions about gradients, see stages.executor.GradSink.

    def close_leaf(self, leaf: int) -> None:
        self._cell.grads.close_leaf(leaf)

    def reduce(self, bucket: int) -> None:
        self._reductions.append(
            BucketReduction(
                self._plan.buckets[bucket],
                self._cell.grads.parts,
                num_leaves=self._num_leaves,
                dp=self._groups.dp,
            )
        )

    def begin(self, consumed_samples: int) -> Measured:
        """Read, execute and measure one step; no state has changed when this returns."""
        cell = self._cell
        cell.grads.start_step()
        self._reductions.clear()
        losses = cell.executor.run(cell.train_program, self._feed(cell.training, consumed_samples), self)
        self._shards = [reduction.result() for reduction in self._reductions]
        return self._measure(losses, torch.cat([block_sums(shard) for shard in self._shards]))

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
        optimizer = self._cell.optimizer
        optimizer.update(self._owned_grads(), lr)
        optimizer.gather_parameters()

    def next_lr(self) -> float:
        """The rate that the next update will use."""
        return learning_rate(self._cell.optimizer.num_updates + 1, self._cell.job.optim)

    def evaluate(self, batches: int) -> float | None:
        """The held-out loss per token over ``batches`` global batches; None without held-out data."""
        has_data = torch.tensor(
            [float(self._cell.held_out is not None)], dtype=torch.float64, device=self._groups.device
        )
        self._groups.world.all_reduce(has_data, "max").wait()
        if not has_data.item():
            return None
        total, count = 0.0, 0
        for batch in range(batches):
            first = batch * self._cell.job.batch.global_
            losses = self._cell.executor.run(self._cell.eval_program, self._feed(self._cell.held_out, first))
            measured = self._measure(losses, None)
            total, count = total + measured.loss_sum, count + measured.valid_tokens
        return total / max(count, 1)

    def _feed(self, order: object, first_sample: int) -> Feed:
        stage, micro = self._cell.stage, self._cell.job.batch.micro
        feed = Feed()
        if not (stage.is_first or stage.is_last):
            return feed
        assert order is not None
        mine = self._cell.microbatches
        tokens, labels = order.batch(first_sample + mine.start * micro, len(mine) * micro)  # type: ignore[attr-defined]
        device = self._groups.device
        for v in range(len(mine)):
            rows = slice(v * micro, (v + 1) * micro)
            if stage.is_first:
                feed.tokens[v] = torch.from_numpy(tokens[rows]).to(device)
            if stage.is_last:
                feed.labels[v] = torch.from_numpy(labels[rows]).to(device)
        return feed

    def _measure(self, losses: Losses, sums: torch.Tensor | None) -> Measured:
        """Bring block sums and microbatch losses together: first over dp, then over the cells of one replica."""
        groups, device = self._groups, self._groups.device
        local = torch.zeros(2, self._widest, dtype=torch.float64, device=device)
        for v, total in losses.sums.items():
            local[0, v], local[1, v] = total.double(), losses.counts[v]
        own = local.view(-1) if sums is None else torch.cat([local.view(-1), sums.double()])
        by_dp = torch.empty(groups.dp.size, own.numel(), dtype=torch.float64, device=device)
        groups.dp.all_gather(by_dp.view(-1), own).wait()

        step_losses = torch.zeros(2, self._num_microbatches, dtype=torch.float64, device=device)
        at = 0
        for d in range(groups.dp.size):
            width = len(owned_leaves(self._num_leaves, groups.dp.size, d)) * (
                self._num_microbatches // self._num_leaves
            )
            step_losses[:, at : at + width] = by_dp[d, : 2 * self._widest].view(2, -1)[:, :width]
            at += width
        squares = self._parameter_squares(by_dp[:, 2 * self._widest :]) if sums is not None else own.new_zeros(0)
        width = max(map(len, self._stage_names)) if sums is not None else 0
        mine = torch.zeros(width + step_losses.numel(), dtype=torch.float64, device=device)
        mine[: squares.numel()] = squares
        mine[width:] = step_losses.view(-1)
        replica = torch.empty(groups.model.size, mine.numel(), dtype=torch.float64, device=device)
        groups.model.all_gather(replica.view(-1), mine).wait()
        replica = replica.view(groups.layout.pp, groups.layout.tp, -1).cpu()
        loss_sum, valid = self._loss(replica[-1, 0, width:].view(2, -1))
        if sums is None:
            return Measured(loss_sum=loss_sum, valid_tokens=valid, norm=0.0, nonfinite=())
        return self._with_norm(replica[:, :, :width], loss_sum, valid)

    def _parameter_squares(self, by_dp: torch.Tensor) -> torch.Tensor:
        """The sum of squares of each own parameter, in model order, from every dp rank's block sums [dp, blocks]."""
        blocks = torch.empty(by_dp.numel(), dtype=torch.float64, device=by_dp.device)
        at = 0
        for bucket in self._plan.buckets:
            width = (bucket.stop - bucket.start) // 1024 // self._groups.dp.size
            start = bucket.start // 1024
            blocks[start : start + width * self._groups.dp.size] = by_dp[:, at : at + width].reshape(-1)
            at += width
        found = {slot.name: tree_sum(blocks[slot.start // 1024 : -(-slot.stop // 1024)]) for slot in self._plan.slots}
        specs, first = self._cell.specs, self._groups.tp.rank == 0
        zero = blocks.new_zeros(())
        return torch.stack([found[name] if specs[name].split is not None or first else zero for name in specs])

    def _loss(self, step_losses: torch.Tensor) -> tuple[float, int]:
        """The sum of all token losses, along the same order of additions as the gradients, and the token count."""
        sums, counts = step_losses.tolist()
        per_leaf = self._num_microbatches // self._num_leaves
        fold: Fold[float] = Fold(self._num_leaves, lambda left, right: left + right)
        for leaf in range(self._num_leaves):
            total = 0.0
            for value in sums[leaf * per_leaf : (leaf + 1) * per_leaf]:
                total += value
            fold.push(Node(leaf, leaf + 1), total)
        ((_, loss_sum),) = fold.parts
        return loss_sum, int(sum(counts))

    def _with_norm(self, squares: torch.Tensor, loss_sum: float, valid: int) -> Measured:
        """``squares`` [pp, tp, parameters] to the norm of the mean gradient; tp ranks add in rank order."""
        over_tp = squares[:, 0]
        for rank in range(1, squares.shape[1]):
            over_tp = over_tp + squares[:, rank]
        per_parameter = torch.cat([row[: len(names)] for row, names in zip(over_tp, self._stage_names)])
        names = [name for stage in self._stage_names for name in stage]
        nonfinite = [name for name, value in zip(names, per_parameter.tolist()) if not math.isfinite(value)]
        total = float(tree_sum(per_parameter))
        norm = math.sqrt(total) / max(valid, 1) if math.isfinite(total) else float("nan")
        return Measured(loss_sum=loss_sum, valid_tokens=valid, norm=norm, nonfinite=tuple(nonfinite))

    def _owned_grads(self) -> list[torch.Tensor]:
        """The gradient of what the optimizer owns: the own shards, or with zero 0 everybody's."""
        if self._cell.job.optim.zero == 1:
            return self._shards
        whole = [shard.new_empty(bucket.stop - bucket.start) for shard, bucket in zip(self._shards, self._plan.buckets)]
        tickets = [self._groups.dp.all_gather(out, shard) for out, shard in zip(whole, self._shards)]
        for ticket in tickets:
            ticket.wait()
        return whole
