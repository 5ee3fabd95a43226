"""Tokens/s of rayformer against plain PyTorch at the same layout, in turn in one run.

    python benchmarks/throughput.py [--rounds 15] [--seconds 2] [--size small|large] [--only NAME ...]

For each peer of peers.py both sides are started, warmed up, and then run in turn for some seconds each, in alternating
order, while every process of the other is stopped. Both start from the same weights and read the same samples; the
losses of the first 40 common steps must agree to 1e-4, or the run is void. (Then rounding grows: after 100 steps DDP
and FSDP2 are 3e-5 apart and both 2e-4 from us, so from there on 1e-2 must do.)

Slots are short, so that what disturbs the machine for seconds falls on both sides. A round's ratio is ours over the
peer's; the figure is the median of the rounds, and their geometric mean over the
peers. Beside it stands the ratio of both sides' fastest slots, which a busy neighbour disturbs less. One thread per
process. Writes benchmarks/results/throughput[-large]-DATE.json unless only some peers ran.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from ours import open_cell, stepper
from peers import COMMON, PEERS, Peer
from sides import Side, open_sides, write_result
from workloads import SIZES, Workload, job_tree, write_corpus

WARM_UP = 4  # steps
CHECKED_STEPS, MAX_DIFFERENCE, MAX_LATE_DIFFERENCE = 40, 1e-4, 1e-2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15, help="slots of each side")
    parser.add_argument("--seconds", type=float, default=2.0, help="length of a slot, at least one step")
    parser.add_argument("--size", choices=list(SIZES), default="small")
    parser.add_argument("--only", action="append", choices=list(PEERS))
    options = parser.parse_args()
    workload = SIZES[options.size]
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        corpus = write_corpus(Path(folder) / "corpus", workload.vocab)
        for name in options.only or PEERS:
            row = compare(name, PEERS[name], workload, corpus, options)
            rows.append(row)
            print(
                f"{name:7} ratio {row['ratio']:.3f} (fastest slots {row['ratio_of_fastest']:.3f})   tokens/s"
                f" {row['tokens_per_s']:.0f} against {row['peer_tokens_per_s']:.0f}   losses within"
                f" {row['max_loss_difference']:.1e} over {row['checked_steps']} steps   rounds"
                f" {' '.join(f'{ratio:.2f}' for ratio in row['ratios'])}",
                flush=True,
            )
    mean = statistics.geometric_mean(row["ratio"] for row in rows)
    print(f"geometric mean {mean:.3f}")
    if options.only is None:
        result = {
            "figure": "tokens/s of rayformer / tokens/s of the peer, median over rounds in turn in one run",
            "geometric_mean": mean,
            "ratios": {row["peer"]: row["ratio"] for row in rows},
            "runs": rows,
            "settings": {
                "rounds": options.rounds,
                "seconds": options.seconds,
                "workload": vars(workload),
                "threads per process": 1,
                "transport": "Gloo on loopback",
                "every peer": COMMON,
                "peers": {row["peer"]: PEERS[row["peer"]].settings for row in rows},
            },
        }
        write_result("throughput" if options.size == "small" else f"throughput-{options.size}", result)


def compare(name: str, peer: Peer, workload: Workload, corpus: Path, options: argparse.Namespace) -> dict[str, Any]:
    """One row of the result."""
    entries = [
        ("rayformer", our_side, job_tree(workload, corpus, **peer.layout), peer.world),
        (name, peer_side, (name, workload, corpus), peer.world),
    ]
    with open_sides(entries) as sides:
        runs = [Run(side, workload.step_tokens) for side in sides]
        for run in runs:
            run.steps(WARM_UP)
        slots = [max(1, round(options.seconds * run.steps(3) / workload.step_tokens)) for run in runs]
        rates: list[list[float]] = [[], []]
        for number in range(options.rounds):
            for i in (0, 1) if number % 2 == 0 else (1, 0):
                rates[i].append(runs[i].steps(slots[i]))
    differences = [abs(a - b) for a, b in zip(runs[0].losses, runs[1].losses)]
    early = max(differences[:CHECKED_STEPS])
    if not (early <= MAX_DIFFERENCE and max(differences) <= MAX_LATE_DIFFERENCE):
        raise SystemExit(f"void: {name}'s losses differ from rayformer's by {early}, later by {max(differences)}")
    ratios = [ours / theirs for ours, theirs in zip(*rates)]
    return {
        "peer": name,
        "world": peer.world,
        "layout": peer.layout,
        "ratio": statistics.median(ratios),
        "tokens_per_s": statistics.median(rates[0]),
        "peer_tokens_per_s": statistics.median(rates[1]),
        "ratio_of_fastest": max(rates[0]) / max(rates[1]),
        "ratios": ratios,
        "slots_tokens_per_s": rates[0],
        "peer_slots_tokens_per_s": rates[1],
        "steps_per_slot": slots,
        "common_steps": len(differences),
        "checked_steps": min(CHECKED_STEPS, len(differences)),
        "max_loss_difference": early,
        "max_late_loss_difference": max(differences),
        "losses": runs[0].losses,
        "peer_losses": runs[1].losses,
    }


class Run:
    """One side's training so far: ``losses`` of all its steps."""

    def __init__(self, side: Side, step_tokens: int) -> None:
        self._side, self._step_tokens = side, step_tokens
        self.losses: list[float] = []

    def steps(self, num: int) -> float:
        """Train ``num`` steps; the tokens/s, by the slowest rank's clock."""
        answers = self._side.ask(num)
        self.losses += map(sum, zip(*(losses for _, losses in answers)))
        return num * self._step_tokens / max(took_s for took_s, _ in answers)


def our_side(tree: dict[str, Any], rank: int, world: int, store: dist.Store) -> Callable[[int], Any]:
    return timed(stepper(open_cell(tree, rank, world, store)))


def peer_side(arguments: tuple[str, Workload, Path], rank: int, world: int, store: dist.Store) -> Callable[[int], Any]:
    name, workload, corpus = arguments
    if world > 1:
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    return timed(PEERS[name].build(workload, corpus, rank, world))


def timed(step: Callable[[int], Any]) -> Callable[[int], tuple[float, list[float]]]:
    """``answer(num)`` trains ``num`` further steps: seconds and this rank's part of each loss."""
    done = 0

    def answer(num: int) -> tuple[float, list[float]]:
        nonlocal done
        started = time.perf_counter()
        losses = [step(number) for number in range(done, done + num)]
        took_s = time.perf_counter() - started
        done += num
        return took_s, [float(loss) for loss in losses]

    return answer


if __name__ == "__main__":
    main()
