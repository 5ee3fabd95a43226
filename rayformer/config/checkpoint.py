"""Section ``checkpoint``: where state is kept on disk, how often, and how many are kept."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from rayformer.config.section import Count, CountOrZero, PathText, Section


class CheckpointConfig(Section):
    """Durable checkpoints."""

    dir: PathText = Field(
        "auto",
        description="Folder of the checkpoints, or a URI of pyarrow.fs such as s3://bucket/runs; auto is checkpoints/ "
        "in the run's folder.",
    )
    every: CountOrZero = Field(50, description="Updates between two checkpoints; 0 writes one at the end only.")
    keep: CountOrZero = Field(3, description="How many of the newest are kept; 0 keeps all.")
    keep_every: CountOrZero = Field(0, description="Those of every so many updates are kept besides; 0 keeps none.")
    max_file_bytes: Count = Field(2**31, description="How large a file of a checkpoint may be, but for its head.")
    busy: Literal["wait", "skip"] = Field(
        "wait",
        description="What a checkpoint does that is due while the one before it is being written: wait holds training "
        "up, skip leaves it out.",
    )
    resume: PathText = Field(
        "auto", description="auto goes on from the newest checkpoint, never starts anew, a step folder goes on from it."
    )
    init_from: PathText | None = Field(
        None,
        description="Weights that a first start begins with, at step 0: hf:PATH for a folder of Hugging Face's, or a "
        "checkpoint of any layout.",
    )
