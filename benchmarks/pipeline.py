"""How close a step comes to the time that its schedule allows, beside a loop by hand and torch's own schedules.

    python benchmarks/pipeline.py [--rounds 5] [--only steps|messages]

Stages sleep instead of computing, see sleeping.py, so that ranks do not take the cores from each other and what is left
is what a step costs beyond its schedule. All four run one step after the other in the same processes, and each ratio
is that of medians. Then the channel's messages beside raw ``isend`` and ``irecv``: a tensor goes to the other rank and
one comes back, where nothing hides what a message costs, and many go one way, as in a pipeline.
Writes benchmarks/results/pipeline-DATE.json.
"""

from __future__ import annotations

import argparse
import logging
import os
import socket
import statistics
import time
import warnings
from collections import deque
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as processes
from sides import write_result
from sleeping import Times, step_of

from rayformer.groups import Groups, StoreClients
from rayformer.layout import Layout
from rayformer.stages.channel import Channel
from rayformer.stages.check import Costs, check
from rayformer.stages.instructions import Recv, RecvAct, RecvGrad, Send, SendAct, SendGrad
from rayformer.stages.schedules import SCHEDULES, get_schedule

SETTINGS = {
    "10+20 ms": Times(forward=0.010, input_grad=0.010, weight_grad=0.010),
    "10+10 ms": Times(forward=0.010, input_grad=0.005, weight_grad=0.005),
    "1+2 ms": Times(forward=0.001, input_grad=0.001, weight_grad=0.001),
}
RANKS = (2, 4)
MICROBATCHES = (4, 8, 16)
WHO = ("executor", "by hand", "ours", "torch")
BYTES = (4 * 2**10, 256 * 2**10, 4 * 2**20)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", choices=["steps", "messages"])
    parser.add_argument("--schedules", type=lambda text: text.split(","), default=list(SCHEDULES))
    parser.add_argument(
        "--times", type=lambda text: text.split(","), default=list(SETTINGS), help="of " + ", ".join(SETTINGS)
    )
    arguments = parser.parse_args()
    result: dict[str, Any] = {}
    if arguments.only != "messages":
        rows = [
            row
            for pp in RANKS
            for row in _in_processes(pp, _steps, arguments.times, arguments.schedules, arguments.rounds)
        ]
        result["steps"] = rows
        result["worst"] = {key: max(row[key] for row in rows if key in row) for key in ("ideal", "by hand", "torch")}
    if arguments.only != "steps":
        result["messages"] = _in_processes(2, _messages, arguments.rounds)
    print(write_result("pipeline", result))


def _in_processes(world: int, task: Callable[..., Any], *arguments: Any) -> Any:
    """What ``task`` returns on the first of ``world`` ranks."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    answers = processes.get_context("spawn").SimpleQueue()
    processes.spawn(_rank, args=(world, port, task, arguments, answers), nprocs=world)
    return answers.get()


def _rank(rank: int, world: int, port: int, task: Callable[..., Any], arguments: tuple[Any, ...], answers: Any) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    store = dist.TCPStore("127.0.0.1", port, world, is_master=rank == 0)
    dist.init_process_group("gloo", store=dist.PrefixStore("torch", store), rank=rank, world_size=world)
    groups = Groups.form(
        layout=Layout(pp=world),
        rank=rank,
        generation=1,
        run="pipeline",
        store=StoreClients(store),
        device=torch.device("cpu"),
    )
    answer = task(groups, *arguments)
    groups.close()
    if rank == 0:
        answers.put(answer)
    dist.barrier()
    dist.destroy_process_group()


def _steps(groups: Groups, settings: list[str], names: list[str], rounds: int) -> list[dict[str, Any]]:
    rows = []
    pp = groups.layout.pp
    for setting, name, microbatches in product(settings, names, MICROBATCHES):
        schedule, times = get_schedule(name), SETTINGS[setting]
        chunks = schedule.chunks or 2
        steps = {
            who: step_of(who, name, groups=groups, chunks=chunks, microbatches=microbatches, times=times) for who in WHO
        }
        measured: dict[str, list[float]] = {who: [] for who in WHO}
        for number in range(rounds + 1):
            for who, step in steps.items():
                seconds = _timed(groups, step)
                if number:  # the first makes connections and memory
                    measured[who].append(seconds)
        backward = times.input_grad + times.weight_grad
        costs = Costs(forward=times.forward, backward=backward, weight=times.weight_grad)
        programs = schedule.programs(pp, chunks, microbatches)
        ideal = check(programs, costs=costs, rendezvous=False, vee=schedule.vee).makespan
        median = {who: statistics.median(values) for who, values in measured.items()}
        row = {
            "times": setting,
            "schedule": name,
            "pp": pp,
            "chunks": chunks,
            "microbatches": microbatches,
            "ideal_s": ideal,
            **{f"{who}_s": seconds for who, seconds in median.items()},
            "ideal": median["executor"] / ideal,
            "by hand": median["executor"] / median["by hand"],
            "torch": median["ours"] / median["torch"],
        }
        rows.append(row)
        if groups.cell.pp == 0:
            shown = {key: f"{value:.3f}" if isinstance(value, float) else value for key, value in row.items()}
            print(" ".join(f"{key}={value}" for key, value in shown.items()), flush=True)
    return rows


def _timed(groups: Groups, step: Callable[[], None]) -> float:
    """Seconds from when the last rank starts until the last one ends; clocks of one machine are one."""
    groups.world.barrier()
    began = time.monotonic()
    step()
    times = torch.tensor([began, time.monotonic()], dtype=torch.float64)
    groups.world.all_reduce(times, op="max").wait()
    return float(times[1] - times[0])


def _messages(groups: Groups, rounds: int) -> list[dict[str, Any]]:
    rows = []
    for (pattern, program), num_bytes in product(PATTERNS.items(), BYTES):
        times: dict[str, list[float]] = {"channel": [], "raw": []}
        count = 400 if num_bytes < 2**20 else 60
        messages = tuple(message for v in range(count) for message in program(v, groups.cell.pp))
        through = partial(_channelled, groups, num_bytes, messages), partial(_raw, num_bytes, messages)
        steps = [make() for make in through]
        for number in range(5 * rounds + 1):  # they are short, and the machine is noisy
            for who, step in zip(times, steps):
                seconds = _timed(groups, step) / len(messages)
                if number:
                    times[who].append(seconds)
        median = {who: statistics.median(values) for who, values in times.items()}
        row = {
            "pattern": pattern,
            "bytes": num_bytes,
            **{f"{who}_us": 1e6 * value for who, value in median.items()},
            "ratio": median["channel"] / median["raw"],
        }
        rows.append(row)
        if groups.cell.pp == 0:
            print(row, flush=True)
    return rows


def _to_and_fro(v: int, rank: int) -> list[Send | Recv]:
    return [RecvAct(v, peer=0), SendGrad(v, peer=0)] if rank else [SendAct(v, peer=1), RecvGrad(v, peer=1)]


def _one_way(v: int, rank: int) -> list[Send | Recv]:
    return [RecvAct(v, peer=0)] if rank else [SendAct(v, peer=1)]


PATTERNS = {"to and fro": _to_and_fro, "one way": _one_way}


def _channelled(groups: Groups, num_bytes: int, messages: tuple[Send | Recv, ...]) -> Callable[[], None]:
    channel = Channel(groups.pp, shape=(num_bytes // 4,), dtype=torch.float32)
    tensor = torch.zeros(num_bytes // 4)

    def run() -> None:
        channel.begin(messages)
        for message in messages:
            if isinstance(message, (SendAct, SendGrad)):
                channel.send(message, tensor)
            else:
                channel.recv(message).wait()
        channel.finish()

    return run


def _raw(num_bytes: int, messages: tuple[Send | Recv, ...]) -> Callable[[], None]:
    outgoing, incoming = torch.zeros(num_bytes // 4), torch.zeros(num_bytes // 4)

    def run() -> None:
        sent: deque[dist.Work] = deque()
        for message in messages:
            tag = isinstance(message, (SendGrad, RecvGrad))
            if isinstance(message, (SendAct, SendGrad)):
                if len(sent) == 8:  # as many as the channel has in flight
                    sent.popleft().wait()
                sent.append(dist.isend(outgoing, message.peer, tag=tag))
            else:
                dist.irecv(incoming, message.peer, tag=tag).wait()
        for work in sent:
            work.wait()

    return run


if __name__ == "__main__":
    main()
