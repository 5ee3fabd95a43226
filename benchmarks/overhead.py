"""What Ray costs a training step: the same job (dp 2) under Ray and under torchrun, in turn.

    python benchmarks/overhead.py [--rounds 5] [--steps 60]

Both run the same cells on the same machine and must print the same losses and the same state hash. ``step_s`` of the
metrics runs from the end of one step to the end of the next, so it holds what handing over the reports costs. The
figure is the median over rounds of the ratio of median step times. Writes benchmarks/results/overhead-DATE.json.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

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
WARM_UP = 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--no-dashboard", action="store_true")
    options = parser.parse_args()
    rounds = []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(options.rounds):
            order = ("ray", "torchrun") if number % 2 == 0 else ("torchrun", "ray")
            runs = {kind: run(kind, Path(folder), number, options) for kind in order}
            assert runs["ray"]["losses"] == runs["torchrun"]["losses"], "the losses differ"
            assert runs["ray"]["state_hash"] == runs["torchrun"]["state_hash"], "the states differ"
            medians = {kind: statistics.median(runs[kind]["step_s"]) for kind in runs}
            rounds.append({**medians, "ratio": medians["ray"] / medians["torchrun"]})
            print(
                f"round {number}: ray {medians['ray']:.4f} s, torchrun {medians['torchrun']:.4f} s,"
                f" ratio {rounds[-1]['ratio']:.3f}"
            )
    ratio = statistics.median(r["ratio"] for r in rounds)
    print(f"median ratio {ratio:.3f}")
    write(ratio, rounds, options)


def run(kind: str, folder: Path, number: int, options: argparse.Namespace) -> dict[str, object]:
    """One run; its step times after the warm-up, its losses and its last state hash."""
    name = f"{kind}-{number}"
    job = folder / f"{name}.yaml"
    dashboard = str(not options.no_dashboard).lower()
    job.write_text(JOB.format(name=name, dir=folder / "runs", steps=options.steps, dashboard=dashboard))
    command = {
        "ray": [sys.executable, "-m", "rayformer.cli.main", "train", str(job)],
        "torchrun": [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--nproc-per-node",
            "2",
            "-m",
            "rayformer.cell",
            str(job),
        ],
    }[kind]
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
    subprocess.run(command, env=environ, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    lines = [json.loads(line) for line in (folder / "runs" / name / "metrics.jsonl").read_text().splitlines()]
    return {
        "step_s": [line["step_s"] for line in lines[WARM_UP:]],
        "losses": [line["loss"] for line in lines],
        "state_hash": lines[-1]["state_hash"],
    }


def write(ratio: float, rounds: list[dict[str, float]], options: argparse.Namespace) -> None:
    import ray
    import torch

    date = datetime.date.today().isoformat()
    path = Path(__file__).parent / "results" / f"overhead-{date}.json"
    result = {
        "date": date,
        "figure": "median over rounds of (median step_s under Ray / median step_s under torchrun)",
        "ratio": ratio,
        "bar": 1.03,
        "rounds": rounds,
        "settings": {
            "steps": options.steps,
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
