"""Floating-point operations of the model, counted as matrix products with full attention."""

from __future__ import annotations

from rayformer.config.model import CustomModelConfig, ModelConfig


def flops_per_token(model: ModelConfig | CustomModelConfig, seq: int) -> int | None:
    """Operations to train on one token: forward, and twice that for backward; the embedding look-up is none.

    What is recomputed is not counted: these are the model's operations, not the hardware's. None for a model of the
    user's own.
    """
    if isinstance(model, CustomModelConfig):
        return None
    matrices = model.layers * model.layer_matrices + model.output_matrix
    attention = model.layers * 2 * seq * model.heads * model.width
    return 3 * 2 * (matrices + attention)
