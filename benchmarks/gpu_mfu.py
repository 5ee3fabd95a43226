"""Model FLOPs utilisation of one GPU: a Llama-like model of 1.2 billion parameters in bf16.

    python benchmarks/gpu_mfu.py [--steps 12] [--peak 989e12] [--set model.attention_impl=flash ...]

Trains a few steps of a job through the production path and takes the median step after a warm-up. FLOPs are the
model's: matrix products and full attention, not what is recomputed; the peak is the device's for dense bf16 (an H200's
by default). Writes benchmarks/results/gpu-mfu-DATE.json.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rayformer.cell.build import build_cell
from rayformer.cell.flops import flops_per_token
from rayformer.cell.process import prepare_process
from rayformer.cell.step import StepRunner
from rayformer.config.job import resolve
from rayformer.config.load import job_from_tree
from rayformer.data.indexed import IndexedWriter
from rayformer.groups import Groups

JOB: dict[str, Any] = {
    "run": {"name": "mfu", "steps": 1000},
    "model": {"layers": 22, "hidden": 2048, "heads": 16, "kv_heads": 4, "ffn": 5632, "vocab": 32000},
    "batch": {"global": 16, "micro": 4, "seq": 2048},
    "precision": {"params": "bf16"},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--peak", type=float, default=989e12, help="FLOP/s of the device, dense bf16")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="section.key=JSON value")
    options = parser.parse_args()
    tree = {name: dict(section) for name, section in JOB.items()}
    for override in options.set:
        key, _, value = override.partition("=")
        section, name = key.split(".")
        tree.setdefault(section, {})[name] = json.loads(value)
    with tempfile.TemporaryDirectory() as folder:
        prefix = Path(folder) / "corpus"
        write_corpus(prefix, tree["model"]["vocab"])
        tree["data"] = {"train": [{"path": str(prefix)}], "split": [1, 0, 0]}
        job = resolve(job_from_tree(tree), dp=1, recorded={})
        device = torch.device("cuda")
        prepare_process(job, device)
        groups = Groups.form(layout=job.layout.degrees, rank=0, generation=1, run="mfu", store=None, device=device)
        cell = build_cell(job, groups, corpus_cache=Path(folder))
        seconds, losses = step_seconds(cell, options.steps)
    tokens_per_s = job.batch.global_ * job.batch.seq / statistics.median(seconds[3:])
    flops = flops_per_token(job.model, job.batch.seq)
    assert flops is not None
    result = {
        "figure": "model FLOPs utilisation, median step",
        "mfu": flops * tokens_per_s / options.peak,
        "tokens_per_s": tokens_per_s,
        "parameters": sum(p.numel() for p in cell.stages[0].parameters()),
        "peak_memory_gib": torch.cuda.max_memory_allocated() / 2**30,
        "step_s": seconds,
        "losses": losses,
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "job": tree,
    }
    path = Path(__file__).parent / "results" / f"gpu-mfu-{datetime.date.today()}.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(f"MFU {result['mfu']:.3f}   {tokens_per_s:,.0f} tokens/s   {result['peak_memory_gib']:.1f} GiB   {path}")


def step_seconds(cell: Any, steps: int) -> tuple[list[float], list[float]]:
    runner = StepRunner(cell)
    seconds, losses = [], []
    for step in range(1, steps + 1):
        torch.cuda.synchronize()
        started = time.perf_counter()
        lr = runner.next_lr()
        measured = runner.begin(step, (step - 1) * cell.job.batch.global_)
        runner.vote(stop=False)
        runner.finish(measured, lr)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
        losses.append(measured.loss)
    return seconds, losses


def write_corpus(prefix: Path, vocab: int) -> None:
    ids = np.random.default_rng(0).zipf(1.3, 4 * 2**20) % vocab
    with IndexedWriter(str(prefix), "uint16") as writer:
        writer.add_document(ids.astype(np.uint16))


if __name__ == "__main__":
    main()
