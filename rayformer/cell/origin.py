"""Where a run starts from: nothing, or a checkpoint, which then decides what the job leaves open."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from rayformer.ckpt.manifest import Manifest, check_files, find_checkpoints, read_manifest
from rayformer.ckpt.storage import Folder, folder_at, without_keys
from rayformer.config.job import Job, resolve
from rayformer.config.resume import resume_problems
from rayformer.errors import CheckpointError, DamagedError, Problem
from rayformer.observe.rundir import RunDir


@dataclass(frozen=True, kw_only=True)
class Origin:
    """The checkpoint a run goes on from; both are None for a first start.

    ``damaged`` tells of newer ones that are not whole.
    """

    folder: Folder | None = None
    manifest: Manifest | None = None
    damaged: tuple[str, ...] = ()

    @property
    def step(self) -> int:
        return self.manifest.step if self.manifest else 0

    def resolve(self, job: Job, *, dp: int) -> Job:
        """The job with what it leaves open filled in as the first run did."""
        if self.manifest is None:
            return resolve(job, dp=dp, recorded={})
        recorded = {
            "virtual_ranks": self.manifest.virtual_ranks,
            "decay_steps": self.manifest.job["optim"]["decay_steps"],
        }
        return resolve(job, dp=dp, recorded=recorded)

    def problems(self, resolved: Job, *, allowed: Collection[str]) -> list[Problem]:
        """Why ``resolved`` may not go on from here; keys in ``allowed`` may differ."""
        if self.manifest is None:
            return []
        recorded = dict(self.manifest.job)
        with suppress(ValidationError):  # it has a key that is no longer known: tell the difference as it stands
            recorded = Job.model_validate(recorded).dump()  # keys that are newer than the checkpoint get their defaults
        return resume_problems(recorded, resolved.dump(), allowed=allowed, checkpoint=str(self.folder))


def run_folder(job: Job) -> RunDir:
    """The folder of the run that a job names."""
    return RunDir(Path(job.run.dir).expanduser().absolute() / job.run.name)


def checkpoint_folder(job: Job) -> Folder:
    """Where the checkpoints of a job lie. Raises CheckpointError for a URI that is none."""
    if job.checkpoint.dir == "auto":
        return folder_at(run_folder(job).checkpoints)
    return folder_at(job.checkpoint.dir)


def shown_job(job: Job) -> dict[str, Any]:
    """A job as it is written down, without the keys to a storage."""
    tree = job.dump()
    section = tree["checkpoint"]
    section |= {key: without_keys(section[key]) for key in ("dir", "resume", "init_from") if section[key] is not None}
    return tree


def starts_anew(job: Job, *, fresh: bool) -> bool:
    """Whether whatever an earlier attempt left is set aside."""
    return fresh or job.checkpoint.resume == "never"


def find_origin(job: Job, *, fresh: bool) -> Origin:
    """Where ``job`` starts from: with auto the newest checkpoint that is whole, as far as is seen without reading it.

    Raises CheckpointError if none can be read, or it is another run's.
    """
    if starts_anew(job, fresh=fresh):
        return Origin()
    if job.checkpoint.resume != "auto":
        folder = folder_at(job.checkpoint.resume)
        return Origin(folder=folder, manifest=_of_run(folder, read_manifest(folder)))
    found = find_checkpoints(checkpoint_folder(job))
    damaged: list[str] = []
    for folder in found:
        try:
            manifest = read_manifest(folder)
            check_files(folder, manifest)
        except DamagedError as error:
            damaged.append(str(error))
            continue
        _check_owner(folder, _of_run(folder, manifest), job)
        return Origin(folder=folder, manifest=manifest, damaged=tuple(damaged))
    if damaged:
        raise CheckpointError(f"none of its {len(found)} checkpoints is whole: {damaged[0]}")
    return Origin()


def _of_run(folder: Folder, manifest: Manifest) -> Manifest:
    if "optim" not in manifest.job:
        raise CheckpointError(f"{folder} holds weights that were imported, and no run; name it in checkpoint.init_from")
    return manifest


def _check_owner(folder: Folder, manifest: Manifest, job: Job) -> None:
    owner = manifest.job["run"]["name"]
    if owner != job.run.name:
        raise CheckpointError(
            f"{folder} is a checkpoint of the run {owner!r}, not of {job.run.name!r}; give each run its own"
            f" checkpoint.dir, or name that checkpoint in checkpoint.resume to branch off"
        )
