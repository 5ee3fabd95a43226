"""Which blocks of a model each pipeline rank holds."""

from __future__ import annotations

from rayformer.shards import share_start


def stage_blocks(num_layers: int, pp: int, rank: int) -> range:
    """The blocks of stage ``rank``, numbered input block, layers, output block; layers are dealt evenly.

    >>> [list(stage_blocks(3, 2, rank)) for rank in range(2)]
    [[0, 1, 2], [3, 4]]
    """
    start = 0 if rank == 0 else 1 + share_start(num_layers, pp, rank)
    stop = num_layers + 2 if rank == pp - 1 else 1 + share_start(num_layers, pp, rank + 1)
    return range(start, stop)
