"""The time from kill -9 of one worker to the next step told: rayformer against Ray Train and torchrun, in turn.

    python benchmarks/repair.py [--rounds 3] [--kills 2] [--warm-kills 6] [--only NAME ...]

Every system trains the same model on the same batches with 8 processes of one thread; the losses of their first steps
must agree to 1e-3, or the run is void. In every round each system is started alone and left to get going, and workers
are killed one at a time, in random order, none twice before all have been; then it is ended, and the next one has its
turn, in an order that changes with the round. This process does nothing but watch: the clock runs from the kill to the
first line of the metrics file that the system writes after the repair (a later generation), looked for every 5 ms. For
the peers that line is a step done before and redone, and no more is asked of them; ``regain_s`` runs on to the first
step that was not done before. One step is the median of the last five steps before each kill.

warm        rayformer, tp 2 x pp 2 x dp 2, a snapshot every step, one standby on the node, no checkpoint. The next kill
            comes when the next standby has come to rest; whether one took over is told with each time.
cold        the same without a standby.
ray-train   TorchTrainer (DDP over Gloo), max_failures=-1, a checkpoint every 5 steps kept by report(), local storage,
            RAY_TRAIN_HEALTH_CHECK_INTERVAL_S=0.2 (2 by default), no dashboard, worker_niceness=0 (as rayformer has it).
torchrun    the same DDP loop, standalone, --max-restarts 1000, --monitor-interval 0.1, torch.save every 5 steps, a
            prefix of the agent's store for every restart (without it restarts hang in torch 2.13).

The peers' processes import nothing that their loop doesn't need, and find weights and batches ready. Bars: warm median
at most 0.7 s and p95 at most 1.2 s, less one step; cold median at most 3 s; medians of the peers over the warm one, at
least 15 for Ray Train and 8 for torchrun. Writes benchmarks/results/repair-DATE.json unless only some systems ran.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
import yaml
from peers import DDP, Data
from restarted import BATCHES, CHECKPOINT_EVERY, METRICS, PIDS, WEIGHTS
from same import same_model
from sides import write_result
from workloads import REPAIRED, job_tree, write_corpus

from rayformer.observe.jsonl import read_lines

LAYOUT = {"tp": 2, "pp": 2, "dp": 2}
NUM_WORKERS = 8
NUM_BATCHES = 10_000
CHECKED_STEPS, MAX_DIFFERENCE = 5, 1e-3
STEADY_STEPS = 3 * CHECKPOINT_EVERY  # since the start or the last repair, before the next kill
LIMIT_S = 180.0  # then a system hangs
REST_S = 2.0
LOOK_EVERY_S = 0.005
LOG = "log"
HERE = Path(__file__).parent
ENVIRON = {
    "OMP_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "RAY_AUTH_MODE": "disabled",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2",
}
TORCHRUN = ["--standalone", "--nproc-per-node", str(NUM_WORKERS), "--max-restarts", "1000", "--monitor-interval", "0.1"]
BARS = {
    "warm_median_less_step_s": "<= 0.7",
    "warm_p95_less_step_s": "<= 1.2",
    "cold_median_s": "<= 3",
    "ray_train_over_warm": ">= 15",
    "torchrun_over_warm": ">= 8",
}

Line = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--kills", type=int, default=2, help="of each system in a round")
    parser.add_argument("--warm-kills", type=int, default=6, help="of rayformer with a standby in a round")
    parser.add_argument("--only", action="append", choices=list(SYSTEMS))
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that what was started is ended
    names = options.only or list(SYSTEMS)
    series = {name: Series(victims=victims(name)) for name in names}
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        prepare(Path(folder))
        for number in range(options.rounds):
            first = number % len(names)
            for name in names[first:] + names[:first]:
                num_kills = options.warm_kills if name == "warm" else options.kills
                take_turn(name, number, num_kills, Path(folder), series[name])
    losses = {name: series[name].losses for name in names}
    difference = max(abs(a - b) for steps in zip(*losses.values()) for a in steps for b in steps)
    if not difference <= MAX_DIFFERENCE:
        raise SystemExit(f"void: the losses differ by {difference}: {losses}")
    runs = {name: figures(series[name]) for name in names}
    print(f"losses of the first {CHECKED_STEPS} steps within {difference:.1e}")
    for name, row in runs.items():
        print(f"{name:9}  {words({key: value for key, value in row.items() if key != 'rows'})}")
    if options.only is None:
        compared = compare(runs)
        for figure, value in compared.items():
            print(f"{figure:24} {value:6.2f}   bar {BARS[figure]}")
        result = {
            "figure": "seconds from kill -9 of a worker to the first line of metrics after the repair, systems in turn",
            "compared": compared,
            "bars": BARS,
            "max_loss_difference": difference,
            "losses": losses,
            "runs": runs,
            "settings": {"rounds": options.rounds, **SETTINGS},
        }
        write_result("repair", result)


@dataclass(kw_only=True)
class Series:
    """What a system has shown in all its turns so far, and which worker is next."""

    victims: Iterator[tuple[int, float]]
    rows: list[Line] = field(default_factory=list)
    step_s: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)


def take_turn(name: str, number: int, num_kills: int, folder: Path, series: Series) -> None:
    """Start a system and kill workers of it; one that hangs ends its turn."""
    with running(SYSTEMS[name], folder / f"{name}-{number}") as run:
        for _ in range(num_kills):
            row = {"round": number, **run.kill(*next(series.victims))}
            series.rows.append(row)
            print(f"{name:9}  {words(row)}", flush=True)
            if "hung" in row:
                break
    series.step_s += run.step_s
    series.losses = [line["loss"] for line in run.lines[:CHECKED_STEPS]]


def victims(name: str) -> Iterator[tuple[int, float]]:
    """Which worker is killed next, none twice before all have been, and after how much of a second."""
    chance = random.Random(name)
    while True:
        for number in chance.sample(range(NUM_WORKERS), NUM_WORKERS):
            yield number, chance.random()


def prepare(folder: Path) -> None:
    """The corpus, and for the peers the weights and batches as files."""
    data = Data(REPAIRED, write_corpus(folder / "corpus", REPAIRED.vocab))
    torch.save(same_model(REPAIRED).state_dict(), folder / WEIGHTS)
    batches = np.empty((NUM_BATCHES, 2, REPAIRED.global_batch, REPAIRED.seq), dtype=np.uint16)
    for number in range(NUM_BATCHES):
        batches[number] = torch.stack(data.batch(number)).numpy()
    np.save(folder / BATCHES, batches)


@dataclass(frozen=True, kw_only=True)
class System:
    """How to start a system in a folder, where its lines are, the pid of each worker, and what is known of a repair.

    ``is_ready`` says whether the next kill finds the system as it is meant to be.
    """

    command: Callable[[Path], list[str]]
    metrics: Callable[[Path], Path]
    workers: Callable[[Path], dict[str, int]]
    details: Callable[[Path, str, float], Line]
    is_ready: Callable[[Path], bool] = lambda folder: True


def ours(num_standbys: int) -> System:
    def command(folder: Path) -> list[str]:
        tree = job_tree(REPAIRED, folder.parent / "corpus", **LAYOUT)
        tree["run"].update(name="repair", dir=str(folder))
        tree["optim"]["betas"] = list(tree["optim"]["betas"])  # YAML has no tuples
        (folder / "job.yaml").write_text(yaml.safe_dump({**tree, **settings(num_standbys)}))
        return ["-m", "rayformer.cli.main", "train", str(folder / "job.yaml")]

    def members(folder: Path) -> dict[str, Line]:
        lines = read_lines(folder / "repair" / "journal.jsonl")
        return [line for line in lines if line["kind"] == "membership"][-1]["cells"]

    def details(folder: Path, cell: str, killed_at: float) -> Line:
        """The journal's figures, and whether the cell was taken over by a process that was there before."""
        repaired: list[Line] = []
        while not repaired:  # it is written after the step's line
            time.sleep(0.1)
            lines = [line for line in read_lines(folder / "repair" / "journal.jsonl") if line["time"] > killed_at]
            repaired = [line for line in lines if line["kind"] == "recovered"]
        keys = ("source", "drain_s", "form_s", "restore_s", "first_step_s", "total_s")
        return {
            "standby": psutil.Process(members(folder)[cell]["pid"]).create_time() < killed_at,
            "notice_s": lines[0]["time"] - killed_at,
            **{key: repaired[0][key] for key in keys},
        }

    def has_standby(folder: Path) -> bool:
        """Whether there is a process without a cell that has done its warming up: it rests."""
        newest = max((folder / "repair" / "logs").glob("worker-*.log"))
        began = re.search(r" is process (\d+)", newest.read_text())
        if began is None or (pid := int(began[1])) in (member["pid"] for member in members(folder).values()):
            return False
        used_s = sum(psutil.Process(pid).cpu_times()[:2])
        time.sleep(REST_S)
        return sum(psutil.Process(pid).cpu_times()[:2]) - used_s < REST_S / 50

    return System(
        command=command,
        metrics=lambda folder: folder / "repair" / "metrics.jsonl",
        workers=lambda folder: {cell: member["pid"] for cell, member in members(folder).items()},
        details=details,
        is_ready=has_standby if num_standbys else lambda folder: True,
    )


def settings(num_standbys: int) -> dict[str, Any]:
    """What rayformer's job says besides the workload."""
    return {
        "recovery": {"standbys_per_node": num_standbys, "snapshot_every": 1, "max_failures": -1},
        "checkpoint": {"every": 0},
        "cluster": {"dashboard": False, "device": "cpu"},
        "observe": {"progress": "none"},
    }


def peer(command: Callable[[Path], list[str]]) -> System:
    def started(folder: Path) -> list[str]:
        (folder / PIDS).mkdir()
        for name in (WEIGHTS, BATCHES):
            (folder / name).symlink_to(folder.parent / name)
        return command(folder)

    return System(
        command=started,
        metrics=lambda folder: folder / METRICS,
        workers=lambda folder: {path.name: int(path.read_text()) for path in (folder / PIDS).iterdir()},
        details=lambda folder, worker, killed_at: {},
    )


SYSTEMS = {
    "warm": ours(1),
    "cold": ours(0),
    "ray-train": peer(lambda folder: [str(HERE / "restarted_ray.py"), str(folder)]),
    "torchrun": peer(
        lambda folder: ["-m", "torch.distributed.run", *TORCHRUN, str(HERE / "restarted.py"), str(folder)]
    ),
}


class Run:
    """One system at work, seen from outside: ``lines`` are those of its metrics file so far."""

    def __init__(self, system: System, folder: Path, process: psutil.Popen) -> None:
        self._system, self._folder, self._process = system, folder, process
        self._path, self._read, self._rest = system.metrics(folder), 0, b""
        self._steps = 0  # that the last generation has told
        self.lines: list[Line] = []
        self.step_s: list[float] = []  # of the last steps before each kill

    def kill(self, number: int, wait_s: float) -> Line:
        """Kill a worker ``wait_s`` after the system has become steady; what happened then."""
        if not self._wait(lambda: self._steps >= STEADY_STEPS and self._system.is_ready(self._folder), every_s=0.1):
            raise RuntimeError(f"not ready after {LIMIT_S:g} s: {self._log()}")
        time.sleep(wait_s)
        worker, pid = sorted(self._system.workers(self._folder).items())[number]
        self._look()
        self.step_s += [line["step_s"] for line in self.lines[-CHECKPOINT_EVERY:]]
        generation = self.lines[-1]["generation"]
        killed_at, started = time.time(), time.perf_counter()
        os.kill(pid, signal.SIGKILL)
        if not self._wait(lambda: self.lines[-1]["generation"] > generation, every_s=LOOK_EVERY_S):
            return {"worker": worker, "hung": True}
        seconds = time.perf_counter() - started
        first = next(line["step"] for line in self.lines if line["generation"] > generation)
        before = max(line["step"] for line in self.lines if line["generation"] <= generation)
        if not self._wait(lambda: self.lines[-1]["step"] > before, every_s=LOOK_EVERY_S):
            return {"worker": worker, "hung": True}
        return {
            "worker": worker,
            "seconds": seconds,
            "regain_s": time.perf_counter() - started,
            "last_step": before,
            "steps_redone": max(0, before + 1 - first),
            **self._system.details(self._folder, worker, killed_at),
        }

    def _wait(self, done: Callable[[], bool], every_s: float) -> bool:
        """Look until ``done``; whether it came to that in time."""
        until = time.monotonic() + LIMIT_S
        while time.monotonic() < until:
            self._look()
            if done():
                return True
            if self._process.poll() is not None:
                raise RuntimeError(f"the system ended: {self._log()}")
            time.sleep(every_s)
        return False

    def _look(self) -> None:
        """Take the lines that are new."""
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            file.seek(self._read)
            text = file.read()
        self._read += len(text)
        *whole, self._rest = (self._rest + text).split(b"\n")
        for line in map(json.loads, whole):
            if not self.lines or line["generation"] > self.lines[-1]["generation"]:
                self._steps = 0
            self._steps += 1
            self.lines.append(line)

    def _log(self) -> str:
        return (self._folder / LOG).read_text()


@contextmanager
def running(system: System, folder: Path) -> Iterator[Run]:
    """A system, started, and killed with all its processes at the end."""
    folder.mkdir()
    environ = {**os.environ, **ENVIRON, "RAY_TMPDIR": str(folder)}
    with (folder / LOG).open("wb") as log:
        process = psutil.Popen(
            [sys.executable, *system.command(folder)], env=environ, stdout=log, stderr=subprocess.STDOUT
        )
    try:
        yield Run(system, folder, process)
    finally:
        processes = [process]
        with suppress(psutil.NoSuchProcess):  # it may have ended by itself
            processes += process.children(recursive=True)
        for one in processes:
            with suppress(psutil.NoSuchProcess):
                one.kill()
        psutil.wait_procs(processes)


def figures(series: Series) -> Line:
    """A system's medians and 95th percentiles, and every single kill."""
    good = [row for row in series.rows if "hung" not in row]
    seconds = [row["seconds"] for row in good]
    step_s, median = statistics.median(series.step_s), statistics.median(seconds)
    p95 = float(np.quantile(seconds, 0.95))
    return {
        "kills": len(good),
        "hung": len(series.rows) - len(good),
        "step_s": step_s,
        "median_s": median,
        "p95_s": p95,
        "median_less_step_s": median - step_s,
        "p95_less_step_s": p95 - step_s,
        "median_regain_s": statistics.median(row["regain_s"] for row in good),
        "median_steps_redone": statistics.median(row["steps_redone"] for row in good),
        "rows": series.rows,
    }


def compare(runs: dict[str, Line]) -> dict[str, float]:
    """The figures that have bars."""
    warm = runs["warm"]
    return {
        "warm_median_less_step_s": warm["median_less_step_s"],
        "warm_p95_less_step_s": warm["p95_less_step_s"],
        "cold_median_s": runs["cold"]["median_s"],
        "ray_train_over_warm": runs["ray-train"]["median_s"] / warm["median_s"],
        "torchrun_over_warm": runs["torchrun"]["median_s"] / warm["median_s"],
    }


def words(row: Line) -> str:
    shown = {key: f"{value:.2f}" if isinstance(value, float) else value for key, value in row.items()}
    return "  ".join(f"{key} {value}" for key, value in shown.items())


SETTINGS = {
    "workload": vars(REPAIRED),
    "processes": NUM_WORKERS,
    "threads per process": 1,
    "look_every_s": LOOK_EVERY_S,
    "environment": ENVIRON,
    "rayformer": {"layout": LAYOUT, "warm": settings(1), "cold": settings(0)},
    "peers": f"DDP over Gloo; {DDP}; a checkpoint every {CHECKPOINT_EVERY} steps",
    "ray-train": "FailureConfig(max_failures=-1), CheckpointConfig(num_to_keep=2), synchronous upload to a local"
    " folder, no dashboard, worker_niceness=0",
    "torchrun": f"{' '.join(TORCHRUN)}, a prefix of the agent's store for every restart",
    "ray": importlib.metadata.version("ray"),
}


if __name__ == "__main__":
    main()
