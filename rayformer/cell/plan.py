"""What a submission of a job will do: everything that is decided before the first cell starts. Needs no torch."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import yaml

from rayformer.ckpt.manifest import MANIFEST, Manifest, find_checkpoints, read_manifest
from rayformer.config.job import Job, resolve
from rayformer.config.keys import is_key, nearest_key
from rayformer.config.resume import resume_problems
from rayformer.config.rules import batch_problems
from rayformer.data import corpus
from rayformer.errors import CheckpointError, ConfigError, Problem
from rayformer.events import Outcome
from rayformer.observe.rundir import RunDir
from rayformer.stages import schedules

EXIT_FINISHED, EXIT_FAILED, EXIT_BAD_JOB, EXIT_STOPPED, EXIT_ABORTED = 0, 1, 2, 75, 130


@dataclass(frozen=True, kw_only=True)
class RunPlan:
    """A resolved job and where it starts from. ``until`` is the last step of this attempt."""

    job: Job
    run_dir: Path
    checkpoints: Path
    base_dir: Path
    attempt: int
    start_from: Path | None
    done_steps: int
    until: int
    notes: tuple[str, ...] = ()

    @property
    def is_done(self) -> bool:
        """Whether there is nothing left to do, because the checkpoint is already at the last step."""
        return self.start_from is not None and self.done_steps >= self.until

    @property
    def outcome(self) -> Outcome:
        """How this attempt ends if nothing goes wrong."""
        return "finished" if self.until == self.job.run.steps else "stopped"

    @property
    def files(self) -> RunDir:
        return RunDir(self.run_dir)


def job_problems(job: Job) -> Iterator[Problem]:
    """What keeps a job from running that is seen only by looking at files, or by the packages that know."""
    microbatches = max(1, job.batch.num_microbatches)
    yield from schedules.problems(
        job.schedule.name, pp=job.layout.pp, chunks=job.layout.virtual_stages, microbatches=microbatches
    )
    yield from corpus.problems(
        [(source.path, source.weight) for source in job.data.train],
        split=job.data.split,
        tokenizer=job.data.tokenizer,
        vocab=job.model.vocab,
        seq=job.batch.seq,
        cache_dir=run_folder(job).corpus_cache,
    )
    if "://" in job.checkpoint.dir:
        yield Problem(
            keys={"checkpoint.dir": job.checkpoint.dir},
            rule="only folders are possible so far",
            fix="name a folder that every node sees",
        )
    resume = job.checkpoint.resume
    if resume not in ("auto", "never"):
        try:
            read_manifest(Path(resume))
        except CheckpointError as error:
            yield Problem(keys={"checkpoint.resume": resume}, rule=str(error), fix="or use auto or never")


def run_folder(job: Job) -> RunDir:
    """The folder of the run that a job names."""
    return RunDir(Path(job.run.dir).absolute() / job.run.name)


def checkpoint_folder(job: Job) -> Path:
    """Where the checkpoints of a job lie."""
    return run_folder(job).checkpoints if job.checkpoint.dir == "auto" else Path(job.checkpoint.dir).absolute()


def data_parallel_width(job: Job, num_devices: int, *, exact: bool) -> int:
    """The dp of a job on ``num_devices`` devices, all of which must be used if ``exact``. Raises ConfigError."""
    layout = job.layout
    replica = layout.tp * layout.pp
    keys: dict[str, object] = {"world": num_devices, "layout.tp": layout.tp, "layout.pp": layout.pp}
    if layout.dp == "auto":
        if num_devices < replica or (exact and num_devices % replica):
            rule = f"a replica takes tp x pp = {replica} devices"
            raise ConfigError([Problem(keys=keys, rule=rule, fix="use a multiple of that, or a smaller tp or pp")])
        width = num_devices // replica
        resolved = job.model_copy(update={"layout": layout.model_copy(update={"dp": width})})
        problems = [Problem(keys={**keys, **p.keys}, rule=p.rule, fix=p.fix) for p in batch_problems(resolved)]
        if problems:
            raise ConfigError(problems)
        return width
    world = replica * layout.dp
    if exact and world != num_devices:
        rule = f"the layout has tp x pp x dp = {world} cells, and there are {num_devices} processes"
        keys = {**keys, "layout.dp": layout.dp}
        raise ConfigError([Problem(keys=keys, rule=rule, fix=f"start {world}, or use dp auto")])
    return layout.dp


def plan_run(job: Job, *, dp: int, fresh: bool, allowed: Collection[str]) -> RunPlan:
    """Decide where a job starts from; writes nothing. Raises ConfigError if it may not go on from what is there.

    ``allowed`` are the keys that may differ from the checkpoint's job.
    """
    start_from = None if fresh or job.checkpoint.resume == "never" else _start_from(job)
    manifest = None if start_from is None else read_manifest(start_from)
    resolved = resolve(job, dp=dp, recorded=_recorded(manifest))
    unknown = [key for key in allowed if not is_key(key)]
    if unknown:
        rule = "there is no such key"
        raise ConfigError(
            [Problem(keys={"--allow-change": key}, rule=rule, fix=nearest_key(key.split("."))) for key in unknown]
        )
    if manifest is not None:
        problems = resume_problems(manifest.job, resolved.dump(), allowed=allowed, checkpoint=str(start_from))
        if problems:
            raise ConfigError(problems)
    steps, stop_at = resolved.run.steps, resolved.run.stop_at
    done = manifest.step if manifest else 0
    return RunPlan(
        job=resolved,
        run_dir=run_folder(job).path,
        checkpoints=checkpoint_folder(job),
        base_dir=Path.cwd(),
        attempt=1 if fresh or job.checkpoint.resume == "never" else run_folder(job).next_attempt(),
        start_from=start_from,
        done_steps=done,
        until=steps if stop_at is None else stop_at,
        notes=tuple(_notes(resolved, manifest, start_from)),
    )


@contextmanager
def open_run(plan: RunPlan, *, fresh: bool) -> Iterator[None]:
    """Hold the run's folder and make it ready: with ``fresh`` what is there is set aside first, nothing is deleted.

    Raises RunError if another driver has it.
    """
    files = plan.files
    if fresh or plan.job.checkpoint.resume == "never":
        files.set_aside()
        if plan.checkpoints != files.checkpoints and find_checkpoints(plan.checkpoints):
            RunDir(plan.checkpoints).set_aside()
    with files.lock():
        files.create()
        files.job_yaml.write_text(yaml.safe_dump(plan.job.dump(), sort_keys=False), encoding="utf-8")
        if plan.start_from is not None and plan.start_from.parent == plan.checkpoints:
            for folder in find_checkpoints(plan.checkpoints):
                if folder.name > plan.start_from.name:  # what follows is another attempt's
                    (folder / MANIFEST).rename(folder / f"{MANIFEST}.superseded")
        yield


def _start_from(job: Job) -> Path | None:
    if job.checkpoint.resume != "auto":
        return Path(job.checkpoint.resume).absolute()
    found = find_checkpoints(checkpoint_folder(job))
    return found[0] if found else None


def _recorded(manifest: Manifest | None) -> dict[str, int]:
    if manifest is None:
        return {}
    return {"virtual_ranks": manifest.virtual_ranks, "decay_steps": manifest.job["optim"]["decay_steps"]}


def _notes(job: Job, manifest: Manifest | None, start_from: Path | None) -> Iterator[str]:
    if manifest is None:
        return
    yield f"goes on after step {manifest.step} of {start_from}"
    virtual_ranks = job.batch.num_virtual_ranks
    if virtual_ranks != manifest.virtual_ranks:
        yield (
            f"virtual_ranks is {virtual_ranks} from now on, it was {manifest.virtual_ranks}: the curve goes on to"
            " rounding, and the bits start anew"
        )
