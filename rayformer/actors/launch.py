"""The driver: finds or starts Ray, starts the controller, shows what it tells, and turns signals into requests."""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, NoReturn, TextIO

import psutil
import ray
from ray.actor import ActorHandle
from ray.exceptions import RayActorError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rayformer.actors.controller import Controller
from rayformer.actors.failures import death_of
from rayformer.actors.shown import Membership, Noted, Recovered, RunEnded
from rayformer.cell.plan import (
    EXIT_ABORTED,
    EXIT_FINISHED,
    EXIT_STOPPED,
    RunPlan,
    data_parallel_width,
    open_run,
    pass_over,
    plan_run,
)
from rayformer.cell.report import report_at_end
from rayformer.config.cluster import ClusterConfig
from rayformer.config.job import Job
from rayformer.control.failure import explain
from rayformer.data.corpus import corpus_path, open_corpus
from rayformer.errors import ConfigError, DamagedError, Problem, RunError
from rayformer.events import CellDone, CheckpointSaved, StepReport, plain
from rayformer.observe.display import Display, make_display
from rayformer.observe.metrics import read_metrics
from rayformer.observe.summary import summary

NAMESPACE = "rayformer"
NAME_S = 10.0  # until Ray has forgotten an actor that was killed
SHOW_CURSOR = b"\x1b[?25h"
# Ray's workers have a lower priority than its own processes unless told otherwise, which costs steps where every core
# is a cell's; what nobody looks at twice a second need not be reported twice a second.
PRIVATE_RAY = {
    "worker_niceness": 0,
    "raylet_report_resources_period_milliseconds": 1000,
    "task_events_report_interval_ms": 2000,
    "metrics_report_interval_ms": 30000,
}


def run_job(job: Job, *, fresh: bool, allowed: Collection[str], out: TextIO) -> int:
    """Run a job on Ray to its end; the exit status. Raises ConfigError before anything starts, RunError if it fails."""
    plan = None if job.layout.dp == "auto" else plan_run(job, dp=job.layout.dp, fresh=fresh, allowed=allowed)
    if plan is not None and plan.done_before is not None:
        with open_run(plan):
            return _ended(plan, plan.done_before, out)
    with _connected(job) as dashboard:
        while True:
            _refuse_live(job.run.name)
            plan = plan or plan_run(job, dp=_auto_width(job), fresh=fresh, allowed=allowed)
            _refuse_too_few_devices(job, plan.job.layout.degrees.world)
            try:
                return _run_plan(plan, dashboard, out)
            except DamagedError as error:
                out.write(f"{error}\n")
            plan, fresh = plan_run(job, dp=plan.job.layout.degrees.dp, fresh=False, allowed=allowed), False


def _run_plan(plan: RunPlan, dashboard: str | None, out: TextIO) -> int:
    """Raises DamagedError if the checkpoint that it would go on from is not whole, and is none from now on."""
    with open_run(plan):
        if plan.done_before is not None:
            return _ended(plan, plan.done_before, out)
        _prepare_corpus(plan)
        return _run(plan, dashboard, out)


def _auto_width(job: Job) -> int:
    kind = "GPU" if _device(job) == "cuda" else "CPU"
    return data_parallel_width(job, int(ray.cluster_resources().get(kind, 0)), exact=False)


def _prepare_corpus(plan: RunPlan) -> None:
    data = plan.job.data
    path = corpus_path(data.train[0].path, plan.base_dir)
    open_corpus(path, split=data.split, tokenizer=data.tokenizer, cache_dir=plan.files.corpus_cache)


@contextmanager
def _connected(job: Job) -> Iterator[str | None]:
    """A connection to the job's Ray, a private one for ``local``; gives the dashboard's address."""
    try:
        yield _connect(job.cluster)
    except (KeyboardInterrupt, SystemExit):  # a signal before there is a run that could be stopped
        _exit_with_children()
    finally:
        ray.shutdown()


def _connect(cluster: ClusterConfig) -> str | None:
    private = {"include_dashboard": cluster.dashboard, "_system_config": PRIVATE_RAY}
    host, colon, port = cluster.address.rpartition(":")
    try:
        if colon:  # Ray itself would try for minutes, and say nothing
            socket.create_connection((host, int(port)), timeout=10).close()
        context = ray.init(
            address=cluster.address,
            namespace=NAMESPACE,
            log_to_driver=False,
            logging_level=logging.WARNING,
            **(private if cluster.address == "local" else {}),
        )
    except (OSError, ValueError) as error:
        raise RunError(
            f"no Ray answers at cluster.address={cluster.address}: {error}; use host:port, auto or local"
        ) from None
    return context.dashboard_url or None


def _refuse_too_few_devices(job: Job, world: int) -> None:
    """A private Ray gets no more accelerators by waiting for them."""
    num_gpus = int(ray.cluster_resources().get("GPU", 0))
    if job.cluster.address == "local" and _device(job) == "cuda" and world > num_gpus:
        keys = {"cluster.device": job.cluster.device, "world": world}
        rule = f"every cell needs an accelerator, and this machine has {num_gpus}"
        raise ConfigError([Problem(keys=keys, rule=rule, fix="use cluster.device=cpu, or a smaller layout")])


def _run(plan: RunPlan, dashboard: str | None, out: TextIO) -> int:
    job = plan.job
    display = make_display(job.observe.progress, out, run=job.run.name, dashboard=dashboard)
    controller = _start_controller(plan)
    try:
        _Signals(controller, display)
        if dashboard:
            display.note(f"dashboard: http://{dashboard}")
        display.note(f"{job.layout.degrees.world} cells on {_device(job)}, one CPU thread each")
        for note in plan.notes:
            display.note(note)
        ended = _follow(controller, display, job.run.steps)
    except RunError:
        display.note(f"report: {report_at_end(plan.files)}")
        raise
    finally:
        display.close()
        _end(controller, job.run.name)
    if ended.done is None:
        damaged = next((error for error in ended.errors if error.damaged), None)
        if damaged is not None and pass_over(plan, damaged.damaged):
            raise DamagedError(f"passed over {damaged.damaged}, which is not whole: {damaged.message}")
        places = f"  logs: {plan.files.logs}\n  report: {report_at_end(plan.files)}"
        raise RunError(f"the run {job.run.name} failed: {explain(ended.errors)}\n{places}")
    return _ended(plan, ended.done, out)


def _end(controller: ActorHandle, run: str) -> None:
    """Kill the controller, and return when its name is free."""
    ray.kill(controller)
    until = time.monotonic() + NAME_S
    with suppress(ValueError):
        while time.monotonic() < until:
            ray.get_actor(_controller_name(run))
            time.sleep(0.02)


def _refuse_live(run: str) -> None:
    """Before this driver touches the run's folder: its lock went with the driver that started a live controller."""
    with suppress(ValueError):
        ray.get_actor(_controller_name(run))
        raise _live(run)


def _start_controller(plan: RunPlan) -> ActorHandle:
    run = plan.job.run.name
    try:
        return (
            ray.remote(Controller)
            .options(
                name=_controller_name(run),
                lifetime="detached",
                num_cpus=0,
                max_restarts=0,
                # it writes the run's folder, which this driver has just made
                scheduling_strategy=NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False),
            )
            .remote(plan, _device(plan.job))
        )
    except ValueError:
        raise _live(run) from None


def _controller_name(run: str) -> str:
    return f"{run}/controller"


def _live(run: str) -> RunError:
    return RunError(
        f"the run {run} is live in this cluster: its controller {_controller_name(run)!r} is up; wait for it, stop it,"
        " or choose another run.name"
    )


def _follow(controller: ActorHandle, display: Display, total_steps: int) -> RunEnded:
    """Show what the controller tells until the run has ended."""
    running = controller.run.remote()
    try:
        for reference in controller.events.options(num_returns="streaming").remote():
            match ray.get(reference):
                case Membership(members=members):
                    display.membership({cell: plain(member) for cell, member in members.items()})
                case StepReport() as report:
                    display.step(report, total_steps)
                case CheckpointSaved() as saved:
                    display.saved(saved)
                case Recovered(values=values):
                    display.note(_recovery(values))
                case Noted(text=text):
                    display.note(text)
                case RunEnded() as ended:
                    return ended
        ray.get(running)
    except RayActorError as error:
        raise RunError(
            f"the controller is gone, and its workers with it; submit the job again to go on: {death_of(error)}"
        ) from None
    raise AssertionError("the controller's events ended without RunEnded")


def _recovery(values: dict[str, Any]) -> str:
    """One line for a repair."""
    cells, redone = ", ".join(values["cells"]) or "no cell", values["steps_redone"]
    steps = "no step" if not redone else f"{redone} step{'s' if redone > 1 else ''}"
    return (
        f"recovered {cells} in {values['total_s']:.2f} s from {values['source']}, {steps} done again: {values['cause']}"
    )


class _Signals:
    """The first SIGINT or SIGTERM asks for a checkpoint and the end; the second ends this process at once.

    A private Ray dies with this process. Handlers stay until the process ends: it may be told again while it cleans up.
    """

    def __init__(self, controller: ActorHandle, display: Display) -> None:
        self._controller, self._display = controller, display
        self._asked = threading.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._on_signal)
        threading.Thread(target=self._ask, daemon=True).start()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._asked.is_set():
            _exit_with_children()
        self._asked.set()

    def _ask(self) -> None:
        self._asked.wait()
        self._display.note("stopping after this step, with a checkpoint; once more to stop at once")
        self._controller.stop.remote("signal")


def _exit_with_children() -> NoReturn:
    """End now, and with it a private Ray, whose agents would else look for it for another minute."""
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            process.kill()
    if sys.stdout.isatty():
        os.write(sys.stdout.fileno(), SHOW_CURSOR)  # the live display had hidden it
    os._exit(EXIT_ABORTED)


def _ended(plan: RunPlan, done: CellDone, out: TextIO) -> int:
    files, steps = plan.files, plan.job.run.steps
    text = summary(done, total_steps=steps, lines=read_metrics(files.metrics), metrics=files.metrics, go_on=plan.go_on)
    out.write(f"{text}\n  report      {report_at_end(files)}\n")
    out.flush()
    return EXIT_FINISHED if done.outcome == "finished" else EXIT_STOPPED


def _device(job: Job) -> str:
    if job.cluster.device != "auto":
        return job.cluster.device
    return "cuda" if ray.cluster_resources().get("GPU") else "cpu"
