"""Whether the schedule that a job names can run in its layout. Needs no torch."""

from __future__ import annotations

from collections.abc import Iterator

from rayformer.config.job import Job
from rayformer.config.rules import batch_problems
from rayformer.errors import Problem
from rayformer.optim.tree import owned_leaves
from rayformer.stages import schedules


def schedule_problems(job: Job) -> Iterator[Problem]:
    """Whether the job's schedule can run in its layout, with as many microbatches as its replicas have."""
    yield from schedules.problems(
        job.schedule.name,
        pp=job.layout.pp,
        chunks=job.layout.virtual_stages,
        microbatches=_microbatches(job),
        **job.schedule.options,
    )


def _microbatches(job: Job) -> set[int]:
    """The numbers of microbatches that replicas have in a step; empty where dp is not known yet."""
    batch, dp, ramp = job.batch, job.layout.dp, job.batch.rampup
    if dp == "auto" or list(batch_problems(job)):
        return set()
    leaves = max(dp, dp if batch.virtual_ranks == "auto" else batch.virtual_ranks)
    sizes = {batch.global_, *(range(ramp.start, batch.global_, ramp.increment) if ramp else ())}
    return {
        len(owned_leaves(leaves, dp, rank)) * size // (batch.micro * leaves) for size in sizes for rank in range(dp)
    }
