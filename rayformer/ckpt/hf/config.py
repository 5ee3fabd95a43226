"""``config.json`` and the ``model`` section of a job: two ways to say the same of a model of one of the families.

Whatever one side says that the other can't is refused, by name. The keys are those of transformers 5; older files,
which have rope_theta and rope_scaling at the top, are read too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal, get_args

from pydantic import ValidationError

from rayformer.config.model import ModelConfig
from rayformer.errors import CheckpointError

Family = Literal["llama", "mistral", "qwen2", "qwen3", "gpt2"]
FAMILIES: tuple[Family, ...] = get_args(Family)
_CLASSES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gpt2": "GPT2LMHeadModel",
}
_GPT2_ACTIVATIONS = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu", "relu": "relu"}
# What a run may choose anew for the same weights.
_FREE = {"dropout", "attention_dropout", "attention_impl", "compile"}
_OLD_KEYS = ("torch_dtype", "rope_theta", "rope_scaling")
_SCALINGS = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}


def model_section(config: Mapping[str, Any], *, where: str) -> dict[str, Any]:
    """The ``model`` section of the model that ``config`` describes. Raises CheckpointError for what we have not."""
    family = family_of(config, where=where)
    for key, value, wanted in _unsupported(config, family):
        raise CheckpointError(f"{where}: {key} is {value!r}, and only {wanted} is possible here")
    try:
        section = _gpt2_section(config) if family == "gpt2" else _rope_section(config, family)
        return ModelConfig.model_validate(section).model_dump(by_alias=True)
    except KeyError as error:
        raise CheckpointError(f"{where}: it has no {error.args[0]}, without which the model is not known") from None
    except ValidationError as error:
        found = error.errors()[0]
        raise CheckpointError(f"{where}: its model can't be read: {found['loc'][0]}: {found['msg']}") from None
    except (TypeError, ValueError, ZeroDivisionError) as error:
        raise CheckpointError(f"{where}: its model can't be read: {error}") from None


def longest_sequence(config: Mapping[str, Any]) -> int | None:
    """Up to how many tokens every token sees all before it: the sliding window of Mistral; None is no limit."""
    if config.get("model_type") != "mistral":
        return None
    window = config.get("sliding_window", 4096)
    return None if window is None else int(window)


def family_of(config: Mapping[str, Any], *, where: str) -> Family:
    """Which of the families a ``config`` is of."""
    found = config.get("model_type")
    if found not in FAMILIES:
        raise CheckpointError(f"{where}: model_type is {found!r}; the families are {', '.join(FAMILIES)}")
    return FAMILIES[FAMILIES.index(found)]


def section_differences(found: Mapping[str, Any], asked: Mapping[str, Any]) -> Iterator[tuple[str, object, object]]:
    """Keys in which two ``model`` sections are of different models, with both values."""
    found, asked = _plain(found), _plain(asked)
    for key in asked | found:
        if key not in _FREE and found.get(key) != asked.get(key):
            yield key, found.get(key), asked.get(key)


def hf_config(model: ModelConfig, *, dtype: str, seq: int | None, base: Mapping[str, Any]) -> dict[str, Any]:
    """The ``config.json`` of ``model``, its weights in ``dtype``; it was trained on sequences of ``seq``, None if not.

    What ``model`` does not say (ids of special tokens, a longer longest sequence) is taken from ``base``, the config
    that it was imported with, empty if it was not. Raises CheckpointError if the model is of no family.
    """
    family = _family(model, base.get("model_type"))
    if family == "gpt2":
        own = _gpt2_config(model, base.get("activation_function"))
    else:
        own = _rope_config(model, family, base)
        own |= {"max_position_embeddings": max(base.get("max_position_embeddings", 0), seq or 0) or 2048}
    defaults = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None, "use_cache": True}
    kept = {key: value for key, value in base.items() if key not in _OLD_KEYS}
    return {
        **defaults,
        **(kept if base.get("model_type") == family else {}),
        **own,
        "architectures": [_CLASSES[family]],
        "model_type": family,
        "vocab_size": model.vocab,
        "tie_word_embeddings": model.tie_embeddings,
        "dtype": dtype,
    }


def _plain(section: Mapping[str, Any]) -> dict[str, Any]:
    """A ``model`` section with what it leaves open, so that two ways to say the same are equal."""
    if "factory" in section:
        return dict(section)
    heads, hidden = section["heads"], section["hidden"]
    bias = section.get("bias") or section.get("qkv_bias")
    open_keys = {"kv_heads": heads, "head_dim": hidden // heads, "qkv_bias": bias}
    return {**section, **{key: section.get(key) or value for key, value in open_keys.items()}}


def _family(model: ModelConfig, wanted: object) -> Family:
    """The family that ``model`` is of; ``wanted`` decides where it could be two."""
    even = model.hidden // model.heads
    found = {**model.model_dump(), "kv_heads": model.num_kv_heads, "head_dim": model.width}
    if model.position == "learned":
        needed = {"norm": "layernorm", "bias": True, "qk_norm": False, "kv_heads": model.heads, "head_dim": even}
        if model.activation not in _GPT2_ACTIVATIONS.values():
            needed["activation"] = "gelu_tanh"
        _refuse_differences(found, needed, "gpt2, the family with learned positions,")
        return "gpt2"
    needed = {"position": "rope", "norm": "rmsnorm", "activation": "swiglu"}
    _refuse_differences(found, needed, "llama, mistral, qwen2 or qwen3")
    if model.qk_norm:
        _refuse_differences(found, {"bias": False, "qkv_bias": False}, "qwen3")
        return "qwen3"
    if model.bias:
        return "llama"
    if model.qkv_bias:
        _refuse_differences(found, {"head_dim": even}, "qwen2")
        return "qwen2"
    if model.hidden % model.heads:  # transformers refuses that in a Llama whatever its head_dim
        return "mistral"
    return "mistral" if wanted == "mistral" else "llama"


def _refuse_differences(found: Mapping[str, object], needed: Mapping[str, object], family: str) -> None:
    for key, value in needed.items():
        if found[key] != value:
            raise CheckpointError(
                f"model.{key} is {found[key]!r}, and {family} has {value!r}: transformers has no such model, so that"
                " it can't be exported"
            )


def _rope_section(config: Mapping[str, Any], family: Family) -> dict[str, Any]:
    heads, rope = config["num_attention_heads"], _rope(config)
    width = config.get("head_dim") or (128 if family == "qwen3" else config["hidden_size"] // heads)
    bias = {"bias": config.get("attention_bias", False)} if family == "llama" else {"qkv_bias": family == "qwen2"}
    return {
        "layers": config["num_hidden_layers"],
        "hidden": config["hidden_size"],
        "heads": heads,
        "kv_heads": config.get("num_key_value_heads") or heads,
        "head_dim": width,
        "ffn": config["intermediate_size"],
        "vocab": config["vocab_size"],
        "norm": "rmsnorm",
        "norm_eps": float(config["rms_norm_eps"]),
        "activation": "swiglu",
        "position": "rope",
        "rope_theta": float(rope["rope_theta"]),
        "rope_scaling": _rope_scaling(rope),
        "tie_embeddings": config.get("tie_word_embeddings", False),
        "qk_norm": family == "qwen3",
        **bias,
    }


def _rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """The rotary options, wherever a file has them; as in transformers, rope_scaling stands for all of them."""
    rope = dict(config.get("rope_scaling") or config.get("rope_parameters") or {})
    kind = rope.pop("type", "default")
    return {"rope_type": kind, "rope_theta": config.get("rope_theta", 10000.0), **rope}


def _rope_scaling(rope: Mapping[str, Any]) -> dict[str, Any] | None:
    kind = rope["rope_type"]
    if kind == "default":
        return None
    scaling = {"kind": kind, "factor": float(rope["factor"])}
    if kind == "llama3":
        scaling |= {key: float(rope[key]) for key in ("low_freq_factor", "high_freq_factor")}
        scaling["original_positions"] = rope["original_max_position_embeddings"]
    return scaling


def _gpt2_section(config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "layers": config["n_layer"],
        "hidden": config["n_embd"],
        "heads": config["n_head"],
        "ffn": config.get("n_inner") or 4 * config["n_embd"],
        "vocab": config["vocab_size"],
        "norm": "layernorm",
        "norm_eps": float(config["layer_norm_epsilon"]),
        "activation": _GPT2_ACTIVATIONS[config.get("activation_function", "gelu_new")],
        "position": "learned",
        "max_positions": config["n_positions"],
        "tie_embeddings": config.get("tie_word_embeddings", True),
        "bias": True,
    }


def _unsupported(config: Mapping[str, Any], family: Family) -> Iterator[tuple[str, object, str]]:
    """Keys whose value means a model that we have not: what was found, and what is possible."""
    absent: dict[str, object] = {"quantization_config": None}
    match family:
        case "gpt2":
            absent |= {"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False}
            absent |= {"add_cross_attention": False}
        case "llama":
            absent |= {"hidden_act": "silu"}
        case "mistral":
            absent |= {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False}
        case "qwen2":
            absent |= {"hidden_act": "silu", "use_sliding_window": False}
        case "qwen3":
            absent |= {"hidden_act": "silu", "use_sliding_window": False, "attention_bias": False}
    for key, value in absent.items():
        if config.get(key, value) != value:
            yield key, config[key], repr(value)
    activation = config.get("activation_function", "gelu_new")
    if family == "gpt2" and activation not in _GPT2_ACTIVATIONS:
        yield "activation_function", activation, " or ".join(_GPT2_ACTIVATIONS)
    biases = config.get("mlp_bias", False), config.get("attention_bias", False)
    if family == "llama" and biases[0] != biases[1]:
        yield "mlp_bias", biases[0], f"{biases[1]}, which attention_bias is,"
    if any(kind != "full_attention" for kind in config.get("layer_types") or ()):
        yield "layer_types", config["layer_types"], "full_attention in every layer"
    if family != "gpt2":
        yield from _unsupported_rope(config)


def _unsupported_rope(config: Mapping[str, Any]) -> Iterator[tuple[str, object, str]]:
    rope = _rope(config)
    kind, part = rope.pop("rope_type"), rope.pop("partial_rotary_factor", config.get("partial_rotary_factor"))
    if kind not in _SCALINGS:
        yield "rope_type", kind, ", ".join(_SCALINGS)
        return
    if part not in (None, 1):
        yield "partial_rotary_factor", part, "1.0"
    for key, value in rope.items():
        if key not in ("rope_theta", *_SCALINGS[kind]) and value is not None:
            yield f"{key} of the rotary embedding", value, " and ".join(("rope_theta", *_SCALINGS[kind]))


def _rope_config(model: ModelConfig, family: Family, base: Mapping[str, Any]) -> dict[str, Any]:
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": model.rope_theta}
    if model.rope_scaling is not None:
        rope |= {"rope_type": model.rope_scaling.kind, "factor": model.rope_scaling.factor}
        if model.rope_scaling.kind == "llama3":
            rope |= {
                "low_freq_factor": model.rope_scaling.low_freq_factor,
                "high_freq_factor": model.rope_scaling.high_freq_factor,
                "original_max_position_embeddings": model.rope_scaling.original_positions,
            }
    config: dict[str, Any] = {
        "hidden_size": model.hidden,
        "intermediate_size": model.ffn,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.num_kv_heads,
        "hidden_act": "silu",
        "rms_norm_eps": model.norm_eps,
        "rope_parameters": rope,
        "attention_dropout": model.attention_dropout,
    }
    if family != "qwen2":
        config["head_dim"] = model.width
    if family == "llama":
        config |= {"attention_bias": model.bias, "mlp_bias": model.bias}
    elif family == "mistral":
        config["sliding_window"] = longest_sequence(base)
    elif family == "qwen3":
        config |= {"attention_bias": False, "use_sliding_window": False, "sliding_window": None}
    else:
        config |= {"use_sliding_window": False, "sliding_window": None}
    return config


def _gpt2_config(model: ModelConfig, wanted: object) -> dict[str, Any]:
    """``wanted`` is the activation's name where it has two."""
    names = {ours: theirs for theirs, ours in reversed(_GPT2_ACTIVATIONS.items())}
    names |= {ours: theirs for theirs, ours in _GPT2_ACTIVATIONS.items() if theirs == wanted}
    return {
        "n_embd": model.hidden,
        "n_inner": None if model.ffn == 4 * model.hidden else model.ffn,
        "n_layer": model.layers,
        "n_positions": model.max_positions,
        "n_head": model.heads,
        "activation_function": names[model.activation],
        "layer_norm_epsilon": model.norm_eps,
        "embd_pdrop": model.dropout,
        "resid_pdrop": model.dropout,
        "attn_pdrop": model.attention_dropout,
    }
