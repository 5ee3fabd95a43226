"""Section ``recompute``: which activations are forgotten in forward and computed again in backward."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from rayformer.config.section import Count, Section

Module = Literal["core_attn", "mlp", "act", "norm"]


class RecomputeConfig(Section):
    """Memory for time; the bits are the same in every mode."""

    mode: Literal["none", "full", "selective"] = Field(
        "none", description="full forgets all inside a layer, selective only what the named modules keep."
    )
    method: Literal["uniform", "block"] = Field(
        "uniform",
        description="Of full: uniform keeps each group of layers' input, block recomputes the first layers only.",
    )
    layers: Count = Field(
        1, description="Of full: layers in a group (uniform), or layers of a stage that are recomputed (block)."
    )
    modules: Annotated[tuple[Module, ...], Field(strict=False, min_length=1)] = Field(
        ("core_attn",),
        description="Of selective: core_attn helps the explicit kernel only, act only gated forms.",
    )
