"""``python -m rayformer.cell JOB``: the same run without Ray, in one process or one of many under torchrun.

Takes the arguments of ``rayformer train``, writes the same run folder, gives the same exit statuses and the same bits.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType

import torch
import torch.distributed as dist

from rayformer.cell.build import Cell, build_cell
from rayformer.cell.loop import train
from rayformer.cell.plan import (
    EXIT_ABORTED,
    EXIT_BAD_JOB,
    EXIT_FAILED,
    EXIT_FINISHED,
    EXIT_STOPPED,
    RunPlan,
    data_parallel_width,
    open_run,
    pass_over,
    plan_run,
)
from rayformer.cell.problems import job_problems
from rayformer.cell.process import prepare_process
from rayformer.cell.report import report_at_end
from rayformer.cell.state import load_checkpoint, load_weights
from rayformer.ckpt.storage import Folder
from rayformer.config.job import Job
from rayformer.config.load import load_job
from rayformer.errors import CollectiveError, ConfigError, DamagedError, Problem, RayformerError
from rayformer.events import CellDone, CellError, JournalEntry, plain
from rayformer.groups import Groups, StoreClients
from rayformer.observe.display import make_display
from rayformer.observe.metrics import read_metrics
from rayformer.observe.recorder import Recorder
from rayformer.observe.summary import summary


@dataclass(frozen=True, kw_only=True)
class Place:
    """Which process this is, from the variables that torchrun sets; without them, the only one.

    ``restarts`` counts how often torchrun has started all processes again.
    """

    rank: int
    world: int
    local_rank: int
    local_world: int
    restarts: int

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> Place:
        names = {
            "rank": ("RANK", "0"),
            "world": ("WORLD_SIZE", "1"),
            "local_rank": ("LOCAL_RANK", "0"),
            "local_world": ("LOCAL_WORLD_SIZE", environ.get("WORLD_SIZE", "1")),
            "restarts": ("TORCHELASTIC_RESTART_COUNT", "0"),
        }
        return cls(**{field: int(environ.get(*name)) for field, name in names.items()})


def main(arguments: Sequence[str], environ: Mapping[str, str]) -> int:
    """Run one process of a job; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m rayformer.cell", description=__doc__)
    parser.add_argument("job", type=Path)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="overrides")
    parser.add_argument("--fresh", action="store_true")
    parser.add_argument("--allow-change", action="append", default=[], metavar="KEY")
    options = parser.parse_args(arguments)
    place = Place.of(environ)
    try:
        job = load_job(options.job, options.overrides, [partial(job_problems, fresh=options.fresh)])
        device = _device(job, place)
        dp = data_parallel_width(job, place.world, exact=True)
        plan = plan_run(job, dp=dp, fresh=options.fresh, allowed=options.allow_change)
        return _run(plan, place, device)
    except ConfigError as error:
        for problem in error.problems if place.rank == 0 else ():
            print(f"error: {problem}", file=sys.stderr)
        return EXIT_BAD_JOB
    except RayformerError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_FAILED
    except KeyboardInterrupt:
        return EXIT_ABORTED


def _device(job: Job, place: Place) -> torch.device:
    """Where this process computes. Raises ConfigError for what this entry point can't do."""
    if place.local_world != place.world:
        keys = {"WORLD_SIZE": place.world, "LOCAL_WORLD_SIZE": place.local_world}
        raise ConfigError([Problem(keys=keys, rule="one node only", fix="on several nodes use Ray: rayformer train")])
    wanted, count = job.cluster.device, torch.cuda.device_count()
    if wanted == "cuda" and count < place.local_world:
        rule = f"{place.local_world} processes need a device each, and torch sees {count}"
        raise ConfigError([Problem(keys={"cluster.device": wanted}, rule=rule, fix="use cpu, or fewer processes")])
    if wanted == "cpu" or (wanted == "auto" and count < place.local_world):
        return torch.device("cpu")
    return torch.device("cuda", place.local_rank)


def _run(plan: RunPlan, place: Place, device: torch.device) -> int:
    stop = _StopFlag()
    with ExitStack() as stack:
        recorder = stack.enter_context(_recorder(plan, place)) if place.rank == 0 else None
        done = plan.done_before
        if done is None:
            cell = stack.enter_context(_cell(plan, place, device))
            done = _train(plan, cell, stop, recorder)
        if recorder is not None:
            recorder.display.close()
            lines, files = read_metrics(plan.files.metrics), plan.files
            print(summary(done, total_steps=plan.job.run.steps, lines=lines, metrics=files.metrics, go_on=plan.go_on))
    return EXIT_FINISHED if done.outcome == "finished" else EXIT_STOPPED


def _train(plan: RunPlan, cell: Cell, stop: _StopFlag, recorder: Recorder | None) -> CellDone:
    world = cell.groups.world
    owner = {
        "worker": f"rank-{world.rank}",
        "pid": os.getpid(),
        "node": socket.gethostname(),
        "param_addr": cell.param_address,
    }
    members = dict(world.gather_values((str(cell.groups.cell), owner)))
    if recorder is not None:
        recorder.membership(cell.groups.generation, members)
    events = train(
        cell,
        checkpoints=plan.checkpoints,
        until=plan.until,
        should_stop=lambda: stop.is_set,
    )
    for event in events:
        if recorder is not None:
            recorder.take(event)
        if isinstance(event, CellDone):
            return event
    raise AssertionError("the loop ended without CellDone")


@contextmanager
def _recorder(plan: RunPlan, place: Place) -> Iterator[Recorder]:
    """Holds the run's folder, made ready, for as long as this process runs it."""
    with open_run(plan):
        job = plan.job
        display = make_display(job.observe.progress, sys.stdout, run=job.run.name)
        recorder = Recorder(plan.files, attempt=plan.attempt, total_steps=job.run.steps, display=display)
        try:
            for note in plan.notes:
                display.note(note)
            if job.faults:
                display.note(f"{len(job.faults)} faults are left out: only rayformer train can repair what they do")
            yield recorder
        except Exception as error:
            with suppress(OSError):  # the disk may be the cause
                recorder.journal(_failure(plan, place, error))
            raise
        finally:
            recorder.close()
            print(f"  report      {report_at_end(plan.files)}", flush=True)


def _failure(plan: RunPlan, place: Place, error: Exception) -> JournalEntry:
    failed = CellError(
        cell=str(next(iter(plan.job.layout.degrees.cells()))),
        worker=f"rank-{place.rank}",
        kind="collateral" if isinstance(error, CollectiveError) else "raised",
        message=f"{type(error).__name__}: {error}",
    )
    return JournalEntry(kind="failed", generation=1 + place.restarts, values={"errors": [plain(failed)]})


@contextmanager
def _cell(plan: RunPlan, place: Place, device: torch.device) -> Iterator[Cell]:
    job = plan.job
    if device.type == "cuda":
        torch.cuda.set_device(device)
    prepare_process(job, device)
    store = StoreClients(next(iter(dist.rendezvous("env://")))[0]) if place.world > 1 else None
    groups = Groups.form(
        layout=job.layout.degrees,
        rank=place.rank,
        generation=1 + place.restarts,
        run=job.run.name,
        store=store,
        device=device,
    )
    try:
        cell = build_cell(job, groups, corpus_cache=plan.files.corpus_cache, base_dir=plan.base_dir)
        if plan.start_from is not None:
            _load(cell, plan, plan.start_from)
        elif plan.init_from is not None:
            load_weights(cell, plan.init_from)
        yield cell
    finally:
        groups.close()


def _load(cell: Cell, plan: RunPlan, folder: Folder) -> None:
    try:
        load_checkpoint(cell, folder)
    except DamagedError as error:
        if pass_over(plan, folder.name):
            message = f"{error}; it is no checkpoint from now on, give the command again to go on from an older one"
            raise DamagedError(message) from None
        raise


class _StopFlag:
    """Set by the first SIGINT or SIGTERM; the second ends the process at once."""

    def __init__(self) -> None:
        self.is_set = False
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.is_set:
            os._exit(EXIT_ABORTED)
        self.is_set = True


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], os.environ))
