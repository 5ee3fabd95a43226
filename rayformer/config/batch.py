"""Section ``batch``: how many samples make a step, and how they are cut."""

from __future__ import annotations

from pydantic import ConfigDict, Field

from rayformer.config.section import Auto, Count, Section


class BatchConfig(Section):
    """Global batch, microbatch, sequence length, and the fixed shares of a step."""

    model_config = ConfigDict(serialize_by_alias=True)

    global_: Count = Field(alias="global", description="Samples in one step, over all cells.")
    micro: Count = Field(1, description="Samples that pass through the model at a time.")
    seq: Count = Field(description="Tokens in one sample.")
    virtual_ranks: Count | Auto = Field(
        "auto",
        description="Fixed shares of a step, folded in one order whatever dp is; auto is the first run's dp, kept.",
    )

    @property
    def num_virtual_ranks(self) -> int:
        assert self.virtual_ranks != "auto", "batch.virtual_ranks was not resolved"
        return self.virtual_ranks

    @property
    def num_microbatches(self) -> int:
        """Microbatches in one step, over all cells."""
        return self.global_ // self.micro
