"""The workloads of throughput.py, memory.py and repair.py: a model, a batch, the job that trains it, and a corpus."""

from __future__ import annotations

import sysconfig
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from rayformer.data.indexed import IndexedWriter

SEED = 1234
CORPUS_TOKENS = 4 * 2**20


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A Llama-style model and its batch; samples are counted over all processes."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    seq: int
    micro: int = 4
    global_batch: int = 32
    lr: float = 1e-3
    weight_decay: float = 0.1
    clip: float = 1.0
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    norm_eps: float = 1e-5
    rope_theta: float = 10000.0

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads

    @property
    def layer_matrices(self) -> int:
        return 2 * self.hidden * self.head_dim * (self.heads + self.kv_heads) + 3 * self.hidden * self.ffn

    @property
    def num_microbatches(self) -> int:
        return self.global_batch // self.micro

    @property
    def step_tokens(self) -> int:
        return self.global_batch * self.seq


SIZES = {
    "small": Workload(layers=4, hidden=128, heads=4, kv_heads=4, ffn=384, vocab=256, seq=128),
    "large": Workload(layers=6, hidden=256, heads=4, kv_heads=4, ffn=768, vocab=4096, seq=256),
}
REPAIRED = replace(SIZES["small"], vocab=257, seq=64, micro=1, global_batch=8)  # one sample for each of 8 workers


def job_tree(workload: Workload, corpus: Path, *, params: str = "fp32", **layout: int) -> dict[str, Any]:
    """The plain values of rayformer's job; every replica is one virtual rank."""
    model = ("layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "norm_eps", "rope_theta")
    return {
        "run": {"name": "benchmark", "steps": 100_000, "seed": SEED},
        "model": {name: getattr(workload, name) for name in model},
        "layout": layout,
        "batch": {
            "global": workload.global_batch,
            "micro": workload.micro,
            "seq": workload.seq,
            "virtual_ranks": layout.get("dp", 1),
        },
        "optim": {
            "lr": workload.lr,
            "decay": "constant",
            "betas": workload.betas,
            "eps": workload.eps,
            "weight_decay": workload.weight_decay,
            "clip": workload.clip,
            "zero": 1,
        },
        "precision": {"params": params},
        "data": {"train": [{"path": str(corpus)}], "split": [1.0, 0.0, 0.0]},
    }


def write_corpus(prefix: Path, vocab: int) -> Path:
    """The bytes of the standard library as one .bin/.idx pair; a byte and the next make one id where ``vocab`` allows.

    Returns the prefix.
    """
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    text = np.frombuffer(b"".join(file.read_bytes() for file in files), dtype=np.uint8)[: CORPUS_TOKENS + 1]
    ids = (text[:-1].astype(np.uint32) + 256 * text[1:].astype(np.uint32)) % vocab
    with IndexedWriter(str(prefix), "uint16") as writer:
        writer.add_document(ids.astype(np.uint16))
    return prefix
