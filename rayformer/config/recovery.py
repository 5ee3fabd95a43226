"""Section ``recovery``: what a run keeps ready for the loss of a cell, and how much of that it bears."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from rayformer.config.section import CountOrZero, Positive, Section


class RecoveryConfig(Section):
    """Snapshots, spares and limits."""

    standbys_per_node: CountOrZero = Field(
        1, description="Processes that wait on every node, everything imported, to take over a lost one's cell."
    )
    spare_bundles: CountOrZero = Field(
        0, description="Bundles of a tp group's resources kept free, for when a node or an accelerator is lost."
    )
    snapshot_every: CountOrZero | Literal["auto"] = Field(
        "auto",
        description=(
            "Steps between two snapshots of every cell's state in the memory of its node; auto is the fewest that cost"
            " at most 1 % of a step; 0 takes none, so that a lost cell sends all back to the last checkpoint."
        ),
    )
    max_failures: int = Field(
        10,
        ge=-1,
        description=(
            "Failures of one cause in a row, without a new step between them, that are repaired; 0 repairs nothing, -1"
            " everything. Lost nodes don't count."
        ),
    )
    stall_s: Positive | Literal["auto"] = Field(
        "auto",
        description=(
            "Seconds without progress after which a cell is replaced; auto follows the steps seen so far. Saving,"
            " evaluating and loading may take ten times as long, and at least a minute."
        ),
    )
