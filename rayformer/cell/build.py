"""Building one cell: its stage, its memory, its optimizer, its programs and its view of the data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch
from torch import nn

from rayformer.cell.model import load_model
from rayformer.config.job import Job
from rayformer.data.corpus import corpus_path, open_corpus
from rayformer.data.loader import HeldOutOrder, SampleReader, TrainingOrder
from rayformer.events import StepReport
from rayformer.groups import Groups
from rayformer.nn.context import Context, Parameter, own_parameters, parameter_specs
from rayformer.ops.dropout import Moment
from rayformer.optim.adamw import ShardedAdamW
from rayformer.optim.buffers import FlatParameters, GradBuffers
from rayformer.optim.plan import BUCKET_ELEMENTS, CPU_BUCKET_ELEMENTS, BucketPlan, plan_buckets
from rayformer.optim.tied import TiedParameters
from rayformer.optim.tree import owned_leaves
from rayformer.shards import ParamSpec
from rayformer.stages.channel import Channel
from rayformer.stages.check import check
from rayformer.stages.executor import Executor
from rayformer.stages.instructions import Program, StageMap
from rayformer.stages.lowering import BucketPlace, lower, with_awaited_params, with_reductions
from rayformer.stages.schedules import Schedule, get_schedule
from rayformer.stages.schedules.forward_only import forward_only
from rayformer.stages.split import split_blocks
from rayformer.stages.stage import Stage

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(kw_only=True)
class Position:
    """How far a cell has come: its state is that after ``step``, and whole unless it is just being changed.

    ``skipped_in_row`` are the last steps without an update, ``report`` what is to be told of ``step`` as long as its
    evaluation and checkpoint are not done.
    """

    step: int = 0
    consumed_samples: int = 0
    skipped_in_row: int = 0
    is_whole: bool = True
    report: StepReport | None = None

    def move_to(self, step: int, *, consumed_samples: int, skipped_in_row: int = 0) -> None:
        self.step, self.consumed_samples, self.skipped_in_row = step, consumed_samples, skipped_in_row
        self.report = None
        self.is_whole = True


@dataclass(frozen=True, kw_only=True)
class Cell:
    """Everything that one cell of a run computes with.

    ``stages`` are those of the model that it holds, one for each chunk; ``chunk_of`` says where each of its parameters
    is. ``leaves`` are the virtual ranks it runs.
    """

    job: Job
    groups: Groups
    stage_map: StageMap
    stages: tuple[Stage, ...]
    specs: dict[str, ParamSpec]
    chunk_of: dict[str, int]
    parameters: FlatParameters
    grads: GradBuffers
    optimizer: ShardedAdamW
    channel: Channel
    executor: Executor
    programs: Programs
    leaves: range
    training: TrainingOrder | None
    held_out: HeldOutOrder | None
    position: Position

    def samples(self, batch_size: int) -> range:
        """The places in a global batch of ``batch_size`` samples of those that this cell runs."""
        per_leaf = batch_size // self.job.batch.num_virtual_ranks
        return range(self.leaves.start * per_leaf, self.leaves.stop * per_leaf)

    def forget_messages(self) -> None:
        """What was in flight when the groups went: gathers, sends and receives."""
        self.optimizer.forget_gathers()
        self.channel.forget()

    @property
    def param_address(self) -> int:
        """Where the parameters lie in memory; it changes only if they are made anew."""
        return self.parameters.buffer.data_ptr()


class Programs:
    """The programs of one cell for batches of any size, each checked for all ranks when it is first needed."""

    def __init__(
        self,
        job: Job,
        groups: Groups,
        stages: Sequence[Stage],
        plan: BucketPlan,
        *,
        schedule: Schedule,
        stage_map: StageMap,
        leaves: range,
    ) -> None:
        self._job, self._schedule, self._rank = job, schedule, groups.cell.pp
        self._stage_map, self._leaves = stage_map, leaves
        self._num_segments = [len(stage.segments) for stage in stages]
        wanted = groups.device.type == "cuda" if job.optim.overlap == "auto" else job.optim.overlap
        self._overlap = wanted and groups.dp.size > 1
        self._buckets = _bucket_places(stages, plan)
        self.train = lru_cache(self._train)
        self.evaluate = lru_cache(self._evaluate)

    def _train(self, batch_size: int) -> Program:
        """One training step on a global batch of ``batch_size`` samples."""
        leaf_of = [leaf for leaf in self._leaves for _ in range(self._per_leaf(batch_size))]
        programs = self._schedule.programs(self._stage_map.pp, self._stage_map.chunks, len(leaf_of))
        check(programs, rendezvous=True, vee=self._stage_map.vee)
        program = with_reductions(
            programs[self._rank],
            leaf_of_microbatch=leaf_of,
            buckets=self._buckets,
            num_segments=self._num_segments,
            overlap=self._overlap,
        )
        return with_awaited_params(program, buckets=self._buckets, num_segments=self._num_segments)

    def _evaluate(self) -> Program:
        """One held-out global batch."""
        pp, chunks, vee = self._stage_map.pp, self._stage_map.chunks, self._stage_map.vee
        num_microbatches = len(self._leaves) * self._per_leaf(self._job.batch.global_)
        return lower(forward_only(pp, chunks, num_microbatches), vee=vee)[self._rank]

    def _per_leaf(self, batch_size: int) -> int:
        batch = self._job.batch
        per_leaf, rest = divmod(batch_size, batch.micro * batch.num_virtual_ranks)
        assert per_leaf and not rest, f"{batch_size} samples don't divide into virtual ranks of whole microbatches"
        return per_leaf


def _bucket_places(stages: Sequence[Stage], plan: BucketPlan) -> list[BucketPlace]:
    """Where forward first needs each bucket, which is where backward last adds to it."""
    where: dict[tuple[str, bool], list[int]] = {}
    for stage in stages:
        for parameter, segment in stage.segments_of_parameters().items():
            assert isinstance(parameter, Parameter)
            where.setdefault((parameter.spec.name, parameter.borrowed), []).append(segment)
    return [
        BucketPlace(
            chunk=bucket.chunk,
            segment=min(segment for slot in bucket.slots for segment in where[slot.name, bucket.borrowed]),
        )
        for bucket in plan.buckets
    ]


def build_cell(
    job: Job,
    groups: Groups,
    *,
    corpus_cache: Path,
    base_dir: Path = Path(),
    bucket_elements: int | None = None,
) -> Cell:
    """Build the cell that ``groups`` belong to, with its initial weights.

    Data is read only where needed; relative data paths start from ``base_dir``. ``bucket_elements`` are the fewest
    of a bucket, by default what suits the device; bits do not depend on it. Raises ConfigError for a model
    that can't be built in this layout or on this device.
    """
    degrees, at, device = groups.layout, groups.cell, groups.device
    blocks, loss = load_model(job.model, base_dir)
    dtype = DTYPES[job.precision.params]
    ctx = Context(
        tp=groups.tp,
        sequence_parallel=job.layout.sequence_parallel,
        seed=job.run.seed,
        device=device,
        dtype=dtype,
        moment=Moment(seed=job.run.seed),
        recomputed=frozenset(job.recompute.modules if job.recompute.mode == "selective" else ()),
        compiled=job.model.compile,
    )
    schedule = get_schedule(job.schedule.name, **job.schedule.options)
    stage_map = StageMap(pp=degrees.pp, chunks=job.layout.virtual_stages, vee=schedule.vee)
    costs = [block.cost for block in blocks]
    numbers = split_blocks(job.layout.stages, costs=costs, pp=degrees.pp, chunks=stage_map.chunks)
    stages = [
        Stage(blocks, loss, numbers=numbers[stage_map.stage(at.pp, chunk)], ctx=ctx, recompute=job.recompute)
        for chunk in range(stage_map.chunks)
    ]
    everything = nn.ModuleList(stages)
    specs = parameter_specs(everything)
    owned = [(p.spec.name, p) for p in own_parameters(everything)]
    borrowed = [(p.spec.name, p) for p in everything.parameters() if isinstance(p, Parameter) and p.borrowed]
    chunk_of = {p.spec.name: chunk for chunk, stage in enumerate(stages) for p in own_parameters(stage)}
    plan = plan_buckets(
        [(name, p.numel()) for name, p in owned],
        dp=degrees.dp,
        bucket_elements=bucket_elements or (BUCKET_ELEMENTS if device.type == "cuda" else CPU_BUCKET_ELEMENTS),
        rooms={p.spec.name: p.spec.room(degrees.tp) for _, p in (*owned, *borrowed)},
        alone=[name for name, spec in specs.items() if spec.tied],
        borrowed=[(name, p.numel()) for name, p in borrowed],
        chunks=chunk_of,
        borrowing_chunk=stage_map.chunk(stage_map.last),
    )
    num_leaves = job.batch.num_virtual_ranks
    leaves = owned_leaves(num_leaves, degrees.dp, at.dp)
    parameters = FlatParameters(owned, plan, borrowed=borrowed, dtype=dtype)
    tied = TiedParameters(
        plan,
        tied=[name for name, spec in specs.items() if spec.tied],
        pp=groups.pp,
        borrower=stage_map.rank(stage_map.last),
    )
    own_seq = job.batch.seq // (degrees.tp if ctx.sequence_parallel else 1)
    channel = Channel(groups.pp, shape=(job.batch.micro, own_seq, job.model.hidden), dtype=dtype)
    reads = any(stage.is_first or stage.is_last for stage in stages)
    training, held_out = _orders(job, corpus_cache, base_dir) if reads else (None, None)
    return Cell(
        job=job,
        groups=groups,
        stage_map=stage_map,
        stages=tuple(stages),
        specs=specs,
        chunk_of=chunk_of,
        parameters=parameters,
        grads=GradBuffers(owned, plan, leaves=leaves, num_leaves=num_leaves, borrowed=borrowed),
        optimizer=ShardedAdamW(
            parameters, specs, job.optim, precision=job.precision, tp=groups.tp, dp=groups.dp, tied=tied
        ),
        channel=channel,
        executor=Executor(stages, channel, stage_map=stage_map, rank=at.pp, waited_s=lambda: groups.waited_s),
        programs=Programs(job, groups, stages, plan, schedule=schedule, stage_map=stage_map, leaves=leaves),
        leaves=leaves,
        training=training,
        held_out=held_out,
        position=Position(),
    )


def _orders(job: Job, corpus_cache: Path, base_dir: Path) -> tuple[TrainingOrder, HeldOutOrder | None]:
    corpus = open_corpus(
        corpus_path(job.data.train[0].path, base_dir),
        split=job.data.split,
        tokenizer=job.data.tokenizer,
        cache_dir=corpus_cache,
    )
    readers = [
        None
        if stream is None
        else SampleReader(stream, seq=job.batch.seq, vocab=job.model.vocab, ignore_ids=job.data.ignore_ids)
        for stream in (corpus.train, corpus.held_out)
    ]
    assert readers[0] is not None
    return TrainingOrder(readers[0], job.run.seed), None if readers[1] is None else HeldOutOrder(readers[1])
