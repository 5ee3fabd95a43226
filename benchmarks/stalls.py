"""Stalls: a frozen cell is found and replaced soon, and nothing else is ever taken for one.

    python benchmarks/stalls.py [--steps 10000] [--freezes 12] [--seed 1]

First a run of many steps, while other processes come and go that use up all cores, up to three for each of them: it
must end without a ``stall`` line. Then runs in which this process stops a cell by SIGSTOP at moments drawn by the
seed: told are the seconds until the journal's ``stall`` line, which names the cell, and until the ``recovered`` line,
beside twice the 99th percentile of the step times before it and a second. Either is left out with a 0. Writes
benchmarks/results/stalls-none-DATE.json and stalls-frozen-DATE.json.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from sides import write_result
from soak import Run

LAYOUT = {"pp": 2, "dp": 2}
MODEL = {"layers": 4, "hidden": 32, "heads": 4, "ffn": 48, "vocab": 257}
BATCH = {"global": 4, "micro": 1, "seq": 32, "virtual_ranks": 4}
PARTS = ("drain_s", "form_s", "restore_s", "first_step_s")  # of a recovery
STANDBY_S = 15.0  # until the next standby is warm


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10000)
    parser.add_argument("--freezes", type=int, default=12)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    rng = random.Random(options.seed)
    with tempfile.TemporaryDirectory() as folder:
        if options.steps:
            quiet = long_run(options.steps, rng, Path(folder))
            print(quiet, flush=True)
            write_result("stalls-none", {"long_run": quiet, "seed": options.seed})
        if options.freezes:
            frozen = freeze(options.freezes, rng, Path(folder))
            print({key: value for key, value in frozen.items() if key != "freezes"})
            write_result("stalls-frozen", {"frozen": frozen, "seed": options.seed})


def long_run(steps: int, rng: random.Random, folder: Path) -> dict[str, Any]:
    """A run of ``steps`` beside other load."""
    run = Run("long", LAYOUT, steps, [], folder, model=MODEL, batch=BATCH, checkpoint={"every": 500, "keep": 2})
    loads: list[subprocess.Popen[bytes]] = []
    most = 0
    while run.is_up():
        for load in loads:
            load.kill()
            load.wait()
        num = rng.randrange(3 * (os.cpu_count() or 1) + 1)
        loads = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(num)]
        most = max(most, num)
        time.sleep(rng.uniform(1.0, 10.0))
    for load in loads:
        load.kill()
    lines = run.metrics()
    step_s = sorted(line["step_s"] for line in lines)
    return {
        "status": run.wait(0),
        "steps": len(lines),
        "stalls": len(run.journal("stall")),
        "stragglers": len(run.journal("straggler")),
        "recovered": len(run.journal("recovered")),
        "busy_processes_at_most": most,
        "step_s": {"median": statistics.median(step_s), "p99": _p99(step_s), "longest": step_s[-1]},
    }


def freeze(num: int, rng: random.Random, folder: Path) -> dict[str, Any]:
    """``num`` cells frozen one after the other in one run."""
    run = Run("frozen", LAYOUT, 1_000_000, [], folder, model=MODEL, batch=BATCH)
    found = []
    while not run.metrics() and run.is_up():
        time.sleep(0.2)
    while len(found) < num and run.is_up():
        time.sleep(STANDBY_S + rng.random())
        cells = run.journal("membership")[-1]["cells"]
        cell = rng.choice(sorted(cells))
        known, p99 = len(run.journal("recovered")), _p99([line["step_s"] for line in run.metrics()][-1000:])
        started = time.time()
        os.kill(cells[cell]["pid"], signal.SIGSTOP)
        while len(run.journal("recovered")) == known:
            time.sleep(0.01)
        stall, recovered = run.journal("stall")[-1], run.journal("recovered")[-1]
        found.append(
            {
                "cell": cell,
                "is_named": stall["cell"] == cell and recovered["cells"] == [cell],
                "told_s": stall["time"] - started,
                "replaced_s": recovered["time"] - started,
                "allowed_s": 2 * p99 + 1.0,
                **{key: recovered[key] for key in PARTS},
            }
        )
    run.process.terminate()
    run.wait(60)
    return {
        "named": sum(line["is_named"] for line in found),
        "within": sum(line["replaced_s"] <= line["allowed_s"] for line in found),
        "told_s": statistics.median(line["told_s"] for line in found),
        "replaced_s": statistics.median(line["replaced_s"] for line in found),
        "replaced_s_longest": max(line["replaced_s"] for line in found),
        "allowed_s": statistics.median(line["allowed_s"] for line in found),
        "freezes": found,
    }


def _p99(values: list[float]) -> float:
    return sorted(values)[int(0.99 * (len(values) - 1))]


if __name__ == "__main__":
    main()
