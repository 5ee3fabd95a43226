"""AdamW over the cell's own shard of the flat buffer: moments and master weights exist for nothing else.

Source: Loshchilov and Hutter, https://arxiv.org/abs/1711.05101; sharding: Rajbhandari et al.,
https://arxiv.org/abs/1910.02054
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.optim.adamw import adamw

from rayformer.config.optim import OptimConfig
from rayformer.groups import Group
from rayformer.optim.buffers import FlatParameters
from rayformer.optim.plan import ALIGNMENT, Bucket
from rayformer.shards import Box, ParamSpec, flat_pieces, tensor_name


@dataclass(frozen=True, kw_only=True)
class StateShard:
    """A box of one state tensor and the memory that holds it, as a view of the box's shape."""

    tensor: str
    box: Box
    value: torch.Tensor


class ShardedAdamW:
    """The optimizer of one cell.

    With zero 1 it owns the dp rank's shard of every bucket, with zero 0 whole buckets. ``kinds`` of state are the
    master weights and both moments, each one flat float32 tensor over the owned ranges.
    """

    def __init__(
        self,
        parameters: FlatParameters,
        specs: Mapping[str, ParamSpec],
        section: OptimConfig,
        *,
        tp: Group,
        dp: Group,
    ) -> None:
        self._section, self._specs = section, specs
        self._tp, self._dp = tp, dp
        self._parameters = parameters
        plan = parameters.plan
        self.owned = [
            plan.shard(bucket, dp.rank) if section.zero == 1 else (bucket.start, bucket.stop) for bucket in plan.buckets
        ]
        # In float32 the master weights are the parameters themselves.
        self._masters = [parameters.buffer[start:stop] for start, stop in self.owned]
        self._exp_avgs = self._zeros()
        self._exp_avg_sqs = self._zeros()
        self.num_updates = 0

    def update(self, grads: Sequence[torch.Tensor], lr: float) -> None:
        """One AdamW update with ``grads``, one per bucket over the owned range."""
        section = self._section
        for weight_decay, decays in ((section.weight_decay, True), (0.0, False)):
            ranges = [
                (i, lo, hi)
                for i, bucket in enumerate(self._parameters.plan.buckets)
                for lo, hi in self._segments(bucket, self.owned[i], decays)
            ]
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
                weight_decay=weight_decay,
                eps=section.eps,
                maximize=False,
            )
        self.num_updates += 1

    def gather_parameters(self) -> None:
        """Bring every bucket's updated shards into every replica's parameters; with zero 0 they are there already."""
        if self._section.zero == 0:
            return
        plan, buffer = self._parameters.plan, self._parameters.buffer
        tickets = []
        for bucket in plan.buckets:
            start, stop = plan.shard(bucket, self._dp.rank)
            tickets.append(self._dp.all_gather(buffer[bucket.start : bucket.stop], buffer[start:stop]))
        for ticket in tickets:
            ticket.wait()

    def unique_state(self) -> Iterator[StateShard]:
        """The part of the state that this cell alone answers for: no replica's is given twice."""
        plan = self._parameters.plan
        ranges = [plan.shard(bucket, self._dp.rank) for bucket in plan.buckets]
        for shard in self._state(ranges):
            name = shard.tensor.rpartition("@")[0]
            if self._specs[name].split is not None or self._tp.rank == 0:
                yield shard

    def owned_state(self) -> Iterator[StateShard]:
        """Everything that this cell needs to go on, to be written into on a load."""
        return self._state(self.owned)

    @property
    def state_bytes(self) -> int:
        """Bytes of optimizer state beyond the parameters themselves."""
        return sum(t.numel() * t.element_size() for t in (*self._exp_avgs, *self._exp_avg_sqs))

    def _state(self, ranges: Sequence[tuple[int, int]]) -> Iterator[StateShard]:
        kinds = (("master", self._masters), ("exp_avg", self._exp_avgs), ("exp_avg_sq", self._exp_avg_sqs))
        for i, bucket in enumerate(self._parameters.plan.buckets):
            lo, hi = ranges[i]
            base = self.owned[i][0]
            for slot in bucket.slots:
                start, stop = max(lo, slot.start), min(hi, slot.stop)
                if start >= stop:
                    continue
                boxes = self._specs[slot.name].boxes(self._tp.size, self._tp.rank)
                for piece in flat_pieces(boxes, start - slot.start, stop - slot.start):
                    at = slice(slot.start + piece.start - base, slot.start + piece.stop - base)
                    for kind, tensors in kinds:
                        value = tensors[i][at].view(piece.box.shape)
                        yield StateShard(tensor=tensor_name(slot.name, kind), box=piece.box, value=value)

    def _segments(self, bucket: Bucket, owned: tuple[int, int], decays: bool) -> Iterator[tuple[int, int]]:
        """The runs of the owned range, relative to it, whose parameters do or do not decay; cut at blocks only."""
        for slot in bucket.slots:
            if self._specs[slot.name].decay == decays:
                start = max(slot.start, owned[0])
                stop = min(slot.start + -(-slot.numel // ALIGNMENT) * ALIGNMENT, owned[1])
                if start < stop:
                    yield start - owned[0], stop - owned[0]

    def _zeros(self) -> list[torch.Tensor]:
        device = self._parameters.buffer.device
        return [torch.zeros(stop - start, dtype=torch.float32, device=device) for start, stop in self.owned]
