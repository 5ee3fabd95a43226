"""Hugging Face's model of a `model` section beside ours: the same numbers under both sets of names."""

import numpy as np
import torch
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

_LAYER = {
    "attention_norm": ["input_layernorm"],
    "attention.qkv": ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
    "attention.q_norm": ["self_attn.q_norm"],
    "attention.k_norm": ["self_attn.k_norm"],
    "attention.out": ["self_attn.o_proj"],
    "mlp_norm": ["post_attention_layernorm"],
    "mlp.gate_up": ["mlp.gate_proj", "mlp.up_proj"],
    "mlp.down": ["mlp.down_proj"],
}
_ENDS = {"embedding": ["model.embed_tokens"], "output.norm": ["model.norm"], "output.linear": ["lm_head"]}
_GPT2_LAYER = {
    "attention_norm": ["ln_1"],
    "attention.qkv": ["attn.c_attn"],
    "attention.out": ["attn.c_proj"],
    "mlp_norm": ["ln_2"],
    "mlp.up": ["mlp.c_fc"],
    "mlp.down": ["mlp.c_proj"],
}
_GPT2_ENDS = {"embedding": ["transformer.wte"], "position": ["transformer.wpe"], "output.norm": ["transformer.ln_f"]}


def hf_model(section, dtype=torch.float32):
    """The Hugging Face model of a `model` section, with its plain attention and without dropout."""
    model = AutoModelForCausalLM.from_config(_config(section), attn_implementation="eager", dtype=dtype)
    assert all(parameter.dtype == dtype for parameter in model.parameters())
    return model.eval()


def _config(section):
    eps, tied = section.get("norm_eps", 1e-5), section.get("tie_embeddings", False)
    if section.get("position") == "learned":
        assert section["activation"] == "gelu_tanh" and section["norm"] == "layernorm" and section["bias"]
        return GPT2Config(
            vocab_size=section["vocab"],
            n_embd=section["hidden"],
            n_inner=section["ffn"],
            n_layer=section["layers"],
            n_head=section["heads"],
            n_positions=section["max_positions"],
            layer_norm_epsilon=eps,
            tie_word_embeddings=tied,
            bos_token_id=None,
            eos_token_id=None,
        )
    rope = {"rope_type": "default", "rope_theta": section.get("rope_theta", 10000.0)}
    if scaling := section.get("rope_scaling"):
        rope |= {"rope_type": scaling["kind"], "factor": scaling["factor"]}
        if scaling["kind"] == "llama3":
            rope |= {key: scaling[key] for key in ("low_freq_factor", "high_freq_factor")}
            rope["original_max_position_embeddings"] = scaling["original_positions"]
    kind, options = LlamaConfig, {"attention_bias": False, "mlp_bias": False}
    if section.get("qk_norm"):
        kind, options = Qwen3Config, {"attention_bias": False, "head_dim": section["head_dim"]}
    elif section.get("qkv_bias"):
        kind, options = Qwen2Config, {}
    elif "head_dim" in section:
        kind, options = MistralConfig, {"sliding_window": None, "head_dim": section["head_dim"]}
    return kind(
        vocab_size=section["vocab"],
        hidden_size=section["hidden"],
        intermediate_size=section["ffn"],
        num_hidden_layers=section["layers"],
        num_attention_heads=section["heads"],
        num_key_value_heads=section["kv_heads"],
        rms_norm_eps=eps,
        rope_parameters=rope,
        max_position_embeddings=4096,  # used by no formula of these models
        tie_word_embeddings=tied,
        **options,
    )


def to_ours(tensors, section):
    """Arrays by our names from arrays by Hugging Face's; qkv has the rows [queries | key | value] per kv head."""
    gpt2 = section.get("position") == "learned"
    layer, ends, stem = (_GPT2_LAYER, _GPT2_ENDS, "transformer.h") if gpt2 else (_LAYER, _ENDS, "model.layers")
    names = dict(ends)
    for i in range(section["layers"]):
        names |= {f"layers.{i}.{ours}": [f"{stem}.{i}.{name}" for name in theirs] for ours, theirs in layer.items()}
    found = {}
    for ours, theirs in names.items():
        for kind in ("weight", "bias"):
            if f"{theirs[0]}.{kind}" in tensors:
                found[f"{ours}.{kind}"] = _joined([tensors[f"{name}.{kind}"] for name in theirs], ours, section)
    assert sum(value.size for value in found.values()) == sum(value.size for value in tensors.values())
    return found


def _joined(parts, name, section):
    """Our tensor from Hugging Face's; GPT-2 keeps matrices [in, out], and queries, keys and values in one."""
    kv_heads = section.get("kv_heads") or section["heads"]
    if section.get("position") == "learned" and name.startswith("layers."):
        parts = [part.T for part in parts]
    if not name.endswith(".qkv"):
        return np.concatenate(parts)
    if len(parts) == 1:
        parts = np.split(parts[0], 3)
    groups = np.concatenate([part.reshape(kv_heads, -1, *part.shape[1:]) for part in parts], axis=1)
    return groups.reshape(-1, *groups.shape[2:])


def to_hugging_face(ours, section):
    """The inverse of `to_ours`, by asking where each element went."""
    shapes = {name: p.shape for name, p in hf_model(section).named_parameters()}
    starts = dict(zip(shapes, np.cumsum([0, *(shape.numel() for shape in shapes.values())])))
    numbered = {name: starts[name] + np.arange(shape.numel()).reshape(shape) for name, shape in shapes.items()}
    flat = np.empty(sum(shape.numel() for shape in shapes.values()), np.float32)
    places = to_ours(numbered, section)
    assert places.keys() == ours.keys()
    for name, place in places.items():
        flat[place] = ours[name]
    return {name: flat[place] for name, place in numbered.items()}


def load_weights(model, tensors):
    """Put arrays by Hugging Face names into the model; every parameter must be there, a tied one once."""
    parameters = dict(model.named_parameters())
    assert parameters.keys() == tensors.keys()
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(torch.from_numpy(tensors[name]))


def random_weights(section, seed=0):
    """Random numbers for every parameter of the Hugging Face model, also for norms and biases."""
    random = np.random.default_rng(seed)

    def values(name, shape):
        around = float(len(shape) == 1 and name.endswith("weight"))  # the weight of a norm
        return (random.standard_normal(shape) * 0.15 + around).astype(np.float32)

    return {name: values(name, p.shape) for name, p in hf_model(section).named_parameters()}


def parameters_of(model):
    return {name: parameter.detach().float().numpy().copy() for name, parameter in model.named_parameters()}


def gradients_of(model):
    return {name: parameter.grad.float().numpy().copy() for name, parameter in model.named_parameters()}


def token_losses(model, tokens, labels):
    """The loss of every token [B, S] in float32, 0 where a label is -1."""
    logits = model(input_ids=tokens).logits.float()
    flat = torch.nn.functional.cross_entropy(logits.flatten(0, -2), labels.flatten(), ignore_index=-1, reduction="none")
    return flat.view(labels.shape)
