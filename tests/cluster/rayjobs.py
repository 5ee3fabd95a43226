"""Running jobs as a user does: a command in a process of its own, a Ray that stands by itself, and what they leave."""

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from contextlib import suppress
from pathlib import Path

import numpy as np
import yaml

from rayformer.data.indexed import IndexedWriter
from rayformer.observe.jsonl import read_lines

REPO = Path(__file__).parents[2]
RAY = str(Path(sys.executable).with_name("ray"))
DEADLINE_S = 120.0
ENVIRON = {
    **{k: v for k, v in os.environ.items() if not k.startswith(("RAY_", "OMP_"))},
    "PYTHONPATH": str(REPO),
    "RAY_AUTH_MODE": "disabled",
    "RAY_USAGE_STATS_ENABLED": "0",
}
MODEL = {"layers": 4, "hidden": 32, "heads": 4, "kv_heads": 2, "ffn": 48, "vocab": 257}
VARYING = {"attempt", "generation", "step_s", "tokens_per_s", "time", "phase_s"}


def write_corpus(prefix, *, bad_token=None):
    """48 short documents of bytes; ``bad_token`` stands in one of them if given."""
    with IndexedWriter(prefix, "uint16") as writer:
        for i in range(48):
            tokens = 3 + (7 * i + 13 * np.arange(5 + 11 * i % 60)) % 250
            if bad_token is not None and i == 20:
                tokens[2] = bad_token
            writer.add_document([*map(int, tokens), 0])
    return str(prefix)


def write_job(folder, name, *, corpus, address="local", steps=8, **sections):
    """A job file for a model of some ten thousand parameters, its run's folder below ``folder``."""
    tree = {
        "run": {"name": name, "dir": str(folder / "runs"), "steps": steps, **sections.pop("run", {})},
        "model": MODEL,
        "batch": {"global": 8, "micro": 1, "seq": 16, "virtual_ranks": 4},
        "optim": {"lr": 1.0e-3, "decay_steps": 20, "warmup_steps": 2},
        "data": {"train": [{"path": corpus}], "split": [3, 1, 0]},
        "cluster": {"address": address, "dashboard": False, **sections.pop("cluster", {})},
        "recovery": {"standbys_per_node": 0, **sections.pop("recovery", {})},
        **sections,
    }
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path


class Driver:
    """A command that was started, in a session of its own as under a terminal; its output goes to a file."""

    def __init__(self, command, *, folder, environ=ENVIRON):
        self.log = folder / f"output-{time.monotonic_ns()}.log"
        with self.log.open("w") as out:
            self.process = subprocess.Popen(
                list(map(str, command)), cwd=folder, env=environ, stdout=out, stderr=out, stdin=subprocess.PIPE,
                start_new_session=True,
            )  # fmt: skip

    @property
    def pid(self):
        return self.process.pid

    @property
    def output(self):
        return self.log.read_text(errors="replace")

    @property
    def errors(self):
        """The output from its first line that begins with ``error:``."""
        found = re.search(r"^error:.*", self.output, re.MULTILINE | re.DOTALL)
        return found[0] if found else ""

    def finish(self, deadline_s=DEADLINE_S):
        """The exit status."""
        try:
            return self.process.wait(deadline_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {deadline_s} s; its output:\n{self.output}") from None

    def until(self, condition, what):
        """Waits for ``condition()``, and gives its value; an end of the command before that is an error."""
        return until(lambda: condition() or self._check(), f"{what}; output:\n{self.output[-3000:]}")

    def _check(self):
        assert self.process.poll() is None, f"ended with {self.process.returncode}: {self.output}"

    def close(self):
        """Ends whatever of it is left."""
        for pid in [*descendants(self.pid), *([self.pid] if self.process.poll() is None else [])]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()


def until(condition, what, deadline_s=DEADLINE_S):
    """Waits for ``condition()`` to be true, and gives its value."""
    end = time.monotonic() + deadline_s
    while not (value := condition()):
        assert time.monotonic() < end, f"waited {deadline_s} s for {what}"
        time.sleep(0.05)
    return value


class Process:
    """One row of the machine's process table."""

    def __init__(self, pid):
        self.pid = pid
        name, rest = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)
        fields = rest.split()
        self.name, self.state, self.parent, self.session = name, fields[0], int(fields[1]), int(fields[3])


def processes():
    """Every process of this machine that is not a zombie, by its id."""
    found = {}
    for pid in (int(path.name) for path in Path("/proc").iterdir() if path.name.isdecimal()):
        with suppress(OSError):
            row = Process(pid)
            if row.state != "Z":
                found[pid] = row
    return found


def descendants(*pids):
    """The ids of these processes' children, and theirs, and everything in their sessions: ``{pid: name}``."""
    table = processes()
    family = set(pids)
    while more := {p.pid for p in table.values() if p.parent in family or p.session in family} - family:
        family |= more
    return {pid: table[pid].name for pid in family - set(pids) if pid in table}


def alive(pids):
    """Those of ``{pid: name}`` that still are what they were."""
    table = processes()
    return {pid: name for pid, name in pids.items() if pid in table and table[pid].name == name}


def folder_of(job):
    """The run's folder."""
    run = yaml.safe_load(job.read_text())["run"]
    return Path(run["dir"]) / run["name"]


def lines_of(job, *, kind=None):
    """The lines of metrics.jsonl, or those of journal.jsonl of one kind."""
    if kind is None:
        return read_lines(folder_of(job) / "metrics.jsonl")
    return [line for line in read_lines(folder_of(job) / "journal.jsonl") if line["kind"] == kind]


def curve_of(job):
    """What must be the same bits in all runs of a job, by step; of a step done twice both must be the same."""
    steps = {}
    for line in lines_of(job):
        kept = {key: value for key, value in line.items() if key not in VARYING | {"eval_loss", "state_hash"}}
        assert steps.setdefault(line["step"], kept) == kept
    return steps


def hash_of(job):
    """The state hash in the last line of metrics.jsonl, with that line's step."""
    last = lines_of(job)[-1]
    return last["step"], last["state_hash"]


class StandingRay:
    """A Ray of one node that runs by itself until it is closed, with ports and folders of its own."""

    def __init__(self, folder, *, num_cpus):
        self._folder = folder
        command = [RAY, "start", "--head", "--block", "--port=0", "--dashboard-port=0", f"--num-cpus={num_cpus}"]
        command += ["--dashboard-agent-listen-port=0", "--include-dashboard=true", f"--temp-dir={folder}/ray"]
        command += ["--object-store-memory=100000000", "--disable-usage-stats"]
        environ = {**ENVIRON, "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0"}
        self._driver = Driver(command, folder=folder, environ=environ)
        started = self._driver.until(
            lambda: re.search(r"--address='([\d.:]+)'.*RAY_API_SERVER_ADDRESS='(http://[\d.:]+)'",
                              re.sub(r"\x1b\[\d+m", "", self._driver.output), re.DOTALL),
            "Ray to start",
        )  # fmt: skip
        self.address, self.dashboard = started.groups()

    def listed(self, what):
        """The rows of the state API: ``actors``, ``tasks`` or ``placement_groups``."""
        with urllib.request.urlopen(f"{self.dashboard}/api/v0/{what}?limit=1000&detail=1", timeout=30) as answer:
            return json.load(answer)["data"]["result"]["result"]

    def pid_of(self, actor):
        """The process of the actor of this name."""
        (row,) = [row for row in self.listed("actors") if row["name"] == actor and row["state"] == "ALIVE"]
        return row["pid"]

    def live(self, run=""):
        """Names of the actors and placement groups that are there, of one run or of all."""
        rows = self.listed("actors") + self.listed("placement_groups")
        named = [row["name"] for row in rows if row["state"] not in ("DEAD", "REMOVED")]
        return [name for name in named if "/" in name and name.startswith(run)]

    def close(self):
        family = descendants(self._driver.pid)
        self._driver.process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self._driver.process.wait(20)
        self._driver.close()
        for pid in alive(family):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
