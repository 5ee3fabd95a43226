"""Floating-point operations of the model, counted as matrix products with full attention."""

from __future__ import annotations

from rayformer.config.model import ModelConfig


def flops_per_token(model: ModelConfig, seq: int) -> int:
    """Operations to train on one token: forward, and twice that for backward; the embedding look-up is none."""
    width = model.heads * model.head_dim
    projections = model.hidden * (2 * width + 2 * model.num_kv_heads * model.head_dim)
    matrices = model.layers * (projections + 3 * model.hidden * model.ffn) + model.hidden * model.vocab
    attention = model.layers * 2 * seq * width
    return 3 * 2 * (matrices + attention)
