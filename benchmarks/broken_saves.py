"""A job that saves every step is killed whole again and again, and goes on from a checkpoint that holds each time.

    python benchmarks/broken_saves.py [--kills 20] [--seed 1]

The job (dp 2, a checkpoint after every step, on its own Ray) is started; when its first checkpoint is told, a moment
between 0 and 2 seconds later, drawn by the seed, every process of it is ended by SIGKILL. Then: the newest checkpoint
must be at least the last that the journal told of, every checkpoint must verify, and its state hash must be the one
that a calm run had after that step. The same command then goes on from it. Writes
benchmarks/results/broken_saves-DATE.json.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
from sides import write_result

from rayformer.ckpt import inspect
from rayformer.ckpt.manifest import find_checkpoints, read_manifest, step_folders
from rayformer.observe.jsonl import read_lines

JOB: dict[str, Any] = {
    "model": {"layers": 4, "hidden": 64, "heads": 4, "ffn": 96, "vocab": 257},
    "layout": {"dp": 2},
    "batch": {"global": 8, "micro": 1, "seq": 64, "virtual_ranks": 2},
    "optim": {"decay_steps": 1000},
    "data": {"train": [{"path": "python-stdlib"}]},
    "checkpoint": {"every": 1, "keep": 4, "max_file_bytes": 100_000},
    "cluster": {"dashboard": False},
    "observe": {"progress": "none"},
}
STEPS = 2000
ENVIRON = {**os.environ, "OMP_NUM_THREADS": "1", "RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    rng = random.Random(options.seed)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        kills = []
        for number in range(options.kills):
            kills.append(one_kill(folder, rng.uniform(0.0, 2.0)))
            print(number + 1, kills[-1], flush=True)
        last = kills[-1]["newest"]
        calm = hashes(folder, last)
        wrong = [step for kill in kills for step, found in kill.pop("hashes").items() if calm[step] != found]
    assert not wrong, f"other states than the calm run's in steps {wrong}"
    result = {"kills": len(kills), "checkpoints_verified": sum(kill["verified"] for kill in kills), "wrong": len(wrong)}
    print(result)
    write_result("broken_saves", {**result, "each": kills, "seed": options.seed, "job": JOB})


def one_kill(folder: Path, wait_s: float) -> dict[str, Any]:
    """Start or go on, kill everything, and look at what is there."""
    run = folder / "runs" / "stormy"
    before = len(saved(run))
    process = psutil.Popen(
        [sys.executable, "-m", "rayformer.cli.main", "train", str(job(folder, "stormy", STEPS))],
        env=ENVIRON, stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT,
    )  # fmt: skip
    while len(saved(run)) == before:
        assert process.poll() is None, f"ended with {process.returncode}"
        time.sleep(0.01)
    time.sleep(wait_s)
    family = [process, *process.children(recursive=True)]
    for member in family:
        with suppress(psutil.NoSuchProcess):
            member.suspend()  # so that none of them sees another die
    for member in family:
        with suppress(psutil.NoSuchProcess):
            member.kill()
    psutil.wait_procs(family, timeout=30)
    told = saved(run)[-1]
    found = find_checkpoints(run / "checkpoints")
    manifests = [read_manifest(checkpoint) for checkpoint in found]
    for checkpoint, manifest in zip(found, manifests):
        problems = list(inspect.problems(checkpoint, manifest, on_bytes=lambda _: None))
        assert not problems, problems
    assert manifests[0].step >= told, f"{manifests[0].step} is the newest, {told} was told"
    return {
        "wait_s": wait_s,
        "told": told,
        "newest": manifests[0].step,
        "verified": len(found),
        "unfinished": len(step_folders(run / "checkpoints")) - len(found),
        "hashes": {manifest.step: manifest.state_hash for manifest in manifests},
    }


def hashes(folder: Path, steps: int) -> dict[int, str]:
    """The state hash after every step of a run in one process that nothing happens to."""
    path = job(folder, "calm", steps, layout={}, checkpoint={"every": 1, "keep": 1})
    subprocess.run(
        [sys.executable, "-m", "rayformer.cell", str(path)], env=ENVIRON, check=True, stdout=subprocess.DEVNULL
    )
    return {line["step"]: line["state_hash"] for line in read_lines(folder / "runs" / "calm" / "metrics.jsonl")}


def job(folder: Path, name: str, steps: int, **sections: Any) -> Path:
    path = folder / f"{name}.yaml"
    path.write_text(json.dumps({**JOB, **sections, "run": {"name": name, "dir": str(folder / "runs"), "steps": steps}}))
    return path


def saved(run: Path) -> list[int]:
    """The steps that the journal says are saved."""
    return [line["step"] for line in read_lines(run / "journal.jsonl") if line["kind"] == "saved"]


if __name__ == "__main__":
    main()
