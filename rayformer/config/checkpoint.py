"""Section ``checkpoint``: where state is kept on disk, how often, and how many are kept."""

from __future__ import annotations

from pydantic import Field

from rayformer.config.section import CountOrZero, PathText, Section


class CheckpointConfig(Section):
    """Durable checkpoints."""

    dir: PathText = Field("auto", description="Folder of the checkpoints; auto is checkpoints/ in the run's folder.")
    every: CountOrZero = Field(50, description="Updates between two checkpoints; 0 writes one at the end only.")
    keep: CountOrZero = Field(3, description="How many of the newest are kept; 0 keeps all.")
    resume: PathText = Field(
        "auto", description="auto goes on from the newest checkpoint, never starts anew, a step folder goes on from it."
    )
