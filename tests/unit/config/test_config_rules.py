"""Rules between keys: each broken one names the keys, the values and what would do."""

from copy import deepcopy

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayformer.config.job import resolve
from rayformer.config.load import job_from_tree
from rayformer.errors import ConfigError

SMALLEST = {
    "run": {"name": "t", "steps": 20},
    "model": {"layers": 4, "hidden": 64, "heads": 4, "ffn": 96, "vocab": 257},
    "batch": {"global": 16, "seq": 32},
    "data": {"train": [{"path": "python-stdlib"}]},
}


def tree_of(changes):
    tree = deepcopy(SMALLEST)
    for key, value in changes.items():
        section, name = key.split(".")
        tree.setdefault(section, {})[name] = value
    return tree


def told(**changes):
    try:
        job_from_tree(tree_of({key.replace("__", "."): value for key, value in changes.items()}))
    except ConfigError as error:
        return str(error).splitlines()
    return []


BATCH = "global must be a multiple of micro x virtual ranks"


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"layout__tp": 3}, [
            "layout.tp=3, model.heads=4: tp must divide heads; use tp 1, 2 or 4",
        ]),
        ({"layout__tp": 8}, [
            "layout.tp=8, model.heads=4: tp must divide heads; use tp 1, 2 or 4",
        ]),
        ({"layout__tp": 4, "model__kv_heads": 2}, [
            "layout.tp=4, model.kv_heads=2: tp must divide kv_heads; use tp 1 or 2",
        ]),
        ({"layout__tp": 4, "model__ffn": 90}, [
            "layout.tp=4, model.ffn=90: tp must divide ffn; use tp 1 or 2",
        ]),
        ({"layout__tp": 2, "model__heads": 1, "model__ffn": 91}, [
            "layout.tp=2, model.heads=1: tp must divide heads; use tp 1",
            "layout.tp=2, model.ffn=91: tp must divide ffn; use tp 1",
        ]),
        ({"layout__tp": 4, "model__vocab": 3}, [
            "layout.tp=4, model.vocab=3: every tp rank needs at least one token id; use tp of at most 3",
        ]),
        ({"layout__pp": 5}, [
            "layout.pp=5, model.layers=4: every pipeline stage needs at least one layer; use pp of at most 4,"
            " or draw layout.stages",
        ]),
        ({"layout__pp": 2, "layout__virtual_stages": 3}, [
            "layout.pp=2, layout.virtual_stages=3, model.layers=4: every pipeline stage needs at least one layer;"
            " use pp x virtual_stages of at most 4, or draw layout.stages",
        ]),
        ({"model__heads": 3}, [
            "model.hidden=64, model.heads=3: heads must divide hidden; use 1, 2, 4, 8, 16 or 32 heads",
        ]),
        ({"model__hidden": 60}, [
            "model.hidden=60, model.heads=4: rotary positions need an even head width, and hidden / heads = 15;"
            " use 1, 2, 3, 5, 6, 10, 15 or 30 heads",
        ]),
        ({"model__hidden": 63}, ["model.hidden=63, model.heads=4: heads must divide hidden; use an even hidden"]),
        ({"model__kv_heads": 3}, [
            "model.heads=4, model.kv_heads=3: kv_heads must divide heads; use 1, 2 or 4 kv_heads",
        ]),
        ({"model__kv_heads": 8}, [
            "model.heads=4, model.kv_heads=8: kv_heads must divide heads; use 1, 2 or 4 kv_heads",
        ]),
        ({"layout__cp": 2}, ["layout.cp=2: only 1 is possible so far; leave it out"]),
        ({"layout__ep": 2}, ["layout.ep=2: only 1 is possible so far; leave it out"]),
        ({"layout__etp": 2}, ["layout.etp=2: only 1 is possible so far; leave it out"]),
        ({"layout__sequence_parallel": True, "layout__tp": 2, "batch__seq": 33}, [
            "layout.sequence_parallel=true, layout.tp=2, batch.seq=33: tp must divide the sequence;"
            " use batch.seq=32 or 34, or no sequence_parallel",
        ]),
        ({"model__position": "learned"}, [
            "model.position=learned, model.max_positions=null: learned positions need a number of them;"
            " use model.max_positions=32 or more",
        ]),
        ({"model__max_positions": 64}, [
            "model.max_positions=64, model.position=rope: max_positions has a meaning for learned positions only;"
            " leave it out, or use model.position=learned",
        ]),
        ({"model__max_positions": 16, "model__position": "learned"}, [
            "model.max_positions=16, batch.seq=32: a sample is longer than there are positions;"
            " use model.max_positions=32 or more, or a shorter batch.seq",
        ]),
        ({"model__rope_scaling": {"kind": "linear", "factor": 2.0}, "model__position": "none"}, [
            "model.rope_scaling=linear, model.position=none: rope_scaling has a meaning for rotary positions only;"
            " leave it out, or use model.position=rope",
        ]),
        ({"model__rope_scaling": {"kind": "llama3", "factor": 2.0, "low_freq_factor": 4.0}}, [
            "model.rope_scaling.low_freq_factor=4.0, model.rope_scaling.high_freq_factor=4.0:"
            " low_freq_factor must be below high_freq_factor; use 1.0 and 4.0",
        ]),
        ({"model__head_dim": 7}, [
            "model.head_dim=7, model.position=rope: rotary positions need an even head width;"
            " use 8, or another position",
        ]),
        ({"model__attention_dropout": 0.1, "model__attention_impl": "sdpa"}, [
            "model.attention_dropout=0.1, model.attention_impl=sdpa: fused kernels draw numbers of their own, so that"
            " what is dropped would depend on the layout; use attention_impl explicit or auto, or no attention_dropout",
        ]),
        ({"model__attention_impl": "flash", "cluster__device": "cpu"}, [
            "model.attention_impl=flash, cluster.device=cpu: this kernel runs on NVIDIA GPUs only;"
            " use attention_impl sdpa or auto",
        ]),
        ({"precision__loss_scale": 8.0}, [
            "precision.loss_scale=8.0, precision.params=fp32: only fp16 gradients are so small that the loss is scaled;"
            " leave loss_scale out, or use precision.params=fp16",
        ]),
        ({"recompute__modules": ["mlp"]}, [
            "recompute.modules=['mlp'], recompute.mode=none: modules has a meaning for selective recomputation only;"
            " leave it out, or use recompute.mode=selective",
        ]),
        ({"recompute__layers": 2, "recompute__mode": "selective"}, [
            "recompute.layers=2, recompute.mode=selective: layers has a meaning for full recomputation only;"
            " leave it out, or use recompute.mode=full",
        ]),
        ({"batch__rampup": {"start": 4, "increment": 5, "samples": 100}}, [
            "batch.rampup.start=4, batch.rampup.increment=5, batch.global=16: the batch must grow from start to global"
            " in whole increments; use a start below global, and an increment that divides the difference",
        ]),
        ({"batch__rampup": {"start": 4, "increment": 4, "samples": 100}, "batch__micro": 8}, [
            "batch.rampup.start=4, batch.rampup.increment=4, batch.global=16: every size must be a multiple of micro x"
            " virtual ranks = 8; use multiples of 8",
        ]),
        ({"batch__global": 6, "batch__micro": 4}, [
            f"batch.global=6, batch.micro=4, layout.dp=1, batch.virtual_ranks=auto: {BATCH} = 4 x 1 = 4;"
            " the nearest valid batch.global is 4 or 8",
        ]),
        ({"batch__global": 6, "batch__micro": 2, "layout__dp": 2}, [
            f"batch.global=6, batch.micro=2, layout.dp=2, batch.virtual_ranks=auto: {BATCH} = 2 x 2 = 4;"
            " the nearest valid batch.global is 4 or 8",
        ]),
        ({"batch__global": 1, "batch__micro": 2}, [
            f"batch.global=1, batch.micro=2, layout.dp=1, batch.virtual_ranks=auto: {BATCH} = 2 x 1 = 2;"
            " the nearest valid batch.global is 2",
        ]),
        ({"batch__global": 12, "layout__dp": 2, "batch__virtual_ranks": 8}, [
            f"batch.global=12, batch.micro=1, layout.dp=2, batch.virtual_ranks=8: {BATCH} = 1 x 8 = 8;"
            " the nearest valid batch.global is 8 or 16",
        ]),
        ({"batch__global": 12, "layout__dp": "auto", "batch__virtual_ranks": 8}, [
            f"batch.global=12, batch.micro=1, layout.dp=auto, batch.virtual_ranks=8: {BATCH} = 1 x 8 = 8;"
            " the nearest valid batch.global is 8 or 16",
        ]),
        ({"batch__global": 12, "layout__dp": 8, "batch__virtual_ranks": 4}, [
            f"batch.global=12, batch.micro=1, layout.dp=8, batch.virtual_ranks=4: {BATCH} = 1 x 8 = 8;"
            " the nearest valid batch.global is 8 or 16",
        ]),
        ({"batch__global": 9, "batch__micro": 2, "layout__dp": "auto"}, [
            f"batch.global=9, batch.micro=2: {BATCH} = 2 x 1 = 2; the nearest valid batch.global is 8 or 10",
        ]),
        ({"run__stop_at": 21}, [
            "run.stop_at=21, run.steps=20: the run ends before stop_at; use a stop_at of at most 20, or leave it out",
        ]),
        ({"optim__min_lr": 0.01}, [
            "optim.min_lr=0.01, optim.lr=0.001: min_lr must not be above lr; use a min_lr of at most 0.001",
        ]),
        ({"optim__warmup_steps": 21}, [
            "optim.warmup_steps=21, run.steps=20: the warm-up must end before the decay does;"
            " use warmup_steps of at most 20, or a larger run.steps",
        ]),
        ({"optim__warmup_steps": 15, "optim__decay_steps": 10}, [
            "optim.warmup_steps=15, optim.decay_steps=10: the warm-up must end before the decay does;"
            " use warmup_steps of at most 10, or a larger optim.decay_steps",
        ]),
        ({"optim__warmup_steps": 21, "optim__decay": "wsd", "optim__wsd_steps": 1}, [
            "optim.warmup_steps=21, run.steps=20: the warm-up must end before the decay does;"
            " use warmup_steps of at most 20, or a larger run.steps",
        ]),
        ({"optim__init_lr": 0.01, "optim__warmup_steps": 3}, [
            "optim.init_lr=0.01, optim.lr=0.001: init_lr must not be above lr; use an init_lr of at most 0.001",
        ]),
        ({"optim__init_lr": 1e-4}, [
            "optim.init_lr=0.0001, optim.warmup_steps=0: init_lr is where the warm-up starts, and there is none;"
            " give warmup_steps, or leave init_lr out",
        ]),
        ({"optim__decay": "wsd"}, [
            "optim.decay=wsd, optim.wsd_steps=null: wsd must know how long its final decay is;"
            " give wsd_steps, such as a tenth of the run",
        ]),
        ({"optim__decay": "wsd", "optim__warmup_steps": 5, "optim__wsd_steps": 16}, [
            "optim.warmup_steps=5, optim.wsd_steps=16, run.steps=20: the warm-up must end before the final decay"
            " starts; use wsd_steps of at most 15, or a larger run.steps",
        ]),
        ({"optim__decay": "wsd", "optim__warmup_steps": 9, "optim__wsd_steps": 1, "optim__decay_steps": 9}, [
            "optim.warmup_steps=9, optim.wsd_steps=1, optim.decay_steps=9: the warm-up must end before the final decay"
            " starts; use a larger optim.decay_steps",
        ]),
        ({"optim__wsd_steps": 5, "optim__wsd_decay": "linear"}, [
            "optim.wsd_steps=5, optim.decay=cosine: wsd_steps has a meaning for wsd only;"
            " leave wsd_steps out, or use optim.decay=wsd",
            "optim.wsd_decay=linear, optim.decay=cosine: wsd_decay has a meaning for wsd only;"
            " leave wsd_decay out, or use optim.decay=wsd",
        ]),
        ({"optim__weight_decay_end": 0.2}, [
            "optim.weight_decay_end=0.2, optim.weight_decay_style=constant: a constant weight decay has no other end;"
            " use weight_decay_style linear or cosine, or leave weight_decay_end out",
        ]),
        ({"optim__weight_decay_style": "linear"}, [
            "optim.weight_decay_style=linear, optim.weight_decay_end=null: a weight decay that changes needs an end;"
            " give weight_decay_end, or leave weight_decay_style out",
        ]),
    ],
)  # fmt: skip
def test_a_broken_rule_is_told_with_its_values_and_what_would_do(changes, expected):
    assert told(**changes) == expected


@pytest.mark.parametrize(
    "changes",
    [
        {"layout__tp": 4, "model__heads": 8, "model__kv_heads": 4},
        {"layout__pp": 4},
        {"layout__pp": 6, "layout__stages": "E|t|t|t|t|L"},
        {"layout__tp": 2, "model__vocab": 257},  # an odd vocabulary is dealt unevenly
        {"batch__global": 12, "layout__dp": 3, "batch__virtual_ranks": 4},  # uneven: 3 actors, 4 virtual ranks
        {"batch__global": 12, "layout__dp": "auto"},
        {"batch__rampup": {"start": 4, "increment": 4, "samples": 100}, "batch__micro": 2, "layout__dp": 2},
        {"model__heads": 3, "model__head_dim": 24},
        {"model__hidden": 60, "model__heads": 4, "model__position": "learned", "model__max_positions": 32},
        {"run__stop_at": 0},
        {"run__stop_at": 20},
        {"optim__warmup_steps": 21, "optim__decay": "constant"},
        {"optim__min_lr": 1e-3},
        {"optim__init_lr": 1e-3, "optim__warmup_steps": 1},
        {"optim__decay": "wsd", "optim__warmup_steps": 5, "optim__wsd_steps": 15, "optim__wsd_decay": "cosine"},
        {"optim__weight_decay_style": "cosine", "optim__weight_decay_end": 0.0},
    ],
)
def test_what_keeps_the_rules_is_not_refused(changes):
    assert told(**changes) == []


@given(st.integers(1, 40), st.integers(1, 5), st.integers(1, 4), st.sampled_from(["auto", 1, 2, 4]))
def test_the_nearest_batches_that_are_told_are_valid(size, micro, dp, virtual_ranks):
    lines = told(batch__global=size, batch__micro=micro, layout__dp=dp, batch__virtual_ranks=virtual_ranks)
    unit = micro * max(dp, 1 if virtual_ranks == "auto" else virtual_ranks)
    assert bool(lines) == bool(size % unit)
    for line in lines:
        for other in map(int, line.rpartition(" is ")[2].split(" or ")):
            assert abs(other - size) < unit
            assert not told(batch__global=other, batch__micro=micro, layout__dp=dp, batch__virtual_ranks=virtual_ranks)


@given(st.integers(1, 200), st.integers(1, 12))
def test_the_heads_that_are_told_are_valid(hidden, heads):
    for line in told(model__hidden=hidden, model__heads=heads):
        text = line.rpartition("; ")[2]
        if hidden % 2:
            assert text == "use an even hidden"
        else:
            for other in text.removeprefix("use ").removesuffix(" heads").replace(" or ", ", ").split(", "):
                assert not told(model__hidden=hidden, model__heads=int(other))


def resolved(changes, *, dp, recorded):
    job = resolve(job_from_tree(tree_of(changes)), dp=dp, recorded=recorded)
    return job.layout.dp, job.batch.num_virtual_ranks, job.optim.num_decay_steps


@pytest.mark.parametrize(
    ("changes", "dp", "recorded", "expected"),
    [
        ({}, 4, {}, (4, 4, 20)),
        ({"batch.virtual_ranks": 8}, 4, {}, (4, 8, 20)),
        ({"optim.decay_steps": 7}, 4, {}, (4, 4, 7)),
        # resumed: what the first run fixed holds
        ({}, 2, {"virtual_ranks": 4, "decay_steps": 15}, (2, 4, 15)),
        ({"run.steps": 99}, 4, {"virtual_ranks": 4, "decay_steps": 15}, (4, 4, 15)),
        ({"optim.decay_steps": 7}, 4, {"virtual_ranks": 4, "decay_steps": 15}, (4, 4, 7)),
        # a dp beyond the virtual ranks becomes their number
        ({}, 8, {"virtual_ranks": 4, "decay_steps": 15}, (8, 8, 15)),
        ({"batch.virtual_ranks": 2}, 8, {}, (8, 8, 20)),
    ],
)
def test_resolve_fills_every_auto_that_decides_numbers(changes, dp, recorded, expected):
    assert resolved({"layout.dp": "auto", **changes}, dp=dp, recorded=recorded) == expected


def test_resolve_changes_nothing_else_and_resolved_jobs_can_be_read_again():
    job = job_from_tree(tree_of({"layout.dp": "auto"}))
    done = resolve(job, dp=4, recorded={})
    assert job.layout.dp == job.batch.virtual_ranks == job.optim.decay_steps == "auto"
    assert job_from_tree(done.dump()) == done
    assert (done.layout.degrees.world, done.batch.num_microbatches) == (4, 16)
    before, after = job.dump(), done.dump()
    for key in ("layout.dp", "batch.virtual_ranks", "optim.decay_steps"):
        section, name = key.split(".")
        del before[section][name], after[section][name]
    assert before == after


def test_values_that_were_not_resolved_are_not_used():
    job = job_from_tree(tree_of({"layout.dp": "auto"}))
    for read in (lambda: job.layout.degrees, lambda: job.batch.num_virtual_ranks, lambda: job.optim.num_decay_steps):
        with pytest.raises(AssertionError, match="not resolved"):
            read()
