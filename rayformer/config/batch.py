"""Section ``batch``: how many samples make a step, and how they are cut."""

from __future__ import annotations

from pydantic import ConfigDict, Field

from rayformer.config.section import Auto, Count, Section


class RampUp(Section):
    """A global batch that grows in equal steps while the first samples are consumed."""

    start: Count = Field(description="Samples in the first step.")
    increment: Count = Field(description="Samples by which the batch grows at a time; it must lead to batch.global.")
    samples: Count = Field(description="Samples over which the batch grows; each size lasts an equal share of them.")


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

    rampup: RampUp | None = Field(None, description="A batch that grows to global; null is global from the start.")

    def size_after(self, consumed_samples: int) -> int:
        """Samples in the step that follows after ``consumed_samples`` of the run, as Megatron's ramp-up has it.

        >>> batch = BatchConfig.model_validate(
        ...     {"global": 8, "seq": 4, "rampup": {"start": 2, "increment": 2, "samples": 30}}
        ... )
        >>> [batch.size_after(consumed) for consumed in (0, 9, 10, 20, 30, 31)]
        [2, 2, 4, 6, 8, 8]
        """
        if self.rampup is None or consumed_samples > self.rampup.samples:
            return self.global_
        num_increments = (self.global_ - self.rampup.start) // self.rampup.increment
        grown = consumed_samples * num_increments // self.rampup.samples
        return self.rampup.start + grown * self.rampup.increment

    @property
    def num_virtual_ranks(self) -> int:
        assert self.virtual_ranks != "auto", "batch.virtual_ranks was not resolved"
        return self.virtual_ranks

    @property
    def num_microbatches(self) -> int:
        """Microbatches in one step, over all cells."""
        return self.global_ // self.micro
