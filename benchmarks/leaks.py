"""Fifty recoveries in a row, and what is left of them: memory, descriptors, threads, memfds, Ray's objects and places.

    python benchmarks/leaks.py [--kills 50] [--seed 1]

A Ray cluster stands by itself; one job runs on it. Cells are killed one after the other, each when the one before it
was replaced and the next standby is up. The first cell is never killed, so that its process goes through all of it,
like the controller and the holder. What these three have, and what the cluster counts, is told after every tenth kill,
and once more after as long a time without one. Writes benchmarks/results/leaks-DATE.json.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
import ray
from sides import write_result
from soak import Run

LAYOUT = {"pp": 2, "dp": 2}
FIRST = "pp0.dp0.cp0.tp0"
EVERY = 10  # kills between two counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    rng = random.Random(options.seed)
    with tempfile.TemporaryDirectory() as folder, _Standing() as address:
        os.environ["RAY_AUTH_MODE"] = "disabled"
        ray.init(address=address, namespace="rayformer", log_to_driver=False)
        recovery = {"standbys_per_node": 1, "snapshot_every": 1, "max_failures": -1}
        cluster = {"address": address}
        run = Run("leaks", LAYOUT, 1_000_000, [], Path(folder), recovery=recovery, cluster=cluster)
        counts, started = [], time.monotonic()
        for number in range(options.kills):
            _wait(lambda: run.is_up() and run.metrics())
            time.sleep(1.0)
            _kill(run, rng)
            if (number + 1) % EVERY == 0:
                counts.append(_count(run, started, number + 1))
        time.sleep((counts[-1]["seconds"] - counts[0]["seconds"]) / (len(counts) - 1))
        counts.append(_count(run, started, options.kills))  # what time and steps alone add
        run.process.terminate()
        status = run.wait(120)
        after = {"placement_groups": _placement_groups(), "actors": _actors()}
        ray.shutdown()
    print(after)
    write_result("leaks", {"seed": options.seed, "status": status, "counts": counts, "after_the_end": after})


class _Standing:
    """A cluster of one node, a child of this process."""

    def __enter__(self) -> str:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
        environ = {**os.environ, "RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
        command = [str(Path(sys.executable).with_name("ray")), "start", "--head", "--block", f"--port={port}"]
        command += ["--node-ip-address=127.0.0.1", "--num-cpus=8", "--include-dashboard=false"]
        self._process = psutil.Popen(command, env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        time.sleep(10.0)
        return f"127.0.0.1:{port}"

    def __exit__(self, *_: object) -> None:
        children = self._process.children(recursive=True)
        self._process.terminate()
        _, alive = psutil.wait_procs([self._process, *children], timeout=30)
        for process in alive:
            process.kill()


def _kill(run: Run, rng: random.Random) -> None:
    """Kill some other cell than the first, and wait until it is replaced."""
    cells = run.journal("membership")[-1]["cells"]
    cell = rng.choice([name for name in cells if name != FIRST])
    known = len(run.journal("recovered"))
    os.kill(cells[cell]["pid"], signal.SIGKILL)
    _wait(lambda: len(run.journal("recovered")) > known)


def _count(run: Run, started: float, kills: int) -> dict[str, Any]:
    """What the processes that lived through it have, and what the cluster counts."""
    time.sleep(15.0)  # the next standby, and Ray's own figures
    cells = run.journal("membership")[-1]["cells"]
    first = psutil.Process(cells[FIRST]["pid"])
    siblings = first.parent().children()
    holder = max(siblings, key=_opened_memfds)
    controller = next(process for process in siblings if "Controller" in " ".join(process.cmdline()))
    available, total = ray.available_resources(), ray.cluster_resources()
    counted = {
        "kills": kills,
        "seconds": time.monotonic() - started,
        "steps": run.metrics()[-1]["step"],
        "cell": _of(first),
        "holder": _of(holder),
        "controller": _of(controller),
        "processes": len(siblings),
        "object_store_bytes": total["object_store_memory"] - available.get("object_store_memory", 0.0),
        "placement_groups": _placement_groups(),
        "actors": _actors(),
    }
    print(counted, flush=True)
    return counted


def _of(process: psutil.Process) -> dict[str, Any]:
    return {
        "uss_mib": round(process.memory_full_info().uss / 2**20, 1),
        "descriptors": process.num_fds(),
        "sockets": len(process.net_connections(kind="all")),
        "threads": process.num_threads(),
        "memfds_open": _opened_memfds(process),
        "memfds_mapped": Path(f"/proc/{process.pid}/maps").read_text().count("/memfd:rayformer"),
    }


def _opened_memfds(process: psutil.Process) -> int:
    links = [os.readlink(entry) for entry in Path(f"/proc/{process.pid}/fd").iterdir()]
    return sum(link.startswith("/memfd:rayformer") for link in links)


def _placement_groups() -> int:
    return sum(group["state"] != "REMOVED" for group in ray.util.placement_group_table().values())


def _actors() -> int:
    return len(ray.util.list_named_actors(all_namespaces=True))


def _wait(condition: Any) -> None:
    while not condition():
        time.sleep(0.02)


if __name__ == "__main__":
    main()
