"""Building one cell: its stage, its memory, its optimizer, its programs and its view of the data."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rayformer.config.job import Job
from rayformer.data.corpus import corpus_path, open_corpus
from rayformer.data.loader import HeldOutOrder, SampleReader, TrainingOrder
from rayformer.groups import Groups
from rayformer.models import llama
from rayformer.nn.context import Context, parameter_specs
from rayformer.optim.adamw import ShardedAdamW
from rayformer.optim.buffers import FlatParameters, GradBuffers
from rayformer.optim.plan import BUCKET_ELEMENTS, plan_buckets
from rayformer.optim.tree import owned_leaves
from rayformer.shards import ParamSpec
from rayformer.stages.channel import Channel
from rayformer.stages.check import check
from rayformer.stages.executor import Executor
from rayformer.stages.instructions import Program
from rayformer.stages.lowering import lower, with_reductions
from rayformer.stages.schedules import get_schedule
from rayformer.stages.schedules.forward_only import forward_only
from rayformer.stages.stage import Stage


@dataclass(frozen=True, kw_only=True)
class Cell:
    """Everything that one cell of a run computes with. ``leaves`` are the virtual ranks it runs."""

    job: Job
    groups: Groups
    stage: Stage
    specs: dict[str, ParamSpec]
    parameters: FlatParameters
    grads: GradBuffers
    optimizer: ShardedAdamW
    channel: Channel
    executor: Executor
    train_program: Program
    eval_program: Program
    leaves: range
    training: TrainingOrder | None
    held_out: HeldOutOrder | None

    @property
    def microbatches(self) -> range:
        """The numbers, in the whole step, of the microbatches that this cell runs."""
        per_leaf = self.job.batch.num_microbatches // self.job.batch.num_virtual_ranks
        return range(self.leaves.start * per_leaf, self.leaves.stop * per_leaf)

    @property
    def param_address(self) -> int:
        """Where the parameters lie in memory; it changes only if they are made anew."""
        return self.parameters.buffer.data_ptr()


def build_cell(
    job: Job,
    groups: Groups,
    *,
    corpus_cache: Path,
    base_dir: Path = Path(),
    bucket_elements: int = BUCKET_ELEMENTS,
) -> Cell:
    """Build the cell that ``groups`` belong to, with its initial weights.

    Data is read only where it is needed; relative data paths start from ``base_dir``.
    """
    degrees, at, device = groups.layout, groups.cell, groups.device
    blocks, loss = llama.build(job.model)
    ctx = Context(tp=groups.tp, seed=job.run.seed, device=device)
    stage = Stage(blocks, loss, pp=degrees.pp, rank=at.pp, ctx=ctx)
    named = [(p.spec.name, p) for p in stage.parameters()]  # type: ignore[attr-defined]
    specs = parameter_specs(stage)
    plan = plan_buckets([(name, p.numel()) for name, p in named], dp=degrees.dp, bucket_elements=bucket_elements)
    num_leaves = job.batch.num_virtual_ranks
    leaves = owned_leaves(num_leaves, degrees.dp, at.dp)
    parameters = FlatParameters(named, plan)
    channel = Channel(groups.pp, shape=(job.batch.micro, job.batch.seq, job.model.hidden), dtype=ctx.dtype)
    per_leaf, rest = divmod(job.batch.num_microbatches, num_leaves)
    assert per_leaf and not rest, "the microbatches don't divide into virtual ranks"
    leaf_of = [leaf for leaf in leaves for _ in range(per_leaf)]
    programs = lower(get_schedule(job.schedule.name)(degrees.pp, 1, len(leaf_of)))
    check(programs, rendezvous=True)
    training, held_out = _orders(job, corpus_cache, base_dir) if stage.is_first or stage.is_last else (None, None)
    return Cell(
        job=job,
        groups=groups,
        stage=stage,
        specs=specs,
        parameters=parameters,
        grads=GradBuffers(named, plan, leaves=leaves, num_leaves=num_leaves),
        optimizer=ShardedAdamW(parameters, specs, job.optim, tp=groups.tp, dp=groups.dp),
        channel=channel,
        executor=Executor(stage, channel),
        train_program=with_reductions(programs[at.pp], leaf_of_microbatch=leaf_of, num_buckets=len(plan.buckets)),
        eval_program=lower(forward_only(degrees.pp, 1, len(leaf_of)))[at.pp],
        leaves=leaves,
        training=training,
        held_out=held_out,
    )


def _orders(job: Job, corpus_cache: Path, base_dir: Path) -> tuple[TrainingOrder, HeldOutOrder | None]:
    corpus = open_corpus(
        corpus_path(job.data.train[0].path, base_dir),
        split=job.data.split,
        tokenizer=job.data.tokenizer,
        cache_dir=corpus_cache,
    )
    readers = [
        None if stream is None else SampleReader(stream, seq=job.batch.seq, vocab=job.model.vocab)
        for stream in (corpus.train, corpus.held_out)
    ]
    assert readers[0] is not None
    return TrainingOrder(readers[0], job.run.seed), None if readers[1] is None else HeldOutOrder(readers[1])
