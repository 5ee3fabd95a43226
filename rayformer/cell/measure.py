"""What a step came to: loss, token count and gradient norm of the whole global batch, the same bits on every cell.

Two exchanges bring them together: over dp, where every replica holds other shards and other microbatches, and over the
cells of one replica, which hold other parameters.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from operator import add

import torch

from rayformer.cell.build import Cell
from rayformer.nn.context import refuse_same_names
from rayformer.optim.norm import RangeSums, block_sums, tree_sum
from rayformer.optim.plan import ALIGNMENT
from rayformer.optim.tree import Fold, Node, owned_leaves
from rayformer.stages.executor import Losses


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What every cell knows of a step: sums over the whole global batch, and the norm of the mean gradient.

    ``nonfinite`` are the parameters whose gradient is not finite.
    """

    loss_sum: float
    valid_tokens: int
    norm: float = 0.0
    nonfinite: tuple[str, ...] = ()

    @property
    def loss(self) -> float:
        return self.loss_sum / max(self.valid_tokens, 1)


class Meter:
    """Measures the steps of one cell. Making one is a meeting of the replica's cells; so is every measurement.

    Shapes: V microbatches of a step, P parameters of the pipeline rank that has most.
    """

    def __init__(self, cell: Cell) -> None:
        self._groups, self._specs = cell.groups, cell.specs
        self._plan = cell.parameters.plan
        self._num_leaves = cell.job.batch.num_virtual_ranks
        dp = self._groups.dp
        self._dp_leaves = [len(owned_leaves(self._num_leaves, dp.size, d)) for d in range(dp.size)]
        slots = {slot.name: slot for slot in self._plan.slots}
        ranges = [(slots[name].start // ALIGNMENT, -(-slots[name].stop // ALIGNMENT)) for name in self._specs]
        self._sums = RangeSums(ranges, dp.device)
        # What tp replicates counts on its first rank only.
        own = torch.tensor([spec.split is not None for spec in self._specs.values()], dtype=torch.bool)
        self._counted = own.to(dp.device) if self._groups.tp.rank else None
        # The parameters of every pipeline rank, chunk after chunk; tp ranks have the same ones.
        numbered = [(name, cell.stage_map.stage(cell.groups.cell.pp, chunk)) for name, chunk in cell.chunk_of.items()]
        by_rank = self._groups.model.gather_values(numbered)[:: cell.groups.tp.size]
        self._num_of_rank = [len(names) for names in by_rank]
        everywhere = [(stage, name) for names in by_rank for name, stage in names]
        in_model = sorted(range(len(everywhere)), key=lambda i: everywhere[i][0])  # stable within a stage
        self._in_model = torch.tensor(in_model, dtype=torch.int64)
        self._names = [everywhere[i][1] for i in in_model]
        self._last_rank = cell.stage_map.rank(cell.stage_map.last)
        refuse_same_names(self._names)

    def measure(
        self, losses: Losses, shards: Sequence[torch.Tensor], *, num_microbatches: int, seed: float
    ) -> Measured:
        """The step of ``num_microbatches`` of which this cell saw ``losses``.

        It holds the reduced gradient ``shards``, one per owned bucket, of ``seed`` times the sum of the token losses.
        """
        per_leaf = num_microbatches // self._num_leaves
        blocks = torch.cat([block_sums(shard) for shard in shards]).double()
        step_losses, all_blocks = self._over_dp(losses, blocks, per_leaf)
        step_losses, squares = self._over_replica(step_losses, self._parameter_squares(all_blocks))
        loss_sum, valid = self._fold_losses(step_losses, per_leaf)
        over_tp = squares[:, 0]
        for rank in range(1, squares.shape[1]):
            over_tp = over_tp + squares[:, rank]
        per_parameter = torch.cat([row[:count] for row, count in zip(over_tp, self._num_of_rank)])[self._in_model]
        nonfinite = [name for name, value in zip(self._names, per_parameter.tolist()) if not math.isfinite(value)]
        norm = math.sqrt(float(tree_sum(per_parameter))) / seed / max(valid, 1) if not nonfinite else math.nan
        return Measured(loss_sum=loss_sum, valid_tokens=valid, norm=norm, nonfinite=tuple(nonfinite))

    def measure_losses(self, losses: Losses, *, num_microbatches: int) -> Measured:
        """The same without a gradient, for evaluation."""
        per_leaf = num_microbatches // self._num_leaves
        nothing = torch.zeros(0, dtype=torch.float64, device=self._groups.device)
        step_losses, _ = self._over_dp(losses, nothing, per_leaf)
        step_losses, _ = self._over_replica(step_losses, nothing)
        loss_sum, valid = self._fold_losses(step_losses, per_leaf)
        return Measured(loss_sum=loss_sum, valid_tokens=valid)

    def _over_dp(self, losses: Losses, blocks: torch.Tensor, per_leaf: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Loss sums and token counts of every microbatch [2, V], and every replica's ``blocks`` [dp, blocks]."""
        dp, widths = self._groups.dp, [leaves * per_leaf for leaves in self._dp_leaves]
        widest = max(widths)
        own = torch.zeros(2, widest, dtype=torch.float64, device=dp.device)
        for v, total in losses.sums.items():
            own[0, v], own[1, v] = total.double(), losses.counts[v]
        sent = torch.cat([own.view(-1), blocks])
        received = sent.new_empty(dp.size, sent.numel())
        dp.all_gather(received.view(-1), sent).wait()
        rows = received[:, : 2 * widest].view(dp.size, 2, widest)
        step_losses = torch.cat([row[:, :width] for row, width in zip(rows, widths)], dim=1)
        return step_losses, received[:, 2 * widest :]

    def _over_replica(self, step_losses: torch.Tensor, squares: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The last stage's losses [2, V], and every cell's ``squares`` as [pp, tp, P], on the CPU."""
        replica, layout = self._groups.model, self._groups.layout
        width = max(self._num_of_rank) if squares.numel() else 0
        sent = torch.cat([step_losses.reshape(-1), squares, squares.new_zeros(width - squares.numel())])
        received = sent.new_empty(replica.size, sent.numel())
        replica.all_gather(received.view(-1), sent).wait()
        cells = received.view(layout.pp, layout.tp, -1).cpu()
        return cells[self._last_rank, 0, : step_losses.numel()].view(2, -1), cells[:, :, step_losses.numel() :]

    def _parameter_squares(self, by_dp: torch.Tensor) -> torch.Tensor:
        """The sum of squares of each own parameter, in model order."""
        buckets = [(bucket.stop - bucket.start) // ALIGNMENT // self._groups.dp.size for bucket in self._plan.owned]
        blocks = torch.cat([part.reshape(-1) for part in by_dp.split(buckets, dim=1)])  # in flat order
        sums = self._sums(blocks)
        return sums if self._counted is None else torch.where(self._counted, sums, 0.0)

    def _fold_losses(self, step_losses: torch.Tensor, per_leaf: int) -> tuple[float, int]:
        """The sum of all token losses, in the order of additions of the gradients, and the token count."""
        sums, counts = step_losses.tolist()
        fold: Fold[float] = Fold(self._num_leaves, lambda left, right: left + right)
        for leaf in range(self._num_leaves):
            own = sums[leaf * per_leaf : (leaf + 1) * per_leaf]
            fold.push(Node(leaf, leaf + 1), reduce(add, own))  # sum() compensates from Python 3.12 on
        ((_, loss_sum),) = fold.parts
        return loss_sum, int(sum(counts))
