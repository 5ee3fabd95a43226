"""What keeps a job from running that is seen only by looking at files, or by the packages that know. Needs no torch."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from rayformer.cell.origin import Origin, checkpoint_folder, find_origin, run_folder
from rayformer.cell.schedule import schedule_problems
from rayformer.ckpt import initial
from rayformer.ckpt.storage import LocalFolder, without_keys
from rayformer.config.job import Job
from rayformer.config.model import ModelConfig
from rayformer.config.rules import batch_problems
from rayformer.data import corpus
from rayformer.errors import CheckpointError, ConfigError, Problem
from rayformer.stages import split


def job_problems(job: Job, *, fresh: bool = False) -> Iterator[Problem]:
    """Every problem that ``job`` has with its schedule, its data, its folders, and the checkpoint it goes on from."""
    yield from schedule_problems(job)
    yield from _stages(job)
    yield from corpus.problems(
        [(source.path, source.weight) for source in job.data.train],
        split=job.data.split,
        tokenizer=job.data.tokenizer,
        vocab=job.model.vocab,
        seq=job.batch.seq,
        cache_dir=run_folder(job).corpus_cache,
    )
    yield from _folder("run.dir", job.run.dir, run_folder(job).path)
    origin = Origin()
    try:
        directory = checkpoint_folder(job)
        if job.checkpoint.dir != "auto" and isinstance(directory, LocalFolder):
            yield from _folder("checkpoint.dir", job.checkpoint.dir, directory.path)
        directory.names()
    except CheckpointError as error:
        fix = "name a folder that every node sees, or a URI of pyarrow.fs such as s3://bucket/runs"
        yield Problem(keys={"checkpoint.dir": job.checkpoint.dir}, rule=str(error), fix=fix)
    else:
        try:
            origin = find_origin(job, fresh=fresh)
        except CheckpointError as error:
            yield Problem(
                keys={"checkpoint.resume": job.checkpoint.resume}, rule=str(error), fix="or use auto, never or --fresh"
            )
    if job.checkpoint.init_from is not None and origin.folder is None:
        yield from _initial(job, job.checkpoint.init_from)
    known = origin.manifest is not None and job.layout.dp != "auto"
    yield from batch_problems(origin.resolve(job, dp=job.layout.dp) if known else job)


def _initial(job: Job, where: str) -> Iterator[Problem]:
    """Whether there are weights of this model to start from."""
    try:
        yield from initial.problems(where, job)
    except CheckpointError as error:
        fix = "name hf:FOLDER of a Hugging Face model, or a checkpoint"
        yield Problem(keys={"checkpoint.init_from": without_keys(where)}, rule=str(error), fix=fix)


def _stages(job: Job) -> Iterator[Problem]:
    pp, chunks = job.layout.pp, job.layout.virtual_stages
    if isinstance(job.model, ModelConfig):
        yield from split.problems(job.layout.stages, layers=job.model.layers, pp=pp, chunks=chunks)
        return
    sys.path.append(str(Path.cwd()))
    module = job.model.factory.partition(":")[0]
    try:
        found = importlib.util.find_spec(module) is not None
    except ImportError:  # a package above it is missing
        found = False
    finally:
        sys.path.pop()
    if not found:
        rule, fix = f"there is no module {module}", f"put it on PYTHONPATH or into {Path.cwd()}"
        yield Problem(keys={"model.factory": job.model.factory}, rule=rule, fix=fix)
        return
    from rayformer.cell.model import load_model  # only a model of the user's own needs torch before the start

    try:
        blocks, _ = load_model(job.model, Path.cwd())
    except ConfigError as error:
        yield from error.problems
        return
    layers = len(blocks) - 2
    yield from split.problems(job.layout.stages, layers=layers, pp=pp, chunks=chunks)
    if job.layout.stages == "auto" and layers < pp * chunks:
        rule = f"every pipeline stage needs at least one layer, and the factory made {layers}"
        yield Problem(
            keys={"model.factory": job.model.factory, "layout.pp": pp}, rule=rule, fix=f"use pp of at most {layers}"
        )


def _folder(key: str, value: str, folder: Path) -> Iterator[Problem]:
    """Whether ``folder`` is one, or can be made."""
    nearest = next(path for path in (folder, *folder.parents) if os.path.lexists(path))
    if not nearest.is_dir():
        yield Problem(keys={key: value}, rule=f"{nearest} is not a folder", fix="name a folder")
    elif not os.access(nearest, os.W_OK | os.X_OK):
        yield Problem(keys={key: value}, rule=f"{nearest} may not be written to", fix="name another folder")
