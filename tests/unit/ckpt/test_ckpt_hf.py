"""Which tensors are which, and what ``config.json`` and the ``model`` section say of each other, for every family."""

import json

import numpy as np
import pytest
from transformers import AutoConfig, GPT2Config, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from rayformer.ckpt.hf.config import family_of, hf_config, longest_sequence, model_section
from rayformer.ckpt.hf.mapping import hf_tensors
from rayformer.config.model import ModelConfig
from rayformer.errors import CheckpointError

SMALL = {
    "vocab_size": 131,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 96,
    "rms_norm_eps": 3.7e-4,
    "tie_word_embeddings": False,
}
SMALL_GPT2 = {"vocab_size": 131, "n_embd": 48, "n_layer": 3, "n_head": 6, "n_positions": 64}
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
TIED = {"tie_word_embeddings": True}
LINEAR = {"rope_type": "linear", "rope_theta": 523.0, "factor": 3.0}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 5.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
CONFIGS = {
    "llama": LlamaConfig(**SMALL),
    "llama, tied": LlamaConfig(**SMALL | TIED),
    "llama, biases": LlamaConfig(**SMALL, attention_bias=True, mlp_bias=True),
    "llama, one key per query": LlamaConfig(**SMALL | {"num_key_value_heads": 6}, head_dim=10),
    "llama, linear rope": LlamaConfig(**SMALL, rope_parameters=LINEAR),
    "llama, llama3 rope": LlamaConfig(**SMALL, rope_parameters=LLAMA3),
    "mistral": MistralConfig(**SMALL, sliding_window=None),
    "mistral, with a window": MistralConfig(**SMALL, sliding_window=32, head_dim=12),
    "qwen2": Qwen2Config(**SMALL),
    "qwen2, tied": Qwen2Config(**SMALL | TIED),
    "qwen3": Qwen3Config(**SMALL, head_dim=14),
    "qwen3, tied": Qwen3Config(**SMALL | TIED, head_dim=8, bos_token_id=3),
    "gpt2": GPT2Config(**SMALL_GPT2, **NO_DROPOUT),
    "gpt2, untied": GPT2Config(**SMALL_GPT2, **NO_DROPOUT, n_inner=80, tie_word_embeddings=False),
    "gpt2, gelu": GPT2Config(**SMALL_GPT2, **NO_DROPOUT, activation_function="gelu"),
    "gpt2, another name": GPT2Config(**SMALL_GPT2, **NO_DROPOUT, activation_function="gelu_pytorch_tanh"),
}


def saved(config, folder):
    """``config.json`` as transformers writes it."""
    config.save_pretrained(folder)
    return json.loads((folder / "config.json").read_text())


def model_of(config):
    return ModelConfig.model_validate(model_section(config, where="config.json"))


@pytest.mark.parametrize("name", CONFIGS)
def test_every_element_of_theirs_and_of_ours_has_one_place(name, tmp_path):
    config = saved(CONFIGS[name], tmp_path)
    theirs, ours = {}, {}
    for tensor in hf_tensors(model_of(config), family_of(config, where="")):
        assert tensor.name not in theirs
        theirs[tensor.name] = np.zeros(tensor.shape, int)
        for part in tensor.parts:
            shape = part.ours_box.shape[::-1] if part.is_transposed else part.ours_box.shape
            assert part.box.shape == shape
            theirs[tensor.name][tuple(map(slice, part.box.lo, part.box.hi))] += 1
            ours.setdefault(part.ours, []).append(part.ours_box)
    assert all((count == 1).all() for count in theirs.values())
    for boxes in ours.values():
        count = np.zeros(np.max([box.hi for box in boxes], axis=0), int)
        for box in boxes:
            count[tuple(map(slice, box.lo, box.hi))] += 1
        assert (count == 1).all()


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_comes_back_as_it_was(name, tmp_path):
    config = saved(CONFIGS[name], tmp_path)
    back = hf_config(model_of(config), dtype="float32", seq=16, base=config)
    assert model_section(back, where="") == model_section(config, where="")
    told = AutoConfig.for_model(**back).to_dict() | {"dtype": None, "architectures": None}
    assert told == CONFIGS[name].to_dict() | {"dtype": None, "architectures": None}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_made_of_a_section_alone_is_of_the_same_model(name, tmp_path):
    config = saved(CONFIGS[name], tmp_path)
    alone = hf_config(model_of(config), dtype="bfloat16", seq=96, base={})
    assert model_section(alone, where="") == model_section(config, where="")
    assert AutoConfig.for_model(**alone).vocab_size == 131 and alone["dtype"] == "bfloat16"


def test_a_width_that_heads_do_not_divide_is_a_mistral():
    model = ModelConfig(layers=1, hidden=50, heads=4, head_dim=10, ffn=8, vocab=9)
    config = hf_config(model, dtype="float32", seq=16, base={})
    assert config["model_type"] == "mistral" and AutoConfig.for_model(**config).head_dim == 10


OLD = {**SMALL, "model_type": "llama", "rope_theta": 523.0}


@pytest.mark.parametrize(
    ("rope", "expected"),
    [
        ({}, None),
        ({"rope_scaling": None}, None),
        ({"rope_scaling": {"type": "linear", "factor": 3}}, {"kind": "linear", "factor": 3.0}),
        ({"rope_scaling": {key: value for key, value in LLAMA3.items() if key != "rope_theta"}}, {"kind": "llama3"}),
    ],
    ids=str,
)
def test_old_files_have_their_rope_at_the_top(rope, expected):
    section = model_section(OLD | rope, where="")
    assert section["rope_theta"] == 523.0
    assert expected is None or expected.items() <= section["rope_scaling"].items()
    assert expected is not None or section["rope_scaling"] is None
    theirs = AutoConfig.for_model(**OLD | rope).rope_parameters
    assert theirs["rope_theta"] == 523.0 and theirs["rope_type"] == (expected or {"kind": "default"})["kind"]


def test_what_a_file_leaves_out_is_what_transformers_takes():
    plain = {key: value for key, value in SMALL.items() if key not in ("num_key_value_heads", "tie_word_embeddings")}
    section = model_section({"model_type": "qwen3", **plain}, where="")
    theirs = Qwen3Config(**plain, num_key_value_heads=6)
    assert (section["head_dim"], section["rope_theta"]) == (theirs.head_dim, theirs.rope_parameters["rope_theta"])
    assert section["tie_embeddings"] == theirs.tie_word_embeddings
    section = model_section({"model_type": "gpt2", **SMALL_GPT2, "layer_norm_epsilon": 1e-5}, where="")
    assert section["ffn"] == 192 and section["activation"] == "gelu_tanh" and section["tie_embeddings"]


@pytest.mark.parametrize(
    ("family", "options", "told"),
    [
        ("gemma2", {}, "model_type is 'gemma2'; the families are llama, mistral, qwen2, qwen3, gpt2"),
        ("mixtral", {"num_local_experts": 8}, "model_type is 'mixtral'"),
        (None, {}, "model_type is None"),
        ("llama", {"rope_scaling": {"type": "yarn", "factor": 2.0}}, "rope_type is 'yarn'"),
        ("llama", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_type is 'dynamic'"),
        ("qwen3", {"rope_parameters": {"rope_type": "longrope", "factor": 2.0}}, "rope_type is 'longrope'"),
        ("llama", {"rope_parameters": LINEAR | {"attention_factor": 1.2}}, "attention_factor of the rotary embedding"),
        ("llama", {"rope_parameters": {"full_attention": LINEAR}}, "full_attention of the rotary embedding"),
        ("llama", {"rope_parameters": {"rope_type": "linear"}}, "it has no factor"),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        ("llama", {"rope_parameters": LINEAR | {"partial_rotary_factor": 0.5}}, "partial_rotary_factor is 0.5"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act is 'gelu', and only 'silu'"),
        ("llama", {"attention_bias": True}, "mlp_bias is False, and only True, which attention_bias is"),
        ("llama", {"mlp_bias": True}, "mlp_bias is True"),
        ("llama", {"quantization_config": {"bits": 4}}, "quantization_config is"),
        ("llama", {"vocab_size": "many"}, "vocab: Input should be a valid integer"),
        ("llama", {"num_attention_heads": 0}, "can't be read"),
        ("qwen2", {"use_sliding_window": True}, "use_sliding_window is True"),
        ("qwen3", {"use_sliding_window": True}, "use_sliding_window is True"),
        ("qwen3", {"attention_bias": True}, "attention_bias is True"),
        ("qwen3", {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types is"),
        ("gpt2", {"activation_function": "swish"}, "activation_function is 'swish'"),
        ("gpt2", {"scale_attn_weights": False}, "scale_attn_weights is False"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx is True"),
        ("gpt2", {"add_cross_attention": True}, "add_cross_attention is True"),
    ],
    ids=str,
)
def test_what_would_be_another_model_is_refused_by_name(family, options, told):
    shape = {**SMALL_GPT2, "layer_norm_epsilon": 1e-5} if family == "gpt2" else SMALL
    with pytest.raises(CheckpointError, match=r"^x/config.json: ") as error:
        model_section({**shape, "model_type": family, **options}, where="x/config.json")
    assert told in str(error.value)


@pytest.mark.parametrize("key", ["hidden_size", "intermediate_size", "num_attention_heads", "rms_norm_eps"])
def test_a_key_that_is_missing_is_named(key):
    config = {name: value for name, value in SMALL.items() if name != key}
    with pytest.raises(CheckpointError, match=f"it has no {key}"):
        model_section({"model_type": "llama", **config}, where="")


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"norm": "layernorm"}, "model.norm is 'layernorm'"),
        ({"activation": "geglu"}, "model.activation is 'geglu'"),
        ({"position": "none"}, "model.position is 'none'"),
        ({"qk_norm": True, "bias": True}, "model.bias is True, and qwen3"),
        ({"qkv_bias": True, "head_dim": 7}, "model.head_dim is 7, and qwen2"),
        ({"position": "learned", "max_positions": 9}, "model.norm is 'rmsnorm', and gpt2"),
    ],
    ids=str,
)
def test_a_model_of_no_family_is_refused_by_name(options, told):
    model = ModelConfig(**{"layers": 1, "hidden": 16, "heads": 2, "ffn": 8, "vocab": 9, **options})
    with pytest.raises(CheckpointError) as error:
        hf_config(model, dtype="float32", seq=16, base={})
    assert told in str(error.value)


@pytest.mark.parametrize(("base", "seq", "longest"), [(96, None, 96), (96, 16, 96), (96, 128, 128), (None, 16, 16)])
def test_the_longest_sequence_is_that_of_either(base, seq, longest):
    model = model_of({"model_type": "llama", **SMALL})
    config = hf_config(model, dtype="float32", seq=seq, base={"max_position_embeddings": base} if base else {})
    assert config["max_position_embeddings"] == longest


def test_only_a_mistral_has_a_window():
    assert longest_sequence({"model_type": "mistral"}) == MistralConfig().sliding_window
    assert longest_sequence({"model_type": "mistral", "sliding_window": None}) is None
    assert longest_sequence({"model_type": "qwen2", "sliding_window": 4096, "use_sliding_window": False}) is None
