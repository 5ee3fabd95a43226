"""Section ``model``: the shape of the transformer. It knows nothing of the layout."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from pydantic import ConfigDict, Field

from rayformer.config.section import Count, Positive, Section

Activation: TypeAlias = Literal["swiglu", "geglu", "gelu", "gelu_tanh", "relu"]
AttentionImpl: TypeAlias = Literal["auto", "sdpa", "explicit", "flash", "te"]
Share: TypeAlias = Annotated[float, Field(ge=0, lt=1)]


class RopeScaling(Section):
    """How rotary positions are stretched for sequences longer than those of an earlier training."""

    kind: Literal["linear", "llama3"] = Field(description="linear slows all frequencies; llama3 the slow ones only.")
    factor: Positive = Field(description="By how much the sequence is longer.")
    low_freq_factor: Positive = Field(
        1.0, description="llama3: frequencies with fewer turns than this in the original sequence are slowed."
    )
    high_freq_factor: Positive = Field(
        4.0, description="llama3: frequencies with more turns than this in the original sequence stay."
    )
    original_positions: Count = Field(8192, description="llama3: length of the original sequence.")


class CustomModelConfig(Section):
    """A model of the user's own: its factory, what the pipeline must know, and whatever else the factory asks for."""

    model_config = ConfigDict(frozen=True, strict=True, extra="allow", allow_inf_nan=False)

    factory: Annotated[str, Field(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")] = Field(
        description="Function that builds the model, as package.module:function; it gets this section."
    )
    hidden: Count = Field(description="Width of what one block hands to the next.")
    vocab: Count = Field(description="Number of token ids.")
    compile: bool = Field(False, description="Whether torch.compile compiles each block.")


class ModelConfig(Section):
    """A decoder-only transformer; its options make GPT-2, Llama, Mistral, Qwen 2 and Qwen 3."""

    layers: Count = Field(description="Number of transformer layers.")
    hidden: Count = Field(description="Width of the residual stream.")
    heads: Count = Field(description="Number of query heads.")
    kv_heads: Count | None = Field(None, description="Number of key and value heads; null is as many as heads.")
    head_dim: Count | None = Field(None, description="Width of a head; null is hidden / heads.")
    ffn: Count = Field(description="Width inside the feed-forward block.")
    vocab: Count = Field(description="Number of token ids.")
    norm: Literal["rmsnorm", "layernorm"] = Field("rmsnorm", description="The normalisation before each block.")
    norm_eps: Positive = Field(1.0e-5, description="Added to the mean square, or to the variance, before its root.")
    activation: Activation = Field(
        "swiglu", description="The non-linearity of the feed-forward block; gelu_tanh is GPT-2's form of gelu."
    )
    position: Literal["rope", "learned", "none"] = Field(
        "rope", description="How positions enter: rotary embedding of queries and keys, or a learned vector each."
    )
    max_positions: Count | None = Field(None, description="Number of learned positions.")
    rope_theta: Positive = Field(10000.0, description="Base of the rotary frequencies.")
    rope_scaling: RopeScaling | None = Field(None, description="Stretching of rotary positions; null is none.")
    tie_embeddings: bool = Field(False, description="Whether the output layer is the embedding table.")
    bias: bool = Field(False, description="Whether all linear layers but the output layer have biases.")
    qkv_bias: bool = Field(False, description="Whether queries, keys and values have biases though others have none.")
    qk_norm: bool = Field(False, description="Whether queries and keys are normalised per head.")
    dropout: Share = Field(
        0.0, description="Share dropped of the embedding and of what each block adds to the residual stream."
    )
    attention_dropout: Share = Field(
        0.0, description="Share of the attention probabilities that is dropped; takes the explicit kernel."
    )
    attention_impl: AttentionImpl = Field(
        "auto",
        description="Kernel of attention: auto and sdpa take torch's, explicit forms the probabilities, flash and te "
        "need a GPU and their packages.",
    )
    compile: bool = Field(False, description="Whether torch.compile compiles each block.")

    @property
    def num_kv_heads(self) -> int:
        return self.heads if self.kv_heads is None else self.kv_heads

    @property
    def width(self) -> int:
        """Width of a head."""
        return self.hidden // self.heads if self.head_dim is None else self.head_dim

    @property
    def layer_matrices(self) -> int:
        """Elements of the matrices of one layer, each of which multiplies every token once."""
        attention = 2 * self.hidden * self.width * (self.heads + self.num_kv_heads)
        return attention + (3 if self.activation in ("swiglu", "geglu") else 2) * self.hidden * self.ffn

    @property
    def output_matrix(self) -> int:
        """Elements of the output layer's matrix."""
        return self.hidden * self.vocab
