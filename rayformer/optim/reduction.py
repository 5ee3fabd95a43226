"""The canonical reduce-scatter: shards travel all to all, then every owner adds them in one fixed order.

The bytes are those of a ring reduce-scatter where every actor sends one subtree, and the order of additions is the same
for every number of actors.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rayformer.groups import Group, Ticket
from rayformer.optim.plan import Bucket
from rayformer.optim.tree import Fold, Node, owned_leaves, subtrees


class BucketReduction:
    """One bucket's reduce-scatter, started when made; ``result()`` is the own shard of the sum over all leaves."""

    def __init__(
        self, bucket: Bucket, parts: Sequence[tuple[Node, torch.Tensor]], *, num_leaves: int, dp: Group
    ) -> None:
        owned = [subtrees(num_leaves, owned_leaves(num_leaves, dp.size, r)) for r in range(dp.size)]
        mine = owned[dp.rank]
        assert tuple(node for node, _ in parts) == mine, f"folded {[node for node, _ in parts]}, expected {mine}"
        self._num_leaves = num_leaves
        self._nodes = [node for nodes in owned for node in nodes]
        length = (bucket.stop - bucket.start) // dp.size
        sent = [buffer[bucket.start : bucket.stop] for _, buffer in parts]
        # [dp, own subtrees, shard]: what goes to one member lies together
        self._sent = sent[0] if len(sent) == 1 else torch.stack([t.view(dp.size, -1) for t in sent], dim=1).view(-1)
        self._received = self._sent.new_empty(len(self._nodes) * length)
        self._ticket: Ticket = dp.all_to_all(
            self._received, self._sent, [len(nodes) * length for nodes in owned], [len(mine) * length] * dp.size
        )

    def result(self) -> torch.Tensor:
        """The own shard [bucket / dp] of the summed gradient; waits for the exchange."""
        self._ticket.wait()
        fold: Fold[torch.Tensor] = Fold(self._num_leaves, lambda left, right: left.add_(right))
        for node, shard in zip(self._nodes, self._received.view(len(self._nodes), -1)):
            fold.push(node, shard)
        ((_, total),) = fold.parts
        return total
