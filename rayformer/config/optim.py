"""Section ``optim``: AdamW, its schedule, and how its state is divided."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from rayformer.config.section import Auto, Count, CountOrZero, NotNegative, Positive, Section

Beta = Annotated[float, Field(ge=0, lt=1)]


class OptimConfig(Section):
    """AdamW with decoupled weight decay (not on one-dimensional parameters) and clipping by the global norm."""

    lr: Positive = Field(1.0e-3, description="Peak learning rate, reached after the warm-up.")
    min_lr: NotNegative = Field(0.0, description="Learning rate at the end of the decay.")
    warmup_steps: CountOrZero = Field(0, description="Updates over which the rate rises linearly from 0.")
    decay: Literal["constant", "cosine"] = Field("cosine", description="Shape of the rate after the warm-up.")
    decay_steps: Count | Auto = Field(
        "auto", description="Update at which min_lr is reached; auto is the first run's steps, kept on resume."
    )
    betas: Annotated[tuple[Beta, Beta], Field(strict=False)] = Field(
        (0.9, 0.95), description="Decay of the first and of the second moment."
    )
    eps: Positive = Field(1.0e-8, description="Added to the root of the second moment.")
    weight_decay: NotNegative = Field(0.1, description="Decoupled weight decay of matrices.")
    clip: NotNegative = Field(1.0, description="Largest global gradient norm; larger ones are scaled down. 0 is off.")
    zero: Literal[0, 1] = Field(
        1, description="1 divides the optimizer state over dp; 0 keeps a whole copy in every replica."
    )

    @property
    def num_decay_steps(self) -> int:
        assert self.decay_steps != "auto", "optim.decay_steps was not resolved"
        return self.decay_steps


class PrecisionConfig(Section):
    """Number formats."""

    params: Literal["fp32"] = Field("fp32", description="Format of the parameters that the model computes with.")
    grads: Literal["fp32"] = Field("fp32", description="Format in which gradients are accumulated and reduced.")
    deterministic: bool = Field(True, description="Whether kernels must give the same bits in every run.")
