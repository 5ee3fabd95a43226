"""Section ``model``: the shape of the transformer. It knows nothing of the layout."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from rayformer.config.section import Count, NotNegative, Positive, Section


class ModelConfig(Section):
    """A decoder-only transformer in the manner of Llama: RMSNorm, SwiGLU, rotary positions, grouped queries."""

    layers: Count = Field(description="Number of transformer layers.")
    hidden: Count = Field(description="Width of the residual stream.")
    heads: Count = Field(description="Number of query heads; the head width is hidden / heads.")
    kv_heads: Count | None = Field(None, description="Number of key and value heads; null is as many as heads.")
    ffn: Count = Field(description="Width inside the feed-forward block.")
    vocab: Count = Field(description="Number of token ids.")
    norm: Literal["rmsnorm"] = Field("rmsnorm", description="The normalisation before each block.")
    norm_eps: Positive = Field(1.0e-5, description="Added to the mean square before its root is taken.")
    activation: Literal["swiglu"] = Field("swiglu", description="The non-linearity of the feed-forward block.")
    position: Literal["rope"] = Field("rope", description="How positions enter: rotary embedding of queries and keys.")
    rope_theta: Positive = Field(10000.0, description="Base of the rotary frequencies.")
    tie_embeddings: bool = Field(False, description="Whether the output layer is the embedding table.")
    bias: bool = Field(False, description="Whether the linear layers have biases.")
    qk_norm: bool = Field(False, description="Whether queries and keys are normalised per head.")
    dropout: NotNegative = Field(0.0, description="Share of the residual branches' activations that is dropped.")
    attention_dropout: NotNegative = Field(0.0, description="Share of the attention probabilities that is dropped.")

    @property
    def num_kv_heads(self) -> int:
        return self.heads if self.kv_heads is None else self.kv_heads

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads
