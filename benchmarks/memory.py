"""Live tensor bytes of rayformer (dp 2, zero 1) against DistributedDataParallel with ZeroRedundancyOptimizer.

    python benchmarks/memory.py [--size large] [--params fp32|bf16]

Both sides train a few steps of the same model on the same samples, with the same losses. Then every process adds up the
storages of all live tensors, each once: at the end of a step, when parameters, gradients and moments are there and
activations are gone. The figure is ours over the peer's, of the rank that has more. Beside it stand the closed form,
bytes per parameter that nobody can do without, and the largest storages by what they are. Peak memory of the process
(RSS, libraries included) is told but is no figure. Writes benchmarks/results/memory[-bf16]-DATE.json.
"""

from __future__ import annotations

import argparse
import gc
import resource
import tempfile
from collections import defaultdict
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from ours import open_cell, stepper
from peers import DDP, ddp_zero
from same import same_model
from sides import open_sides, write_result
from workloads import SIZES, Workload, job_tree, write_corpus

DP = 2
STEPS = 3
MAX_LOSS_DIFFERENCE = {"fp32": 1e-4, "bf16": 2e-2}
PEER_PARAMS = {"fp32": "fp32", "bf16": "fp32 parameters and gradients, torch.autocast(bfloat16)"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=list(SIZES), default="large")
    parser.add_argument("--params", choices=list(MAX_LOSS_DIFFERENCE), default="fp32", help="rayformer's precision")
    options = parser.parse_args()
    workload = SIZES[options.size]
    num_parameters = sum(p.numel() for p in same_model(workload).parameters())
    with tempfile.TemporaryDirectory() as folder:
        corpus = write_corpus(Path(folder) / "corpus", workload.vocab)
        tree = job_tree(workload, corpus, params=options.params, dp=DP)
        entries = [
            ("rayformer", our_side, tree, DP),
            ("DDP + ZeRO", peer_side, (workload, corpus, options.params), DP),
        ]
        with open_sides(entries) as sides:
            answers = [side.ask(STEPS) for side in sides]
    losses = [[sum(parts) for parts in zip(*(answer["losses"] for answer in side))] for side in answers]
    difference = max(abs(a - b) for a, b in zip(*losses))
    if not difference <= MAX_LOSS_DIFFERENCE[options.params]:
        raise SystemExit(f"void: the losses differ by {difference}")
    ours, theirs = (max(answer["live_bytes"] for answer in side) for side in answers)
    form = closed_form(options.params, DP)
    print(f"{num_parameters} parameters, {options.params}; losses within {difference:.1e}")
    for (name, *_), side in zip(entries, answers):
        for rank, answer in enumerate(side):
            live, peak_mib = answer["live_bytes"], answer["peak_rss_bytes"] / 2**20
            print(
                f"{name:11} rank {rank}: {live} bytes, {live / num_parameters:.3f} a parameter; {peak_mib:.0f} MiB RSS"
            )
        for row in side[0]["largest"]:
            print(f"     {row['bytes']:>11} bytes  {row['count']:>3} x {row['dtype']} {row['shape']}")
    print(f"ratio {ours / theirs:.3f}; closed form {sum(form.values()):g} bytes a parameter: {form}")
    result = {
        "figure": "live tensor bytes of rayformer / of the peer at the end of a step, rank with most",
        "ratio": ours / theirs,
        "parameters": num_parameters,
        "bytes_per_parameter": {"rayformer": ours / num_parameters, "peer": theirs / num_parameters},
        "closed_form": form,
        "over_closed_form": ours / num_parameters / sum(form.values()),
        "runs": {name: side for (name, *_), side in zip(entries, answers)},
        "settings": {
            "workload": vars(workload),
            "dp": DP,
            "zero": 1,
            "params": options.params,
            "steps": STEPS,
            "peer": f"DDP: {DDP}; ZeroRedundancyOptimizer(AdamW, fused, parameters_as_bucket_view=True); "
            f"{PEER_PARAMS[options.params]}",
        },
    }
    write_result("memory" if options.params == "fp32" else f"memory-{options.params}", result)


def closed_form(params: str, dp: int) -> dict[str, float]:
    """Bytes a parameter that a replica of ``dp`` with a divided optimizer holds."""
    if params == "fp32":
        return {"parameters": 4, "gradients": 4, "moments": 8 / dp}
    return {"parameters": 2, "gradients": 4, "masters and moments": 12 / dp}


def our_side(tree: dict[str, Any], rank: int, world: int, store: dist.Store) -> Callable[[int], Any]:
    return measured(stepper(open_cell(tree, rank, world, store)))


def peer_side(arguments: tuple[Workload, Path, str], rank: int, world: int, store: dist.Store) -> Callable[[int], Any]:
    workload, corpus, params = arguments
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    return measured(ddp_zero(workload, corpus, rank, world, params))


def measured(step: Callable[[int], Any]) -> Callable[[int], dict[str, Any]]:
    """``answer(num)`` trains ``num`` steps and tells what is alive after the last."""

    def answer(num: int) -> dict[str, Any]:
        losses = [float(step(number)) for number in range(num)]
        gc.collect()
        storages = live_storages()
        return {
            "losses": losses,
            "live_bytes": sum(nbytes for nbytes, _, _ in storages),
            "largest": largest(storages),
            "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        }

    return answer


def live_storages() -> list[tuple[int, str, tuple[int, ...]]]:
    """Bytes, dtype and the largest view's shape of every storage that a live tensor, or its gradient, lies in."""
    found: dict[int, tuple[int, str, tuple[int, ...]]] = {}
    # isinstance would ask deprecated objects for their class, and they warn.
    tensors = [item for item in gc.get_objects() if issubclass(type(item), torch.Tensor)]
    for tensor in [*tensors, *(t.grad for t in tensors if t.is_leaf and t.grad is not None)]:
        storage = tensor.untyped_storage()
        known = found.get(storage.data_ptr())
        if known is None or prod(known[2]) < tensor.numel():
            found[storage.data_ptr()] = (storage.nbytes(), str(tensor.dtype), tuple(tensor.shape))
    return list(found.values())


def largest(storages: list[tuple[int, str, tuple[int, ...]]]) -> list[dict[str, Any]]:
    """The storages that are alike taken together, the ten largest such groups."""
    groups: defaultdict[tuple[str, tuple[int, ...]], list[int]] = defaultdict(list)
    for nbytes, dtype, shape in storages:
        groups[dtype, shape].append(nbytes)
    rows = [
        {"bytes": sum(sizes), "count": len(sizes), "dtype": dtype, "shape": list(shape)}
        for (dtype, shape), sizes in groups.items()
    ]
    return sorted(rows, key=lambda row: -row["bytes"])[:10]


if __name__ == "__main__":
    main()
