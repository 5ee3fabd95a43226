"""What a submission of a job will do: everything that is decided before the first cell starts. Needs no torch."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import yaml

from rayformer.cell.origin import Origin, checkpoint_folder, find_origin, run_folder, shown_job, starts_anew
from rayformer.cell.schedule import schedule_problems
from rayformer.ckpt.initial import absolute, copy_companions
from rayformer.ckpt.manifest import MANIFEST, find_checkpoints
from rayformer.ckpt.storage import Folder, LocalFolder, folder_at, without_keys
from rayformer.config.job import Job
from rayformer.config.keys import is_key, nearest_key
from rayformer.config.rules import batch_problems
from rayformer.errors import CheckpointError, ConfigError, Problem, RunError
from rayformer.events import CellDone
from rayformer.observe.rundir import RunDir

EXIT_FINISHED, EXIT_FAILED, EXIT_BAD_JOB, EXIT_STOPPED, EXIT_ABORTED = 0, 1, 2, 75, 130


@dataclass(frozen=True, kw_only=True)
class RunPlan:
    """A resolved job and where it starts from. ``until`` is the last step of this attempt.

    ``init_from`` names the weights of a first start, if they are not drawn.

    Relative data paths start from ``base_dir``. ``go_on`` says how to go on if this attempt stops before the last step.
    """

    job: Job
    run_dir: Path
    checkpoints: Folder
    base_dir: Path
    attempt: int
    start_from: Folder | None
    init_from: str | None
    done_steps: int
    consumed_samples: int
    until: int
    anew: bool
    go_on: str
    notes: tuple[str, ...] = ()

    @property
    def files(self) -> RunDir:
        return RunDir(self.run_dir)

    @property
    def done_before(self) -> CellDone | None:
        """How the run ends if there is nothing left to do, because the checkpoint is already at the last step."""
        if self.start_from is None or self.done_steps < self.until:
            return None
        return CellDone(
            generation=0,
            outcome="finished" if self.done_steps >= self.job.run.steps else "stopped",
            step=self.done_steps,
            checkpoint=str(self.start_from),
        )


def data_parallel_width(job: Job, num_devices: int, *, exact: bool) -> int:
    """The dp of a job on ``num_devices`` devices, all of which must be used if ``exact``. Raises ConfigError."""
    layout = job.layout
    replica = layout.tp * layout.pp
    keys: dict[str, object] = {"world": num_devices, "layout.tp": layout.tp, "layout.pp": layout.pp}
    if layout.dp == "auto":
        if num_devices < replica or (exact and num_devices % replica):
            rule = f"a replica takes tp x pp = {replica} devices"
            raise ConfigError([Problem(keys=keys, rule=rule, fix="use a multiple of that, or a smaller tp or pp")])
        return num_devices // replica
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
    origin = _origin(job, fresh)
    resolved = origin.resolve(job, dp=dp)
    problems = [
        Problem(keys={"--allow-change": key}, rule="there is no such key", fix=nearest_key(key.split(".")))
        for key in allowed
        if not is_key(key)
    ]
    problems += [*batch_problems(resolved), *schedule_problems(resolved), *origin.problems(resolved, allowed=allowed)]
    if problems:
        raise ConfigError(problems)
    stop_at = resolved.run.stop_at
    anew = starts_anew(job, fresh=fresh)
    return RunPlan(
        job=resolved,
        run_dir=run_folder(job).path,
        checkpoints=checkpoint_folder(job),
        base_dir=Path.cwd(),
        attempt=1 if anew else run_folder(job).next_attempt(),
        start_from=origin.folder,
        init_from=absolute(job.checkpoint.init_from) if job.checkpoint.init_from and origin.folder is None else None,
        done_steps=origin.step,
        consumed_samples=origin.manifest.consumed_samples if origin.manifest else 0,
        until=resolved.run.steps if stop_at is None else stop_at,
        anew=anew,
        go_on=_go_on(job, anew),
        notes=tuple(_notes(job, resolved, origin)),
    )


@contextmanager
def open_run(plan: RunPlan) -> Iterator[None]:
    """Hold the run's folders and make them ready: for a new start what is there is set aside first, nothing is deleted.

    Raises RunError if another driver has them.
    """
    files, elsewhere = plan.files, plan.checkpoints != folder_at(plan.files.checkpoints)
    if plan.anew:
        files.set_aside()
        if elsewhere:
            _set_aside(plan.checkpoints)
    with ExitStack() as held:
        held.enter_context(files.lock())
        if elsewhere and isinstance(plan.checkpoints, LocalFolder):  # a store has no locks
            held.enter_context(RunDir(plan.checkpoints.path).lock())
        if plan.job.checkpoint.resume == "auto" and _origin(plan.job, fresh=plan.anew).folder != plan.start_from:
            raise RunError(f"{plan.checkpoints} has changed since this run was planned; give the same command again")
        files.create()
        if plan.init_from is not None:
            copy_companions(plan.init_from, plan.checkpoints)
        files.job_yaml.write_text(yaml.safe_dump(shown_job(plan.job), sort_keys=False), encoding="utf-8")
        yield


def pass_over(plan: RunPlan, name: str) -> bool:
    """Make the damaged checkpoint ``name`` none from now on, if the run may go on from another one."""
    if plan.job.checkpoint.resume != "auto":
        return False
    with suppress(OSError, CheckpointError):
        (plan.checkpoints / name).rename(MANIFEST, f"{MANIFEST}.damaged")
        return True
    return False


def _set_aside(directory: Folder) -> None:
    """Make what is there no checkpoints of this run; where a folder can be renamed, all of it at once."""
    found = find_checkpoints(directory)
    if not found:
        return
    if isinstance(directory, LocalFolder):
        RunDir(directory.path).set_aside()
        return
    for folder in found:
        folder.rename(MANIFEST, f"{MANIFEST}.before-{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}")


def _origin(job: Job, fresh: bool) -> Origin:
    try:
        return find_origin(job, fresh=fresh)
    except CheckpointError as error:
        keys = {"checkpoint.resume": job.checkpoint.resume}
        raise ConfigError([Problem(keys=keys, rule=str(error), fix="or use auto, never or --fresh")]) from None


def _go_on(job: Job, anew: bool) -> str:
    if job.run.stop_at is not None:
        return "raise run.stop_at or leave it out to go on"
    if anew:
        return "give the command again without --fresh or resume never to go on"
    if job.checkpoint.resume != "auto":
        return "give the command again with checkpoint.resume=auto to go on"
    return "give the same command again to go on"


def _notes(asked: Job, job: Job, origin: Origin) -> Iterator[str]:
    virtual_ranks, manifest = job.batch.num_virtual_ranks, origin.manifest
    for damage in origin.damaged:
        yield f"passed over a checkpoint that is not whole: {damage}"
    if manifest is not None:
        yield f"goes on after step {manifest.step} of {origin.folder}"
        if virtual_ranks != manifest.virtual_ranks:
            yield (
                f"virtual_ranks is {virtual_ranks} from now on, it was {manifest.virtual_ranks}: the curve goes on to"
                " rounding, and the bits start anew"
            )
    elif asked.batch.virtual_ranks not in ("auto", virtual_ranks):
        yield f"virtual_ranks is {virtual_ranks}, not {asked.batch.virtual_ranks}: every replica needs at least one"
    if manifest is None and job.checkpoint.init_from is not None:
        yield f"starts from the weights of {without_keys(job.checkpoint.init_from)}"
    if not job.precision.deterministic:
        yield "precision.deterministic is off: the bits of two runs may differ"
