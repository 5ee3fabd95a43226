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
    """One bucket's reduce-scatter, started when made; ``result()`` is the own shard of the sum over all leaves.

    ``parts`` are the own subtrees, each [bucket]; the result takes the place of the own shard in the first.
    """

    def __init__(
        self, bucket: Bucket, parts: Sequence[tuple[Node, torch.Tensor]], *, num_leaves: int, dp: Group
    ) -> None:
        owned = [subtrees(num_leaves, owned_leaves(num_leaves, dp.size, r)) for r in range(dp.size)]
        mine = owned[dp.rank]
        assert tuple(node for node, _ in parts) == mine, f"folded {[node for node, _ in parts]}, expected {mine}"
        self._num_leaves = num_leaves
        self._nodes = [node for nodes in owned for node in nodes]
        length = (bucket.stop - bucket.start) // dp.size
        sent = [part for _, part in parts]
        self._own = sent[0][dp.rank * length : (dp.rank + 1) * length]
        # [dp, own subtrees, shard]: what goes to one member lies together
        self._sent = sent[0] if len(sent) == 1 else torch.stack([t.view(dp.size, -1) for t in sent], dim=1).view(-1)
        self._received = self._sent if dp.size == 1 else self._sent.new_empty(len(self._nodes) * length)
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
        if total.data_ptr() != self._own.data_ptr():
            self._own.copy_(total)
        return self._own


def sum_partial(shards: Sequence[torch.Tensor], ranges: Sequence[tuple[int, int, int]], tp: Group) -> None:
    """Add up, in rank order, what tp ranks hold of gradients that are each a part of the sum; in place.

    ``ranges`` are (bucket, start, stop) within the own ``shards``, the same on all ranks.
    """
    if not ranges or tp.size == 1:
        return
    pieces = [shards[bucket][start:stop] for bucket, start, stop in ranges]
    own = torch.cat(pieces)
    everybody = own.new_empty(tp.size, own.numel())
    tp.all_gather(everybody.view(-1), own).wait()
    total = everybody[0]
    for part in everybody[1:]:
        total.add_(part)
    for piece, summed in zip(pieces, total.split([piece.numel() for piece in pieces])):
        piece.copy_(summed)
