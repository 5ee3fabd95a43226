"""The report of a run, from its folder: the pipeline as its job has it, and the environment its checkpoints name."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from rayformer.cell.measured import measured_pipeline
from rayformer.ckpt.manifest import find_checkpoints, read_manifest
from rayformer.ckpt.storage import folder_at
from rayformer.config.job import Job
from rayformer.errors import CheckpointError, ConfigError
from rayformer.observe.report.bars import Pipeline
from rayformer.observe.report.page import write_report
from rayformer.observe.report.record import job_of
from rayformer.observe.rundir import RunDir
from rayformer.observe.trace import last_step
from rayformer.stages.check import check
from rayformer.stages.schedules import get_schedule

MAX_SLOTS = 1600


def report_run(files: RunDir) -> Path:
    """Write report.html into a run's folder from what lies there; its path."""
    try:
        job = Job.model_validate(job_of(files))
    except ValidationError:  # missing, or of another version: the rest can still be shown
        return write_report(files)
    pipelines = (pipeline_of(job), measured_pipeline(job, last_step(files.trace)))
    return write_report(files, pipelines=list(filter(None, pipelines)), environment=_environment(files, job))


def report_at_end(files: RunDir) -> str:
    """Write report.html at the end of a run; where it is, or why it is not.

    Whatever goes wrong is told and no more: the run is over, and its outcome does not depend on its report.
    """
    try:
        return str(report_run(files))
    except Exception as error:
        return f"not written: {type(error).__name__}: {error}"


def pipeline_of(job: Job) -> Pipeline | None:
    """One step of one replica, simulated with a backward that takes twice its forward; None if it can't be."""
    layout, batch = job.layout, job.batch
    if layout.dp == "auto" or batch.virtual_ranks == "auto":
        return None
    pp, chunks = layout.pp, layout.virtual_stages
    per_replica = batch.num_microbatches // batch.num_virtual_ranks * -(-batch.num_virtual_ranks // layout.dp)
    shown = max(1, min(per_replica, MAX_SLOTS // (2 * pp * chunks)))
    try:
        schedule = get_schedule(job.schedule.name, **job.schedule.options)
    except ConfigError:
        return None
    found = check(schedule.programs(pp, chunks, shown), rendezvous=False, vee=schedule.vee)
    of_all = "" if shown == per_replica else f" of {per_replica}"
    note = f"{job.schedule.name}, one step of a replica: {pp} ranks, {shown}{of_all} microbatches"
    if shown == per_replica:
        note += f"; {100 * found.bubble_of_total:.1f} % of the time is lost where backward takes twice forward"
    return Pipeline(ranks=[[(str(slot.op), slot.start, slot.end) for slot in row] for row in found.timeline], note=note)


def _environment(files: RunDir, job: Job) -> Mapping[str, Any]:
    """That of the newest checkpoint, if there is one that can be read."""
    folder = folder_at(files.checkpoints if job.checkpoint.dir == "auto" else job.checkpoint.dir)
    with suppress(CheckpointError, OSError):
        for found in find_checkpoints(folder)[:1]:
            return read_manifest(found).environment
    return {}
