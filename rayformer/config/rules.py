"""Rules between the keys of a job: pure, and each problem names the keys, the values, the rule and a way out."""

from __future__ import annotations

from collections.abc import Iterator

from rayformer.config.job import Job
from rayformer.config.model_rules import model_problems
from rayformer.errors import Problem

# Degrees and options whose keys are decided but which are not built yet, with the one value they may have.
_ONLY = {
    "layout.cp": 1,
    "layout.ep": 1,
    "layout.etp": 1,
}


def rule_problems(job: Job) -> list[Problem]:
    """Every broken rule that can be seen in the job alone, without knowing the machine it will run on."""
    return [
        *_not_built(job),
        *model_problems(job),
        *_precision(job),
        *_recompute(job),
        *_lengths(job),
        *_schedules(job),
    ]


def _not_built(job: Job) -> Iterator[Problem]:
    for key, only in _ONLY.items():
        section, name = key.split(".")
        value = getattr(getattr(job, section), name)
        if value != only:
            rule = f"only {str(only).lower()} is possible so far"
            yield Problem(keys={key: value}, rule=rule, fix="leave it out")


def _precision(job: Job) -> Iterator[Problem]:
    precision = job.precision
    if precision.params != "fp16" and precision.loss_scale != "dynamic":
        yield Problem(
            keys={"precision.loss_scale": precision.loss_scale, "precision.params": precision.params},
            rule="only fp16 gradients are so small that the loss is scaled",
            fix="leave loss_scale out, or use precision.params=fp16",
        )


def _recompute(job: Job) -> Iterator[Problem]:
    recompute = job.recompute
    unused: dict[str, object] = {}
    if recompute.mode != "full":
        unused |= {"method": "uniform", "layers": 1}
    if recompute.mode != "selective":
        unused |= {"modules": ("core_attn",)}
    for name, default in unused.items():
        value = getattr(recompute, name)
        if value != default:
            wanted = "selective" if name == "modules" else "full"
            yield Problem(
                keys={
                    f"recompute.{name}": list(value) if isinstance(value, tuple) else value,
                    "recompute.mode": recompute.mode,
                },
                rule=f"{name} has a meaning for {wanted} recomputation only",
                fix=f"leave it out, or use recompute.mode={wanted}",
            )


def _rampup(job: Job, unit: int) -> Iterator[Problem]:
    ramp, whole = job.batch.rampup, job.batch.global_
    if ramp is None:
        return
    keys = {"batch.rampup.start": ramp.start, "batch.rampup.increment": ramp.increment, "batch.global": whole}
    if ramp.start >= whole or (whole - ramp.start) % ramp.increment:
        rule = "the batch must grow from start to global in whole increments"
        yield Problem(
            keys=keys, rule=rule, fix="use a start below global, and an increment that divides the difference"
        )
    elif ramp.start % unit or ramp.increment % unit:
        rule = f"every size must be a multiple of micro x virtual ranks = {unit}"
        yield Problem(keys=keys, rule=rule, fix=f"use multiples of {unit}")


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
    else:
        yield from _rampup(job, unit)


def _lengths(job: Job) -> Iterator[Problem]:
    run, optim = job.run, job.optim
    if run.stop_at is not None and run.stop_at > run.steps:
        yield Problem(
            keys={"run.stop_at": run.stop_at, "run.steps": run.steps},
            rule="the run ends before stop_at",
            fix=f"use a stop_at of at most {run.steps}, or leave it out",
        )
    for article, name, rate in (("a", "min_lr", optim.min_lr), ("an", "init_lr", optim.init_lr)):
        if rate > optim.lr:
            yield Problem(
                keys={f"optim.{name}": rate, "optim.lr": optim.lr},
                rule=f"{name} must not be above lr",
                fix=f"use {article} {name} of at most {optim.lr!r}",
            )
    end, end_key = optim.decay_steps, "optim.decay_steps"
    if end == "auto":
        end, end_key = run.steps, "run.steps"
    if optim.decay != "constant" and optim.warmup_steps > end:
        yield Problem(
            keys={"optim.warmup_steps": optim.warmup_steps, end_key: end},
            rule="the warm-up must end before the decay does",
            fix=f"use warmup_steps of at most {end}, or a larger {end_key}",
        )
    elif optim.decay == "wsd" and optim.wsd_steps is not None and optim.warmup_steps + optim.wsd_steps > end:
        room = end - optim.warmup_steps
        yield Problem(
            keys={"optim.warmup_steps": optim.warmup_steps, "optim.wsd_steps": optim.wsd_steps, end_key: end},
            rule="the warm-up must end before the final decay starts",
            fix=f"use wsd_steps of at most {room}, or a larger {end_key}" if room else f"use a larger {end_key}",
        )


def _schedules(job: Job) -> Iterator[Problem]:
    """Keys that the shape they belong to lacks, and keys that the shape chosen has no use for."""
    optim = job.optim
    if optim.init_lr and not optim.warmup_steps:
        yield Problem(
            keys={"optim.init_lr": optim.init_lr, "optim.warmup_steps": 0},
            rule="init_lr is where the warm-up starts, and there is none",
            fix="give warmup_steps, or leave init_lr out",
        )
    if optim.decay == "wsd" and optim.wsd_steps is None:
        yield Problem(
            keys={"optim.decay": "wsd", "optim.wsd_steps": None},
            rule="wsd must know how long its final decay is",
            fix="give wsd_steps, such as a tenth of the run",
        )
    for name in ("wsd_steps", "wsd_decay"):
        if optim.decay != "wsd" and getattr(optim, name) is not None:
            yield Problem(
                keys={f"optim.{name}": getattr(optim, name), "optim.decay": optim.decay},
                rule=f"{name} has a meaning for wsd only",
                fix=f"leave {name} out, or use optim.decay=wsd",
            )
    style, end = optim.weight_decay_style, optim.weight_decay_end
    if style == "constant" and end is not None:
        yield Problem(
            keys={"optim.weight_decay_end": end, "optim.weight_decay_style": style},
            rule="a constant weight decay has no other end",
            fix="use weight_decay_style linear or cosine, or leave weight_decay_end out",
        )
    elif style != "constant" and end is None:
        yield Problem(
            keys={"optim.weight_decay_style": style, "optim.weight_decay_end": None},
            rule="a weight decay that changes needs an end",
            fix="give weight_decay_end, or leave weight_decay_style out",
        )
