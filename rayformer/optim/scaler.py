"""The loss scale of fp16: it keeps small gradients above the format's smallest number. Pure.

Source: Micikevicius et al., https://arxiv.org/abs/1710.03740; the rule with hysteresis is Megatron-LM's
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from rayformer.config.optim import PrecisionConfig

SMALLEST = 1.0


@dataclass(frozen=True, kw_only=True)
class LossScale:
    """The factor of the next step's loss, finite steps since it last rose, and overflows it will still bear."""

    scale: float
    good_steps: int = 0
    patience: int = 0

    @classmethod
    def initial(cls, section: PrecisionConfig) -> LossScale:
        """1 unless parameters are fp16."""
        if section.params != "fp16":
            return cls(scale=1.0)
        scale = section.initial_scale if section.loss_scale == "dynamic" else section.loss_scale
        return cls(scale=scale, patience=section.scale_hysteresis)

    def after(self, section: PrecisionConfig, *, overflow: bool) -> LossScale:
        """The scale after a step whose gradient did or did not overflow.

        Patience returns only when the scale rises, not with every finite step.
        """
        if section.params != "fp16" or section.loss_scale != "dynamic":
            return self
        if overflow:
            patience = self.patience - 1
            scale = max(self.scale / 2, SMALLEST) if patience <= 0 else self.scale
            return LossScale(scale=scale, patience=patience)
        if self.good_steps + 1 == section.scale_interval:
            return LossScale(scale=self.scale * 2, patience=section.scale_hysteresis)
        return replace(self, good_steps=self.good_steps + 1)
