"""Rules between the keys of a job: pure, and each problem names the keys, the values, the rule and a way out."""

from __future__ import annotations

from collections.abc import Iterator
from math import gcd

from rayformer.config.job import Job
from rayformer.errors import Problem

# Degrees and options whose keys are decided but which are not built yet, with the one value they may have.
_ONLY = {
    "layout.cp": 1,
    "layout.ep": 1,
    "layout.etp": 1,
    "layout.sequence_parallel": False,
    "model.tie_embeddings": False,
    "model.bias": False,
    "model.qk_norm": False,
    "model.dropout": 0.0,
    "model.attention_dropout": 0.0,
}


def rule_problems(job: Job) -> list[Problem]:
    """Every broken rule that can be seen in the job alone, without knowing the machine it will run on."""
    return [*_not_built(job), *_model(job), *_layout(job), *_lengths(job)]


def _not_built(job: Job) -> Iterator[Problem]:
    for key, only in _ONLY.items():
        section, name = key.split(".")
        value = getattr(getattr(job, section), name)
        if value != only:
            rule = f"only {str(only).lower()} is possible so far"
            yield Problem(keys={key: value}, rule=rule, fix="leave it out")


def _model(job: Job) -> Iterator[Problem]:
    model = job.model
    if model.hidden % (2 * model.heads):
        rule = "heads must divide hidden"
        if model.hidden % model.heads == 0:
            rule = f"rotary positions need an even head width, and hidden / heads = {model.head_dim}"
        even = "use an even hidden" if model.hidden % 2 else f"use {_some(_divisors(model.hidden // 2))} heads"
        yield Problem(keys={"model.hidden": model.hidden, "model.heads": model.heads}, rule=rule, fix=even)
    if model.heads % model.num_kv_heads:
        yield Problem(
            keys={"model.heads": model.heads, "model.kv_heads": model.num_kv_heads},
            rule="kv_heads must divide heads",
            fix=f"use {_some(_divisors(model.heads))} kv_heads",
        )


def _layout(job: Job) -> Iterator[Problem]:
    model, tp, pp = job.model, job.layout.tp, job.layout.pp
    divided = {"heads": model.heads, "kv_heads": model.kv_heads or 0, "ffn": model.ffn}
    for name, count in divided.items():
        if count % tp:
            yield Problem(
                keys={"layout.tp": tp, f"model.{name}": count},
                rule=f"tp must divide {name}",
                fix=f"use tp {_some(_divisors(gcd(*divided.values())))}",
            )
    if model.vocab < tp:
        yield Problem(
            keys={"layout.tp": tp, "model.vocab": model.vocab},
            rule="every tp rank needs at least one token id",
            fix=f"use tp of at most {model.vocab}",
        )
    if model.layers < pp:
        yield Problem(
            keys={"layout.pp": pp, "model.layers": model.layers},
            rule="every pipeline stage needs at least one layer",
            fix=f"use pp of at most {model.layers}",
        )


def batch_problems(job: Job) -> Iterator[Problem]:
    """Whether the global batch divides into equal virtual ranks of whole microbatches.

    Where virtual_ranks is auto, that of a first start is meant; on resume resolve the job first.
    """
    batch, dp = job.batch, job.layout.dp
    if dp == "auto" and batch.virtual_ranks == "auto":
        shares, keys = 1, {}
    else:
        width = 1 if dp == "auto" else dp
        shares = max(width, 1 if batch.virtual_ranks == "auto" else batch.virtual_ranks)
        keys = {"layout.dp": dp, "batch.virtual_ranks": batch.virtual_ranks}
    unit = batch.micro * shares
    if batch.global_ % unit:
        below = batch.global_ // unit * unit
        near = f"{below} or {below + unit}" if below else str(unit)
        yield Problem(
            keys={"batch.global": batch.global_, "batch.micro": batch.micro, **keys},
            rule=f"global must be a multiple of micro x virtual ranks = {batch.micro} x {shares} = {unit}",
            fix=f"the nearest valid batch.global is {near}",
        )


def _lengths(job: Job) -> Iterator[Problem]:
    run, optim = job.run, job.optim
    if run.stop_at is not None and run.stop_at > run.steps:
        yield Problem(
            keys={"run.stop_at": run.stop_at, "run.steps": run.steps},
            rule="the run ends before stop_at",
            fix=f"use a stop_at of at most {run.steps}, or leave it out",
        )
    if optim.min_lr > optim.lr:
        yield Problem(
            keys={"optim.min_lr": optim.min_lr, "optim.lr": optim.lr},
            rule="min_lr must not be above lr",
            fix=f"use a min_lr of at most {optim.lr!r}",
        )
    end, end_key = optim.decay_steps, "optim.decay_steps"
    if end == "auto":
        end, end_key = run.steps, "run.steps"
    if optim.decay == "cosine" and optim.warmup_steps > end:
        yield Problem(
            keys={"optim.warmup_steps": optim.warmup_steps, end_key: end},
            rule="the warm-up must end before the decay does",
            fix=f"use warmup_steps of at most {end}, or a larger {end_key}",
        )


def _divisors(number: int) -> list[int]:
    return [d for d in range(1, min(number, 4096) + 1) if number % d == 0]


def _some(options: list[int]) -> str:
    options = options[:8]
    return str(options[0]) if len(options) == 1 else f"{', '.join(map(str, options[:-1]))} or {options[-1]}"
