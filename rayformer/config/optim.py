"""Section ``optim``: AdamW, its schedule, and how its state is divided."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from rayformer.config.section import Auto, Count, CountOrZero, NotNegative, Positive, Section

Beta = Annotated[float, Field(ge=0, lt=1)]


class OptimConfig(Section):
    """AdamW with decoupled weight decay (not on one-dimensional parameters) and clipping by the global norm."""

    lr: Positive = Field(1.0e-3, description="Peak learning rate, reached after the warm-up.")
    min_lr: NotNegative = Field(0.0, description="Learning rate at the end of the decay; constant has no use for it.")
    init_lr: NotNegative = Field(0.0, description="Learning rate from which the warm-up rises.")
    warmup_steps: CountOrZero = Field(0, description="Updates over which the rate rises linearly from init_lr to lr.")
    decay: Literal["constant", "linear", "cosine", "inverse_sqrt", "wsd"] = Field(
        "cosine", description="Shape of the rate after the warm-up; wsd keeps lr until its final decay."
    )
    decay_steps: Count | Auto = Field(
        "auto", description="Update at which min_lr is reached; auto is the first run's steps, kept on resume."
    )
    wsd_steps: Count | None = Field(
        None, description="Updates of wsd's final decay, which ends at decay_steps; null for every other shape."
    )
    wsd_decay: Literal["linear", "cosine", "exponential", "minus_sqrt"] | None = Field(
        None, description="Shape of wsd's final decay; null is linear."
    )
    betas: Annotated[tuple[Beta, Beta], Field(strict=False)] = Field(
        (0.9, 0.95), description="Decay of the first and of the second moment."
    )
    eps: Positive = Field(1.0e-8, description="Added to the root of the second moment.")
    weight_decay: NotNegative = Field(
        0.1, description="Decoupled weight decay of matrices; with weight_decay_end, its start."
    )
    weight_decay_end: NotNegative | None = Field(
        None, description="Weight decay from update decay_steps on; null keeps weight_decay."
    )
    weight_decay_style: Literal["constant", "linear", "cosine"] = Field(
        "constant", description="How weight_decay goes over to weight_decay_end."
    )
    clip: NotNegative = Field(1.0, description="Largest global gradient norm; larger ones are scaled down. 0 is off.")
    zero: Literal[0, 1] = Field(
        1, description="1 divides the optimizer state over dp; 0 keeps a whole copy in every replica."
    )
    overlap: bool | Literal["auto"] = Field(
        "auto",
        description=(
            "Whether gradients are reduced while the last backward still runs; the bits are the same. auto: on GPUs;"
            " on CPUs the threads that carry the messages take the cores from backward."
        ),
    )

    @property
    def num_decay_steps(self) -> int:
        assert self.decay_steps != "auto", "optim.decay_steps was not resolved"
        return self.decay_steps


class PrecisionConfig(Section):
    """Number formats."""

    params: Literal["fp32", "bf16", "fp16"] = Field(
        "fp32",
        description="Format that the model computes in; 16-bit ones keep fp32 master weights beside the moments.",
    )
    grads: Literal["fp32"] = Field("fp32", description="Format in which gradients are accumulated and reduced.")
    deterministic: bool = Field(True, description="Whether kernels must give the same bits in every run.")
    loss_scale: Positive | Literal["dynamic"] = Field(
        "dynamic", description="Factor of the loss under fp16: fixed, or lowered on overflow and raised again."
    )
    initial_scale: Positive = Field(65536.0, description="Where a dynamic loss scale starts.")
    scale_interval: Count = Field(1000, description="Finite steps after which a dynamic loss scale doubles.")
    scale_hysteresis: Count = Field(
        2, description="Overflows that a dynamic loss scale bears before it is halved at each further one."
    )
