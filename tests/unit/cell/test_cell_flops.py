"""Operations per token: counted for the model as it is, not for a shape that formulas assume."""

import pytest

from rayformer.cell.flops import flops_per_token
from rayformer.config.model import CustomModelConfig, ModelConfig

F_M1 = {"layers": 4, "hidden": 32, "heads": 4, "kv_heads": 2, "ffn": 48, "vocab": 257}
LLAMA_3_8B = {"layers": 32, "hidden": 4096, "heads": 32, "kv_heads": 8, "ffn": 14336, "vocab": 128256}
LLAMA_2_7B = {"layers": 32, "hidden": 4096, "heads": 32, "ffn": 11008, "vocab": 32000}
GPT_2 = {"layers": 12, "hidden": 768, "heads": 12, "ffn": 3072, "vocab": 50257, "activation": "gelu_tanh", "bias": True}


def test_grouped_queries_and_gates_are_counted_as_they_are():  # B113
    assert flops_per_token(ModelConfig(**F_M1), 16) == 258_240 == 3 * 86_080
    assumed = {**F_M1, "kv_heads": 4, "ffn": 128, "activation": "gelu"}  # what ffn = 4 hidden and no groups would give
    assert flops_per_token(ModelConfig(**assumed), 16) == 368_832


@pytest.mark.parametrize(
    ("model", "seq", "parameters", "outside"),
    [
        (LLAMA_2_7B, 4096, 6_738_415_616, 32000 * 4096 + 65 * 4096),
        (LLAMA_3_8B, 8192, 8_030_261_248, 128256 * 4096 + 65 * 4096),
        # Positions, biases and norms multiply nothing; the output layer, which is the token table, does.
        (GPT_2, 1024, 124_439_808, (1024 + 12 * (9 + 4) + 2) * 768),
    ],
    ids=["llama-2-7b", "llama-3-8b", "gpt-2"],
)
def test_published_models_multiply_by_every_matrix_once(model, seq, parameters, outside):
    """6 operations for each parameter that is in a product, and full attention: 12 layers seq hidden."""
    attention = 12 * model["layers"] * seq * model["hidden"]
    assert flops_per_token(ModelConfig(**model), seq) == 6 * (parameters - outside) + attention


def test_tied_embeddings_and_a_longer_sequence_cost_what_they_do():
    one = ModelConfig(**F_M1)
    assert flops_per_token(ModelConfig(**F_M1, tie_embeddings=True), 16) == flops_per_token(one, 16)
    assert (
        flops_per_token(one, 32) - flops_per_token(one, 16) == 3 * 4 * 4 * 16 * 32
    )  # 3 x layers x 4 x 16 more x hidden
    wide = ModelConfig(**{**F_M1, "head_dim": 16})  # twice as wide as hidden / heads
    assert flops_per_token(wide, 16) - flops_per_token(one, 16) == 3 * 4 * (2 * (64 * 32 + 32 * 32) + 4 * 16 * 32)


def test_a_model_of_ones_own_has_no_count():
    assert flops_per_token(CustomModelConfig(factory="a:b", hidden=32, vocab=257), 16) is None
