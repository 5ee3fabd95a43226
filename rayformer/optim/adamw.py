"""AdamW over the cell's own shard of the flat buffer: moments and master weights exist for nothing else.

Source: Loshchilov and Hutter, https://arxiv.org/abs/1711.05101; sharding: Rajbhandari et al.,
https://arxiv.org/abs/1910.02054
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch.optim.adamw import adamw

from rayformer.config.optim import OptimConfig, PrecisionConfig
from rayformer.groups import Group, Ticket
from rayformer.optim.buffers import FlatParameters
from rayformer.optim.plan import ALIGNMENT, Bucket
from rayformer.optim.scaler import LossScale
from rayformer.optim.tied import TiedParameters
from rayformer.shards import Box, ParamSpec, flat_pieces, tensor_name


@dataclass(frozen=True, kw_only=True)
class StateShard:
    """A box of one state tensor and the memory that holds it, as a view of the box's shape.

    ``start`` is where it lies in ``flat_state``, one tensor after the other, in elements.
    """

    tensor: str
    box: Box
    value: torch.Tensor
    start: int


class ShardedAdamW:
    """The optimizer of one cell.

    With zero 1 it owns the dp rank's shard of every bucket, with zero 0 whole buckets. Kinds of state are the master
    weights and both moments, each a flat float32 tensor per owned range; where parameters are float32 too, the masters
    are the parameters themselves.
    """

    def __init__(
        self,
        parameters: FlatParameters,
        specs: Mapping[str, ParamSpec],
        section: OptimConfig,
        *,
        precision: PrecisionConfig,
        tp: Group,
        dp: Group,
        tied: TiedParameters,
    ) -> None:
        self._section, self._specs = section, specs
        self._tp, self._dp = tp, dp
        self._parameters = parameters
        self._plan = plan = parameters.plan
        self.tied = tied
        self.owned = [
            plan.shard(bucket, dp.rank) if section.zero == 1 else (bucket.start, bucket.stop) for bucket in plan.owned
        ]
        self._masters = parameters.take_initial(self.owned)
        self._gathers: dict[int, Ticket] = {}
        self._exp_avgs = self._zeros()
        self._exp_avg_sqs = self._zeros()
        self._decaying, self._constant = self._ranges(True), self._ranges(False)
        self.num_updates = 0
        self.loss_scale = LossScale.initial(precision)

    def update(self, grads: Sequence[torch.Tensor], *, lr: float, weight_decay: float) -> None:
        """One AdamW update with ``grads``, one per owned bucket over the owned range."""
        section = self._section
        for ranges, decay in ((self._decaying, weight_decay), (self._constant, 0.0)):
            if not ranges:
                continue
            masters, gradients, exp_avgs, exp_avg_sqs = (
                [tensors[i][lo:hi] for i, lo, hi in ranges]
                for tensors in (self._masters, grads, self._exp_avgs, self._exp_avg_sqs)
            )
            adamw(
                masters,
                gradients,
                exp_avgs,
                exp_avg_sqs,
                [],
                [torch.tensor(float(self.num_updates), device=m.device) for m in masters],
                fused=True,
                amsgrad=False,
                beta1=section.betas[0],
                beta2=section.betas[1],
                lr=lr,
                weight_decay=decay,
                eps=section.eps,
                maximize=False,
            )
        self.num_updates += 1

    def start_gather(self) -> None:
        """Cast the masters into the parameters, and start to bring every bucket's shards into every replica's.

        Buckets go in the order in which forward needs them; ``await_bucket`` waits for one. With zero 0 everything is
        there already, but for borrowed parameters.
        """
        plan, buffer = self._plan, self._parameters.buffer
        for (start, stop), master in zip(self.owned, self._masters):
            if buffer.dtype != master.dtype:
                buffer[start:stop].copy_(master)
        self.tied.publish([buffer[slice(*self._range(bucket))] for bucket in plan.buckets])
        if self._section.zero == 0:
            return
        for i, bucket in reversed(list(enumerate(plan.buckets))):
            if bucket.stop <= buffer.numel():  # a borrowed one may share its owner's memory
                own = buffer[slice(*plan.shard(bucket, self._dp.rank))]
                self._gathers[i] = self._dp.all_gather(buffer[bucket.start : bucket.stop], own)

    def await_bucket(self, bucket: int) -> None:
        """Return when the parameters of ``bucket`` are all here."""
        if bucket in self._gathers:
            self._gathers.pop(bucket).wait()

    def forget_gathers(self) -> None:
        """Those in flight will never arrive: their groups are gone."""
        self._gathers.clear()

    def await_parameters(self) -> None:
        """Return when all parameters are here."""
        for bucket in list(self._gathers):
            self.await_bucket(bucket)

    def unique_state(self) -> Iterator[StateShard]:
        """The part of the state that this cell alone answers for: no replica's is given twice."""
        ranges = [self._plan.shard(bucket, self._dp.rank) for bucket in self._plan.owned]
        for shard in self._state(ranges):
            name = shard.tensor.rpartition("@")[0]
            if self._specs[name].split is not None or self._tp.rank == 0:
                yield shard

    def owned_state(self) -> Iterator[StateShard]:
        """Everything that this cell needs to go on, to be written into on a load."""
        return self._state(self.owned)

    def flat_state(self) -> list[torch.Tensor]:
        """All the memory of ``owned_state``, as few float32 tensors."""
        return [*self._masters, *self._exp_avgs, *self._exp_avg_sqs]

    @property
    def state_bytes(self) -> int:
        """Bytes of optimizer state beyond the parameters themselves."""
        masters = [] if self._parameters.buffer.dtype == torch.float32 else self._masters
        return sum(t.numel() * t.element_size() for t in (*masters, *self._exp_avgs, *self._exp_avg_sqs))

    def _state(self, ranges: Sequence[tuple[int, int]]) -> Iterator[StateShard]:
        kinds = (("master", self._masters), ("exp_avg", self._exp_avgs), ("exp_avg_sq", self._exp_avg_sqs))
        starts = [0, *accumulate(stop - start for start, stop in self.owned)]
        for i, bucket in enumerate(self._plan.owned):
            lo, hi = ranges[i]
            base = self.owned[i][0]
            for slot in bucket.slots:
                start, stop = max(lo, slot.start), min(hi, slot.stop)
                if start >= stop:
                    continue
                boxes = self._specs[slot.name].boxes(self._tp.size, self._tp.rank)
                for piece in flat_pieces(boxes, start - slot.start, stop - slot.start):
                    at = slice(slot.start + piece.start - base, slot.start + piece.stop - base)
                    for k, (kind, tensors) in enumerate(kinds):
                        yield StateShard(
                            tensor=tensor_name(slot.name, kind),
                            box=piece.box,
                            value=tensors[i][at].view(piece.box.shape),
                            start=k * starts[-1] + starts[i] + at.start,
                        )

    def _ranges(self, decays: bool) -> list[tuple[int, int, int]]:
        """Where parameters that do or do not decay lie in what is owned, as few and as long ranges as can be.

        Each is (bucket, start, stop), relative to the owned range and cut at blocks only.
        """
        ranges: list[tuple[int, int, int]] = []
        for i, (bucket, (lo, hi)) in enumerate(zip(self._plan.owned, self.owned)):
            for slot in bucket.slots:
                if self._specs[slot.name].decay != decays:
                    continue
                start, stop = (
                    max(slot.start, lo) - lo,
                    min(slot.start + -(-slot.numel // ALIGNMENT) * ALIGNMENT, hi) - lo,
                )
                if start >= stop:
                    continue
                if ranges and ranges[-1][0] == i and ranges[-1][2] == start:
                    start = ranges.pop()[1]
                ranges.append((i, start, stop))
        return ranges

    def _range(self, bucket: Bucket) -> tuple[int, int]:
        return self._plan.shard(bucket, self._dp.rank) if self._section.zero == 1 else (bucket.start, bucket.stop)

    def _zeros(self) -> list[torch.Tensor]:
        device = self._parameters.buffer.device
        return [torch.zeros(stop - start, dtype=torch.float32, device=device) for start, stop in self.owned]
