"""Hundreds of kills over several layouts: every loss is repaired, and none changes a bit.

    python benchmarks/soak.py [--storms 10] [--seed 1] [--layouts dp4,pp2.dp2]

For every layout a calm run of the job, then storms of it: the same job in which processes of cells are ended by
SIGKILL. Most kills are faults of the job, each at the beginning of a phase of a cell drawn by the seed; kills at idle
and joining come while another cell's loss is repaired. Beside them this process kills cells at moments drawn by the
seed, wherever they are then; the progress word, which outlives them, says where that was. A storm holds if it ends
with status 0, every step's loss and norm and the final hash have the bits of the calm run, every kill is matched by a
``recovered`` line with its cell, and no process of it is left. Writes benchmarks/results/soak-DATE.jsonl, a line for
each kill and each storm, and prints how many kills hit each phase.
"""

from __future__ import annotations

import argparse
import atexit
import datetime
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from rayformer.cell.progress import read_word
from rayformer.ckpt.slots import map_memory
from rayformer.layout import Layout
from rayformer.observe.jsonl import read_lines

LAYOUTS = {
    "tp2.pp2.dp2": {"tp": 2, "pp": 2, "dp": 2},
    "dp4": {"dp": 4},
    "pp2.dp2": {"pp": 2, "dp": 2},
    "tp2.dp2": {"tp": 2, "dp": 2, "sequence_parallel": True},
    "pp4": {"pp": 4},
}
PHASES = ("forward", "backward", "reduce", "vote", "update", "gather", "snapshot", "save")
WHILE_REPAIRED = ("idle", "joining")
APART = 8  # steps between two incidents
JOB = {
    "model": {"layers": 4, "hidden": 64, "heads": 4, "ffn": 96, "vocab": 257},
    "batch": {"global": 16, "micro": 2, "seq": 64, "virtual_ranks": 4},
    "data": {"train": [{"path": "python-stdlib"}]},
    "checkpoint": {"every": 20, "keep": 2},
    "recovery": {"standbys_per_node": 2, "snapshot_every": 1},
    "cluster": {"dashboard": False},
    "observe": {"progress": "none"},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--storms", type=int, default=8)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--layouts", type=lambda text: text.split(","), default=list(LAYOUTS))
    parser.add_argument("--limit-s", type=float, default=600.0, help="seconds after which a storm counts as a hang")
    options = parser.parse_args()
    date = datetime.date.today().isoformat()
    log = Path(__file__).parent / "results" / f"soak-{date}.jsonl"
    log.write_text("")
    phases: Counter[str] = Counter()
    bad = 0
    with tempfile.TemporaryDirectory() as folder:
        calm: dict[str, Run] = {}
        for number in range(options.storms):
            name = options.layouts[number % len(options.layouts)]
            storm = Storm(name, number, options.seed, Path(folder))
            if name not in calm:
                calm[name] = Run(f"calm-{name}", LAYOUTS[name], storm.steps, [], Path(folder))
                assert calm[name].wait(options.limit_s) == 0, calm[name].output()
            result = storm.run(calm[name], options.limit_s)
            phases.update(kill["phase"] for kill in storm.kills)
            bad += not result["holds"]
            with log.open("a") as file:
                for line in (*storm.kills, result):
                    file.write(json.dumps(line) + "\n")
            print(
                {key: result[key] for key in ("layout", "kills", "incidents", "holds", "seconds", "problems")},
                flush=True,
            )
            print(f"  {sum(phases.values())} kills: {dict(phases)}", flush=True)
    print(f"{options.storms} storms, {sum(phases.values())} kills, {bad} storms do not hold; {log}")
    sys.exit(bad > 0)


class Run:
    """One run of the job as a tree of processes, all of which are remembered."""

    def __init__(
        self,
        name: str,
        layout: dict[str, Any],
        steps: int,
        faults: list[dict[str, Any]],
        folder: Path,
        **sections: Any,
    ) -> None:
        self.folder = folder / "runs" / name
        tree = {**JOB, **sections, "layout": layout, "faults": faults}
        tree["run"] = {"name": name, "dir": str(folder / "runs"), "steps": steps}
        job = folder / f"{name}.yaml"
        job.write_text(json.dumps(tree))
        self._log = folder / f"{name}.log"
        environ = {**os.environ, "OMP_NUM_THREADS": "1", "RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
        with self._log.open("w") as log:
            self.process = psutil.Popen(
                [sys.executable, "-m", "rayformer.cli.main", "train", str(job), "--fresh"],
                env=environ, stdout=log, stderr=subprocess.STDOUT,
            )  # fmt: skip
        atexit.register(self.end)
        self._seen: dict[int, psutil.Process] = {}

    def end(self) -> None:
        """Kill the driver, and with it everything of its own Ray."""
        with suppress(psutil.NoSuchProcess):
            self.process.kill()

    def is_up(self) -> bool:
        """Whether it still runs; remembers the processes that it has now."""
        with suppress(psutil.NoSuchProcess):
            for child in self.process.children(recursive=True):
                self._seen.setdefault(child.pid, child)
        return self.process.poll() is None

    def wait(self, limit_s: float) -> int | None:
        """Its exit status; None if it is still there after ``limit_s``, when it is killed."""
        deadline = time.monotonic() + limit_s
        while self.is_up():
            if time.monotonic() > deadline:
                self.end()
                return None
            time.sleep(0.2)
        return int(self.process.returncode)

    def left(self) -> list[str]:
        """The processes that are left some time after the end; they are killed."""
        _, alive = psutil.wait_procs(list(self._seen.values()), timeout=20)
        names = []
        for process in alive:
            with suppress(psutil.NoSuchProcess):
                names.append(" ".join(process.cmdline())[:100])
                process.kill()
        return names

    def metrics(self) -> list[dict[str, Any]]:
        return read_lines(self.folder / "metrics.jsonl")

    def journal(self, kind: str) -> list[dict[str, Any]]:
        return [line for line in read_lines(self.folder / "journal.jsonl") if line["kind"] == kind]

    def output(self) -> str:
        return self._log.read_text()[-3000:]

    def differing(self, other: Run) -> list[str]:
        """What has other bits than in ``other``: steps, and the final hash. A step done twice counts twice."""
        theirs = {line["step"]: (line["loss"], line["grad_norm"]) for line in other.metrics()}
        mine = [(line["step"], (line["loss"], line["grad_norm"])) for line in self.metrics()]
        wrong = [f"step {step}" for step, values in mine if theirs.get(step) != values]
        wrong += [f"no step {step}" for step in theirs.keys() - {step for step, _ in mine}]
        hashes = {run.metrics()[-1].get("state_hash") if run.metrics() else None for run in (self, other)}
        return wrong + (["the state"] if len(hashes) > 1 or None in hashes else [])


class Storm:
    """One run with kills."""

    def __init__(self, layout: str, number: int, seed: int, folder: Path) -> None:
        self._layout, self._number, self._folder = layout, number, folder
        self._random = random.Random(f"{seed} {number}")
        self._cells = [str(cell) for cell in Layout(**_degrees(LAYOUTS[layout])).cells()]
        self._faults = list(self._plan())
        self.steps = APART * (2 * len(PHASES) + 2 * len(WHILE_REPAIRED) + 2)
        self.kills: list[dict[str, Any]] = []

    def _plan(self) -> Iterator[dict[str, Any]]:
        """Two kills in every phase, and pairs of kills of which the second comes while the first is repaired."""
        phases = [*PHASES, *PHASES]
        self._random.shuffle(phases)
        step = APART
        for phase in phases:
            yield {"kill": self._random.choice(self._cells), "step": step, "at": phase}
            step += APART
        for phase in (*WHILE_REPAIRED, *WHILE_REPAIRED):
            first, second = self._random.sample(self._cells, 2)
            yield {"kill": first, "step": step, "at": self._random.choice(PHASES[:-1])}
            yield {"kill": second, "step": step, "at": phase}
            step += APART

    def run(self, calm: Run, limit_s: float) -> dict[str, Any]:
        """Let it happen; what came of it."""
        started = time.monotonic()
        name = f"storm-{self._number}-{self._layout}"
        run = Run(name, LAYOUTS[self._layout], self.steps, self._faults, self._folder)
        while run.is_up() and time.monotonic() - started < limit_s:
            time.sleep(self._random.uniform(5.0, 15.0))
            self._kill_from_outside(run)
        status = run.wait(max(1.0, limit_s - (time.monotonic() - started)))
        self.kills += [
            {"storm": self._number, "by": "itself", "cell": line["cell"], "phase": line["at"], "step": line["step"]}
            | {"time": line["time"]}
            for line in run.journal("fault")
        ]
        recovered = run.journal("recovered")
        problems = [f"status {status}: {run.output()}"] if status != 0 else []
        problems += [f"other bits: {wrong}" for wrong in run.differing(calm)]
        problems += [f"unmatched: {kill}" for kill in self._unmatched(recovered)]
        problems += [f"did not happen: {fault}" for fault in self._missing(run)]
        problems += [f"left: {process}" for process in run.left()]
        return {
            "storm": self._number,
            "layout": self._layout,
            "kills": len(self.kills),
            "incidents": len(recovered),
            "status": status,
            "holds": not problems,
            "problems": problems,
            "steps": self.steps,
            "executed": len(run.metrics()),
            "seconds": round(time.monotonic() - started, 1),
            "total_s": [round(line["total_s"], 3) for line in recovered],
            "sources": dict(Counter(line["source"] for line in recovered)),
            "steps_redone": [line["steps_redone"] for line in recovered],
        }

    def _kill_from_outside(self, run: Run) -> None:
        """Kill a cell wherever it is; only while the run goes on for long enough to repair it."""
        lines, members = run.metrics(), run.journal("membership")
        if not lines or not members or lines[-1]["step"] > self.steps - APART or not run.is_up():
            return
        cell = self._random.choice(self._cells)
        pid = members[-1]["cells"][cell]["pid"]
        at = time.time()
        try:
            word = _word_of(run, cell)
            os.kill(pid, signal.SIGKILL)
        except (ProcessLookupError, FileNotFoundError):
            return  # just lost by another kill
        time.sleep(0.005)
        with suppress(FileNotFoundError, ValueError):
            word = _word_of(run, cell)
        kill = {"storm": self._number, "by": "another process", "cell": cell, "phase": word.phase, "step": word.step}
        self.kills.append(kill | {"time": at, "pid": pid})

    def _unmatched(self, recovered: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        """The kills without a ``recovered`` line that came after them and names their cell."""
        for kill in self.kills:
            # A fault is journaled when it is seen, which may be after the repair.
            if not any(line["time"] > kill["time"] - 2.0 and kill["cell"] in line["cells"] for line in recovered):
                yield kill

    def _missing(self, run: Run) -> Iterator[dict[str, Any]]:
        happened = {line["number"] for line in run.journal("fault")}
        yield from (fault for number, fault in enumerate(self._faults) if number not in happened)


def _word_of(run: Run, cell: str) -> Any:
    """The progress word of ``cell``, in the memory of the run's holder."""
    for process in run.process.children(recursive=True):
        with suppress(psutil.Error, OSError):
            for entry in Path(f"/proc/{process.pid}/fd").iterdir():
                if os.readlink(entry).startswith(f"/memfd:rayformer {cell} "):
                    return read_word(map_memory(entry))
    raise FileNotFoundError(cell)


def _degrees(layout: dict[str, Any]) -> dict[str, int]:
    return {axis: size for axis, size in layout.items() if axis != "sequence_parallel"}


if __name__ == "__main__":
    main()
