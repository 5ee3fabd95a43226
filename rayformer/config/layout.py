"""Section ``layout``: over how many cells each axis divides the model and the batch."""

from __future__ import annotations

from pydantic import Field

from rayformer.config.section import Auto, Count, Section
from rayformer.layout import Layout


class LayoutConfig(Section):
    """The parallel degrees."""

    tp: Count = Field(1, description="Tensor-parallel degree: cells that share every layer.")
    pp: Count = Field(1, description="Pipeline-parallel degree: stages that hold different layers.")
    dp: Count | Auto = Field(
        1, description="Data-parallel degree: replicas of the pipeline; auto takes what the cluster has."
    )
    cp: Count = Field(1, description="Context-parallel degree: cells that share every sequence.")
    ep: Count = Field(1, description="Expert-parallel degree: cells over which experts are spread.")
    etp: Count = Field(1, description="Tensor-parallel degree of the experts.")
    virtual_stages: Count = Field(1, description="Pieces of the model that each pipeline rank holds.")
    sequence_parallel: bool = Field(False, description="Whether norms and residuals are split along the sequence.")
    stages: str = Field(
        "auto",
        description="How the blocks are dealt to the stages: auto balances their costs, else a drawing of "
        "E (embedding), t (layer), L (loss), a vertical bar between stages, and x*n or (..)*n for repetition.",
    )

    @property
    def degrees(self) -> Layout:
        """The layout; dp must have been resolved."""
        assert self.dp != "auto", "layout.dp was not resolved"
        return Layout(tp=self.tp, cp=self.cp, dp=self.dp, pp=self.pp, ep=self.ep, etp=self.etp)
