"""A peer of repair.py: DDP that goes on from its last checkpoint whenever all its processes are started anew.

    python -m torch.distributed.run --nproc-per-node 8 --max-restarts 1000 benchmarks/restarted.py FOLDER

Weights and batches come ready from FOLDER, so that a process imports hardly more than torch and is soon up. There every
rank leaves its pid, and rank 0 a line for every step and the checkpoints.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from plain import fused_adamw, plain_model, token_loss
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from workloads import REPAIRED

CHECKPOINT_EVERY = 5  # steps
WEIGHTS, BATCHES, METRICS, PIDS = "weights.pt", "batches.npy", "metrics.jsonl", "pids"

State = dict[str, Any]


def main() -> None:
    folder, rank, world = Path(sys.argv[1]), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    # The agent keeps its store over restarts, and with it the addresses of processes that are gone.
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    own = dist.PrefixStore(f"restart {os.environ['TORCHELASTIC_RESTART_COUNT']}", store)
    dist.init_process_group("gloo", store=own, rank=rank, world_size=world)
    checkpoint = folder / "checkpoint.pt"

    def save(state: State) -> None:
        if rank == 0:
            torch.save(state, folder / "next.pt")
            (folder / "next.pt").replace(checkpoint)

    train(folder, rank, world, torch.load(checkpoint) if checkpoint.exists() else None, save)


def train(folder: Path, rank: int, world: int, found: State | None, save: Callable[[State], None]) -> None:
    """Train until the batches are used up, on from ``found``; all ranks call ``save`` together."""
    (folder / PIDS / str(rank)).write_text(str(os.getpid()))
    torch.set_num_threads(1)
    w = REPAIRED
    module = plain_model(w)
    module.load_state_dict(torch.load(folder / WEIGHTS) if found is None else found["model"])
    optimizer = fused_adamw(module.parameters(), w)
    if found is not None:
        optimizer.load_state_dict(found["optimizer"])
    model = DistributedDataParallel(
        module, static_graph=True, gradient_as_bucket_view=True, forward_sync_buffers=False, bucket_cap_mb=1
    )
    batches = np.load(folder / BATCHES, mmap_mode="r")  # step, tokens or labels, sample, position
    share = w.global_batch // world
    metrics = Metrics(folder / METRICS) if rank == 0 else None
    for step in range(1 if found is None else found["step"] + 1, len(batches) + 1):
        own = batches[step - 1, :, rank * share : (rank + 1) * share]
        tokens, labels = torch.from_numpy(own.astype(np.int64))
        optimizer.zero_grad(set_to_none=True)
        loss = token_loss(model(tokens), labels)
        loss.backward()
        nn.utils.clip_grad_norm_(module.parameters(), w.clip, foreach=True)
        optimizer.step()
        total = loss.detach() / world
        dist.reduce(total, 0)
        if metrics is not None:
            metrics.write(step, float(total))
        if step % CHECKPOINT_EVERY == 0:
            save({"step": step, "model": module.state_dict(), "optimizer": optimizer.state_dict()})


class Metrics:
    """Rank 0's lines; ``generation`` counts the processes that wrote some."""

    def __init__(self, path: Path) -> None:
        lines = path.read_text().splitlines() if path.exists() else []
        self._generation = 1 + (json.loads(lines[-1])["generation"] if lines else 0)
        self._file = path.open("a", buffering=1)
        self._ended = time.perf_counter()

    def write(self, step: int, loss: float) -> None:
        now = time.perf_counter()
        line = {"generation": self._generation, "step": step, "loss": loss, "step_s": now - self._ended}
        self._file.write(json.dumps(line) + "\n")
        self._ended = now


if __name__ == "__main__":
    main()
