"""What snapshots and detection cost a step where nothing fails: the same job with and without, in turn.

    python benchmarks/snapshots.py [--sizes tiny,wide,large] [--slots 12] [--slot-s 4]

"With" is ``rayformer train`` as it comes: a snapshot after every step, or with auto where the state is large, the
progress word, the holder that looks at it, a standby. "Without" takes no snapshots, and "torchrun" runs the same
cells without Ray, snapshots and anybody who looks. They run in turn for some seconds each, while every process of the
others is stopped by SIGSTOP; all must print the same losses. ``step_s`` of the metrics runs from the end of one step
to the end of the next; the first steps and those that span a switch are left out. The figures are ratios of medians.
Writes benchmarks/results/snapshots-DATE.json.
"""

from __future__ import annotations

import argparse
import signal
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import yaml
from overhead import Run
from sides import write_result

SETTLED = 10  # steps until the interval is agreed and all memory was touched
TINY = yaml.safe_load((Path(__file__).parents[1] / "jobs" / "tiny.yaml").read_text())
WIDE = {**TINY["model"], "hidden": 4 * TINY["model"]["hidden"], "ffn": 4 * TINY["model"]["ffn"]}
LARGE = {**TINY["model"], "layers": 13, "hidden": 1024, "ffn": 2816, "heads": 16, "kv_heads": 16}
SIZES: dict[str, dict[str, Any]] = {
    "tiny": {"bar": 1.03, "model": TINY["model"], "batch": TINY["batch"], "snapshot_every": 1},
    "wide": {"bar": 1.08, "model": WIDE, "batch": TINY["batch"], "snapshot_every": 1},
    "large": {
        "bar": 1.03,
        "model": LARGE,
        "layout": {"dp": 2},
        "batch": {"global": 4, "micro": 1, "seq": 128, "virtual_ranks": 2},
        "snapshot_every": "auto",
        "launchers": {"with": "ray", "without": "ray"},  # memory for a third is not there
    },
}
LAUNCHERS = {"with": "ray", "without": "ray", "torchrun": "torchrun"}
PAUSED = {"stall_s": 3600}  # who was stopped meanwhile is not frozen
RECOVERY = {
    "with": PAUSED,
    "without": {"snapshot_every": 0, "standbys_per_node": 0, "max_failures": 0, **PAUSED},
    "torchrun": PAUSED,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=lambda text: text.split(","), default=list(SIZES))
    parser.add_argument("--slots", type=int, default=12, help="slots of each")
    parser.add_argument("--slot-s", type=float, default=4.0)
    options = parser.parse_args()
    rows = []
    for size in options.sizes:
        slot_s = options.slot_s * (4 if size == "large" else 1)
        rows.append(measure(size, options.slots, slot_s))
        print(rows[-1], flush=True)
    write_result(
        "snapshots",
        {
            "figure": "median step_s with snapshots and detection / without, in turn in one run",
            "rows": rows,
            "settings": {"slots": options.slots, "slot_s": options.slot_s, "sizes": SIZES},
        },
    )


def measure(size: str, slots: int, slot_s: float) -> dict[str, Any]:
    """The medians of one size, and their ratios."""
    with tempfile.TemporaryDirectory() as folder:
        launchers = SIZES[size].get("launchers", LAUNCHERS)
        runs = {kind: Run(kind, job(size, kind, Path(folder)), launcher) for kind, launcher in launchers.items()}
        try:
            for run in runs.values():
                run.signal(signal.SIGSTOP)
            for run in runs.values():
                run.signal(signal.SIGCONT)
                run.wait_for_steps(SETTLED + 2)
                run.signal(signal.SIGSTOP)
            first = {kind: len(run.lines()) for kind, run in runs.items()}
            for _ in range(slots):
                for run in runs.values():
                    run.signal(signal.SIGCONT)
                    time.sleep(slot_s)
                    run.signal(signal.SIGSTOP)
            lines = {kind: run.lines() for kind, run in runs.items()}
        finally:
            for run in runs.values():
                run.end()
    common = min(map(len, lines.values()))
    losses = [[line["loss"] for line in of_run[:common]] for of_run in lines.values()]
    assert all(of_run == losses[0] for of_run in losses), "the losses differ"
    steps = {
        kind: [line["step_s"] for line in of_run[first[kind] :] if line["step_s"] < slot_s / 2]
        for kind, of_run in lines.items()
    }
    assert all(steps.values()), f"no steps were seen of {[kind for kind, values in steps.items() if not values]}"
    medians = {kind: statistics.median(values) for kind, values in steps.items()}
    taken = [line["phase_s"]["snapshot"] for line in lines["with"][first["with"] :] if "snapshot" in line["phase_s"]]
    return {
        "size": size,
        "ratio": medians["with"] / medians["without"],
        "ratio_to_torchrun": medians["with"] / medians["torchrun"] if "torchrun" in medians else None,
        "bar": SIZES[size]["bar"],
        "median_s": medians,
        "mean_s": {kind: statistics.mean(values) for kind, values in steps.items()},
        "steps": {kind: len(values) for kind, values in steps.items()},
        "snapshots": {"num": len(taken), "median_s": statistics.median(taken) if taken else None},
    }


def job(size: str, kind: str, folder: Path) -> Path:
    """The job of ``size`` as a file."""
    given = SIZES[size]
    tree = {
        "run": {"name": kind, "dir": str(folder / "runs"), "steps": 100000},
        "model": given["model"],
        "layout": given.get("layout", TINY["layout"]),
        "batch": given["batch"],
        "optim": TINY["optim"],
        "data": TINY["data"],
        "checkpoint": {"every": 0},
        "recovery": {"snapshot_every": given["snapshot_every"], **RECOVERY[kind]},
        "observe": {"progress": "none"},
    }
    path = folder / f"{kind}.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path


if __name__ == "__main__":
    main()
