"""Which part of which of our tensors is which part of which of Hugging Face's. Needs no file and no torch.

Our queries, keys and values are one matrix, row groups [queries | key | value] per key-value head; gate and up are one,
half and half. GPT-2 keeps matrices as [in, out], and queries, keys and values in one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rayformer.ckpt.hf.config import Family
from rayformer.config.model import ModelConfig
from rayformer.shards import Box, whole


@dataclass(frozen=True, kw_only=True)
class Part:
    """``box`` of a tensor of theirs is ``ours_box`` of ``ours``, transposed if it says so."""

    box: Box
    ours: str
    ours_box: Box
    is_transposed: bool = False


@dataclass(frozen=True, kw_only=True)
class HFTensor:
    """One tensor of theirs, and the parts that it is made of."""

    name: str
    shape: tuple[int, ...]
    parts: tuple[Part, ...]


def hf_tensors(model: ModelConfig, family: Family) -> list[HFTensor]:
    """All tensors of a model, in the order in which a file has them: from the embedding to the head."""
    return list(_gpt2(model) if family == "gpt2" else _rope(model))


def _rope(m: ModelConfig) -> Iterator[HFTensor]:
    hidden = m.hidden
    yield _same("model.embed_tokens.weight", "embedding.weight", (m.vocab, hidden))
    for i in range(m.layers):
        theirs, ours = f"model.layers.{i}", f"layers.{i}"
        yield _same(f"{theirs}.input_layernorm.weight", f"{ours}.attention_norm.weight", (hidden,))
        for which in ("q", "k", "v"):
            yield _head_rows(
                m, f"{theirs}.self_attn.{which}_proj.weight", f"{ours}.attention.qkv.weight", which, (hidden,)
            )
            if m.bias or m.qkv_bias:
                yield _head_rows(m, f"{theirs}.self_attn.{which}_proj.bias", f"{ours}.attention.qkv.bias", which, ())
            if m.qk_norm and which != "v":
                name = f"{theirs}.self_attn.{which}_norm.weight"
                yield _same(name, f"{ours}.attention.{which}_norm.weight", (m.width,))
        yield from _linear(f"{theirs}.self_attn.o_proj", f"{ours}.attention.out", (hidden, m.heads * m.width), m.bias)
        yield _same(f"{theirs}.post_attention_layernorm.weight", f"{ours}.mlp_norm.weight", (hidden,))
        for start, which in ((0, "gate"), (m.ffn, "up")):
            name = f"{theirs}.mlp.{which}_proj"
            yield _rows(f"{name}.weight", f"{ours}.mlp.gate_up.weight", start, (m.ffn, hidden))
            if m.bias:
                yield _rows(f"{name}.bias", f"{ours}.mlp.gate_up.bias", start, (m.ffn,))
        yield from _linear(f"{theirs}.mlp.down_proj", f"{ours}.mlp.down", (hidden, m.ffn), m.bias)
    yield _same("model.norm.weight", "output.norm.weight", (hidden,))
    if not m.tie_embeddings:
        yield _same("lm_head.weight", "output.linear.weight", (m.vocab, hidden))


def _gpt2(m: ModelConfig) -> Iterator[HFTensor]:
    hidden = m.hidden
    assert m.max_positions is not None
    yield _same("transformer.wte.weight", "embedding.weight", (m.vocab, hidden))
    yield _same("transformer.wpe.weight", "position.weight", (m.max_positions, hidden))
    for i in range(m.layers):
        theirs, ours = f"transformer.h.{i}", f"layers.{i}"
        yield from _layernorm(f"{theirs}.ln_1", f"{ours}.attention_norm", hidden)
        yield _fused(m, f"{theirs}.attn.c_attn.weight", f"{ours}.attention.qkv.weight", (hidden,))
        yield _fused(m, f"{theirs}.attn.c_attn.bias", f"{ours}.attention.qkv.bias", ())
        yield from _conv(f"{theirs}.attn.c_proj", f"{ours}.attention.out", (hidden, hidden))
        yield from _layernorm(f"{theirs}.ln_2", f"{ours}.mlp_norm", hidden)
        yield from _conv(f"{theirs}.mlp.c_fc", f"{ours}.mlp.up", (m.ffn, hidden))
        yield from _conv(f"{theirs}.mlp.c_proj", f"{ours}.mlp.down", (hidden, m.ffn))
    yield from _layernorm("transformer.ln_f", "output.norm", hidden)
    if not m.tie_embeddings:
        yield _same("lm_head.weight", "output.linear.weight", (m.vocab, hidden))


def _same(name: str, ours: str, shape: tuple[int, ...]) -> HFTensor:
    return HFTensor(name=name, shape=shape, parts=(Part(box=whole(shape), ours=ours, ours_box=whole(shape)),))


def _linear(name: str, ours: str, shape: tuple[int, int], bias: bool) -> Iterator[HFTensor]:
    yield _same(f"{name}.weight", f"{ours}.weight", shape)
    if bias:
        yield _same(f"{name}.bias", f"{ours}.bias", shape[:1])


def _layernorm(name: str, ours: str, hidden: int) -> Iterator[HFTensor]:
    for which in ("weight", "bias"):
        yield _same(f"{name}.{which}", f"{ours}.{which}", (hidden,))


def _conv(name: str, ours: str, shape: tuple[int, int]) -> Iterator[HFTensor]:
    """A linear layer of GPT-2, of which ours has ``shape`` [out, in]."""
    turned = (shape[1], shape[0])
    part = Part(box=whole(turned), ours=f"{ours}.weight", ours_box=whole(shape), is_transposed=True)
    yield HFTensor(name=f"{name}.weight", shape=turned, parts=(part,))
    yield _same(f"{name}.bias", f"{ours}.bias", shape[:1])


def _rows(name: str, ours: str, start: int, shape: tuple[int, ...]) -> HFTensor:
    """Theirs are the rows from ``start`` on of ours."""
    box = _row_box(start, start + shape[0], shape[1:])
    return HFTensor(name=name, shape=shape, parts=(Part(box=whole(shape), ours=ours, ours_box=box),))


def _head_rows(m: ModelConfig, name: str, ours: str, which: str, rest: tuple[int, ...]) -> HFTensor:
    """Theirs are the rows of the queries, the keys or the values of every group of ours, one after the other."""
    parts = []
    for group in range(m.num_kv_heads):
        start, rows = _place(m, group, which)
        mine = _row_box(group * rows, (group + 1) * rows, rest)
        parts.append(Part(box=mine, ours=ours, ours_box=_row_box(start, start + rows, rest)))
    return HFTensor(name=name, shape=(sum(part.box.shape[0] for part in parts), *rest), parts=tuple(parts))


def _fused(m: ModelConfig, name: str, ours: str, rest: tuple[int, ...]) -> HFTensor:
    """GPT-2's queries, keys and values, one block of columns after the other."""
    size, parts = m.heads * m.width, []
    for number, which in enumerate(("q", "k", "v")):
        for group in range(m.num_kv_heads):
            start, rows = _place(m, group, which)
            at = number * size + group * rows
            box = _row_box(at, at + rows, rest)
            turned = Box(lo=box.lo[::-1], hi=box.hi[::-1])
            parts.append(Part(box=turned, ours=ours, ours_box=_row_box(start, start + rows, rest), is_transposed=True))
    return HFTensor(name=name, shape=(*rest, 3 * size), parts=tuple(parts))


def _place(m: ModelConfig, group: int, which: str) -> tuple[int, int]:
    """Where the rows of a key-value head's queries, key or value start in our matrix, and how many they are."""
    queries = m.heads // m.num_kv_heads
    base = group * (queries + 2) * m.width
    return {
        "q": (base, queries * m.width),
        "k": (base + queries * m.width, m.width),
        "v": (base + (queries + 1) * m.width, m.width),
    }[which]


def _row_box(start: int, stop: int, rest: tuple[int, ...]) -> Box:
    return Box(lo=(start, *(0 for _ in rest)), hi=(stop, *rest))
