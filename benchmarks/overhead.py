"""What Ray costs a training step: the same job (dp 2) under Ray and under torchrun, in turn.

    python benchmarks/overhead.py [--slots 12] [--slot-s 4]

Both are started on the same machine; then they run in turn for some seconds each, while every process of the other,
Ray's own included, is stopped by SIGSTOP. So a change of the machine's speed meets both, and whatever Ray does beside
the cells counts. Both must print the same losses. ``step_s`` of the metrics runs from the end of one step to the end of
the next, so it holds what handing over the reports costs; a step that spans a switch is left out, as longer than half a
slot. The figure is the ratio of the medians over all steps. Writes benchmarks/results/overhead-DATE.json.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import psutil

from rayformer.config.load import load_job
from rayformer.observe.metrics import read_metrics

JOB = """
run:    {{name: {name}, dir: {dir}, steps: {steps}}}
model:  {{layers: 4, hidden: 128, heads: 4, ffn: 384, vocab: 257}}
layout: {{dp: 2}}
batch:  {{global: 16, micro: 4, seq: 128, virtual_ranks: 2}}
optim:  {{lr: 3.0e-3, min_lr: 3.0e-4, warmup_steps: 20}}
data:   {{train: [{{path: python-stdlib}}]}}
checkpoint: {{every: 0}}
cluster: {{dashboard: {dashboard}}}
observe: {{progress: none}}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slots", type=int, default=12, help="slots of each")
    parser.add_argument("--slot-s", type=float, default=4.0)
    parser.add_argument("--no-dashboard", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        runs = {kind: Run(kind, job(kind, Path(folder), options), kind) for kind in ("ray", "torchrun")}
        try:
            for run in runs.values():
                run.wait_for_steps(10)
                run.signal(signal.SIGSTOP)
            first = {kind: len(run.lines()) for kind, run in runs.items()}
            for _ in range(options.slots):
                for run in runs.values():
                    run.signal(signal.SIGCONT)
                    time.sleep(options.slot_s)
                    run.signal(signal.SIGSTOP)
            lines = {kind: run.lines() for kind, run in runs.items()}
        finally:
            for run in runs.values():
                run.end()
    num = min(map(len, lines.values()))
    losses = [[line["loss"] for line in lines[kind][:num]] for kind in runs]
    assert losses[0] == losses[1], "the losses differ"
    steps = {
        kind: [line["step_s"] for line in lines[kind][first[kind] :] if line["step_s"] < options.slot_s / 2]
        for kind in runs
    }
    medians = {kind: statistics.median(values) for kind, values in steps.items()}
    ratio = medians["ray"] / medians["torchrun"]
    rows = [{"kind": kind, "median_s": medians[kind], "steps": len(steps[kind])} for kind in runs]
    print(rows, f"ratio {ratio:.3f}")
    write(ratio, rows, options)


class Run:
    """One run of a job called ``name``, under Ray or torchrun, as a tree of processes."""

    def __init__(self, name: str, job: Path, launcher: str) -> None:
        self._metrics = job.parent / "runs" / name / "metrics.jsonl"
        num_cells = str(load_job(job).layout.degrees.world)
        command = {
            "ray": ["rayformer.cli.main", "train"],
            "torchrun": ["torch.distributed.run", "--nproc-per-node", num_cells, "-m", "rayformer.cell"],
        }[launcher]
        environ = {**os.environ, "OMP_NUM_THREADS": "1", "RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
        self._process = psutil.Popen(
            [sys.executable, "-m", *command, str(job)],
            env=environ,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def lines(self) -> list[dict[str, float]]:
        return read_metrics(self._metrics)

    def wait_for_steps(self, num: int) -> None:
        while len(self.lines()) < num:
            assert self._process.poll() is None, "the run ended before it began"
            time.sleep(0.2)

    def signal(self, number: int) -> None:
        with suppress(psutil.NoSuchProcess):
            for process in [self._process, *self._process.children(recursive=True)]:
                with suppress(psutil.NoSuchProcess):
                    process.send_signal(number)

    def end(self) -> None:
        self.signal(signal.SIGKILL)
        self._process.wait()


def job(kind: str, folder: Path, options: argparse.Namespace) -> Path:
    path = folder / f"{kind}.yaml"
    dashboard = str(not options.no_dashboard).lower()
    path.write_text(JOB.format(name=kind, dir=folder / "runs", steps=100000, dashboard=dashboard))
    return path


def write(ratio: float, rows: list[dict[str, object]], options: argparse.Namespace) -> None:
    import ray
    import torch

    date = datetime.date.today().isoformat()
    path = Path(__file__).parent / "results" / f"overhead-{date}.json"
    result = {
        "date": date,
        "figure": "median step_s under Ray / median step_s under torchrun, in turn in one run",
        "ratio": ratio,
        "bar": 1.03,
        "runs": rows,
        "settings": {
            "slots": options.slots,
            "slot_s": options.slot_s,
            "dashboard": not options.no_dashboard,
            "layout": "dp 2",
            "threads per process": 1,
            "torchrun": "default rendezvous, Gloo on loopback",
        },
        "machine": {
            "cpus": os.cpu_count(),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "ray": ray.__version__,
            "load_1m": os.getloadavg()[0],
        },
    }
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(path)


if __name__ == "__main__":
    main()
