"""Rules about the built-in model and how a layout divides it. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from math import gcd

from rayformer.config.job import Job
from rayformer.config.model import CustomModelConfig, ModelConfig
from rayformer.errors import Problem


def model_problems(job: Job) -> Iterator[Problem]:
    """Every broken rule of the model's shape, its options, and its division over tp and pp."""
    if isinstance(job.model, CustomModelConfig):
        return  # its factory alone knows; see cell.model
    yield from _heads(job.model)
    yield from _positions(job.model, job.batch.seq)
    yield from _kernels(job.model, job.cluster.device)
    yield from _division(job, job.model)


def _heads(model: ModelConfig) -> Iterator[Problem]:
    needed = 2 if model.position == "rope" else 1
    if model.head_dim is None and model.hidden % (needed * model.heads):
        rule = "heads must divide hidden"
        if model.hidden % model.heads == 0:
            rule = f"rotary positions need an even head width, and hidden / heads = {model.width}"
        odd = model.hidden % needed
        fix = "use an even hidden" if odd else f"use {some(divisors(model.hidden // needed))} heads"
        yield Problem(keys={"model.hidden": model.hidden, "model.heads": model.heads}, rule=rule, fix=fix)
    if model.head_dim is not None and model.head_dim % needed:
        yield Problem(
            keys={"model.head_dim": model.head_dim, "model.position": model.position},
            rule="rotary positions need an even head width",
            fix=f"use {model.head_dim + 1}, or another position",
        )
    if model.heads % model.num_kv_heads:
        yield Problem(
            keys={"model.heads": model.heads, "model.kv_heads": model.num_kv_heads},
            rule="kv_heads must divide heads",
            fix=f"use {some(divisors(model.heads))} kv_heads",
        )


def _positions(model: ModelConfig, seq: int) -> Iterator[Problem]:
    if model.position == "learned" and model.max_positions is None:
        yield Problem(
            keys={"model.position": "learned", "model.max_positions": None},
            rule="learned positions need a number of them",
            fix=f"use model.max_positions={seq} or more",
        )
    elif model.position != "learned" and model.max_positions is not None:
        yield Problem(
            keys={"model.max_positions": model.max_positions, "model.position": model.position},
            rule="max_positions has a meaning for learned positions only",
            fix="leave it out, or use model.position=learned",
        )
    elif model.max_positions is not None and model.max_positions < seq:
        yield Problem(
            keys={"model.max_positions": model.max_positions, "batch.seq": seq},
            rule="a sample is longer than there are positions",
            fix=f"use model.max_positions={seq} or more, or a shorter batch.seq",
        )
    scaling = model.rope_scaling
    if scaling is not None and model.position != "rope":
        yield Problem(
            keys={"model.rope_scaling": scaling.kind, "model.position": model.position},
            rule="rope_scaling has a meaning for rotary positions only",
            fix="leave it out, or use model.position=rope",
        )
    if scaling is not None and scaling.kind == "llama3" and scaling.low_freq_factor >= scaling.high_freq_factor:
        yield Problem(
            keys={
                "model.rope_scaling.low_freq_factor": scaling.low_freq_factor,
                "model.rope_scaling.high_freq_factor": scaling.high_freq_factor,
            },
            rule="low_freq_factor must be below high_freq_factor",
            fix="use 1.0 and 4.0",
        )


def _kernels(model: ModelConfig, device: str) -> Iterator[Problem]:
    if model.attention_dropout and model.attention_impl not in ("auto", "explicit"):
        yield Problem(
            keys={"model.attention_dropout": model.attention_dropout, "model.attention_impl": model.attention_impl},
            rule="fused kernels draw numbers of their own, so that what is dropped would depend on the layout",
            fix="use attention_impl explicit or auto, or no attention_dropout",
        )
    if model.attention_impl in ("flash", "te") and device == "cpu":
        yield Problem(
            keys={"model.attention_impl": model.attention_impl, "cluster.device": device},
            rule="this kernel runs on NVIDIA GPUs only",
            fix="use attention_impl sdpa or auto",
        )


def _division(job: Job, model: ModelConfig) -> Iterator[Problem]:
    tp, seq = job.layout.tp, job.batch.seq
    divided = {"heads": model.heads, "kv_heads": model.kv_heads or 0, "ffn": model.ffn}
    for name, count in divided.items():
        if count % tp:
            yield Problem(
                keys={"layout.tp": tp, f"model.{name}": count},
                rule=f"tp must divide {name}",
                fix=f"use tp {some(divisors(gcd(*divided.values())))}",
            )
    if model.vocab < tp:
        yield Problem(
            keys={"layout.tp": tp, "model.vocab": model.vocab},
            rule="every tp rank needs at least one token id",
            fix=f"use tp of at most {model.vocab}",
        )
    if job.layout.sequence_parallel and seq % tp:
        yield Problem(
            keys={"layout.sequence_parallel": True, "layout.tp": tp, "batch.seq": seq},
            rule="tp must divide the sequence",
            fix=f"use batch.seq={seq // tp * tp or tp} or {(seq // tp + 1) * tp}, or no sequence_parallel",
        )
    chunks = job.layout.virtual_stages
    if job.layout.stages == "auto" and model.layers < job.layout.pp * chunks:
        virtual = {"layout.virtual_stages": chunks} if chunks > 1 else {}
        yield Problem(
            keys={"layout.pp": job.layout.pp, **virtual, "model.layers": model.layers},
            rule="every pipeline stage needs at least one layer",
            fix=f"use pp{' x virtual_stages' if virtual else ''} of at most {model.layers}, or draw layout.stages",
        )


def divisors(number: int) -> list[int]:
    """The numbers up to 4096 that divide ``number``."""
    return [d for d in range(1, min(number, 4096) + 1) if number % d == 0]


def some(options: list[int]) -> str:
    """The first few options in words, such as "1, 2 or 4"."""
    options = options[:8]
    return str(options[0]) if len(options) == 1 else f"{', '.join(map(str, options[:-1]))} or {options[-1]}"
