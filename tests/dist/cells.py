"""Jobs of a small model, and what tests let the cells of a layout do with them.

The corpus is four times the lengths of case fixture F-DATA, and the model F-M1.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from worker_pool import Member

from rayformer.cell.build import Cell, build_cell
from rayformer.cell.loop import train
from rayformer.cell.process import prepare_process
from rayformer.cell.state import load_checkpoint, state_hash
from rayformer.cell.step import StepRunner
from rayformer.ckpt.manifest import step_folder
from rayformer.config.job import resolve
from rayformer.config.load import job_from_tree
from rayformer.data.indexed import IndexedWriter
from rayformer.events import plain
from rayformer.layout import Layout
from rayformer.optim.plan import BUCKET_ELEMENTS

MODEL = {"layers": 4, "hidden": 32, "heads": 4, "kv_heads": 2, "ffn": 48, "vocab": 257}
SMALL_BUCKETS = 8192  # elements: several buckets also in a stage of F-M1
LENGTHS = [5, 0, 17, 1, 64, 3, 9, 33, 2, 40, 7, 12]


def write_corpus(prefix):
    """48 documents, the last 12 held out by the split of `job_tree`; 0 ends a document."""
    with IndexedWriter(prefix, "uint16") as writer:
        for i, length in enumerate(LENGTHS * 4):
            writer.add_document([*(3 + (7 * i + 13 * j) % 250 for j in range(length)), 0])


def job_tree(corpus, *, model=None, layout=None, batch=None, optim=None, schedule="1f1b", **others):
    """The plain values of a job on F-M1 with 20 steps of 8 samples."""
    return {
        "run": {"name": "test", "steps": 20, "seed": 1234, **others.pop("run", {})},
        "model": {**MODEL, **(model or {})},
        "layout": layout or {},
        "batch": {"global": 8, "micro": 1, "seq": 16, **(batch or {})},
        "schedule": {"name": schedule},
        "optim": {"lr": 1e-3, "weight_decay": 0.1, "clip": 1.0, **(optim or {})},
        "data": {"train": [{"path": corpus}], "split": [3.0, 1.0, 0.0]},
        **others,
    }


def world_of(tree):
    """The number of cells of a job."""
    return Layout(**{axis: n for axis, n in tree["layout"].items() if axis in ("tp", "pp", "dp")}).world


@contextmanager
def open_cell(member: Member, tree, *, bucket_elements: int = BUCKET_ELEMENTS, generation: int = 1) -> Iterator[Cell]:
    """This member's cell of the job, its groups closed at the end."""
    job = job_from_tree(tree)
    job = resolve(job, dp=job.layout.dp, recorded={})
    prepare_process(job, torch.device("cpu"))
    groups = member.form(job.layout.degrees, generation=generation)
    try:
        yield build_cell(job, groups, corpus_cache=Path("unused"), bucket_elements=bucket_elements)
    finally:
        groups.close()


def advance(cell: Cell, steps: int, *, done: int = 0, runner: StepRunner | None = None):
    """Run steps and return (loss, norm) of each, with all their digits."""
    runner = runner or StepRunner(cell)
    curve = []
    for step in range(done, done + steps):
        lr = runner.next_lr()
        measured = runner.begin(step + 1, step * cell.job.batch.global_)
        assert not runner.vote(stop=False).stop
        runner.finish(measured, lr)
        assert not measured.nonfinite
        curve.append((measured.loss, measured.norm))
    cell.optimizer.await_parameters()
    return curve


def train_curve(member: Member, tree, steps: int, bucket_elements: int = BUCKET_ELEMENTS):
    """A task: the (loss, norm) of every step, and the state hash after them."""
    with open_cell(member, tree, bucket_elements=bucket_elements) as cell:
        return advance(cell, steps), state_hash(cell)


def the_same_on_all(results):
    """The result of all ranks, which must be equal."""
    assert all(result == results[0] for result in results), "cells disagree"
    return results[0]


def train_state(member: Member, tree, steps: int, bucket_elements: int = BUCKET_ELEMENTS):
    """A task: the (loss, norm) of every step, and this cell's part of the state as (tensor, shape, box, values)."""
    with open_cell(member, tree, bucket_elements=bucket_elements) as cell:
        curve = advance(cell, steps)
        return curve, [
            (s.tensor, cell.specs[s.tensor.rpartition("@")[0]].shape, s.box, s.value.numpy().copy())
            for s in cell.optimizer.unique_state()
        ]


def assembled(parts):
    """The whole tensors of a state by name, from every cell's part of it; no element may come twice or not at all."""
    found, filled = {}, {}
    for tensor, shape, box, values in (entry for part in parts for entry in part):
        whole = found.setdefault(tensor, np.zeros(shape, np.float32))
        count = filled.setdefault(tensor, np.zeros(shape, np.int64))
        at = tuple(map(slice, box.lo, box.hi))
        whole[at] = values
        count[at] += 1
    assert all((count == 1).all() for count in filled.values())
    return found


def train_events(member: Member, tree, folder: str, done: int, until: int):
    """A task: the events of the training loop from a checkpoint after ``done`` steps, or from nothing, to ``until``.

    Checkpoints are read from and written to ``folder``.
    """
    checkpoints = Path(folder)
    with open_cell(member, tree) as cell:
        if done:
            assert load_checkpoint(cell, checkpoints / step_folder(done)).step == done
        events = train(
            cell,
            checkpoints=checkpoints,
            until=until,
            should_stop=lambda: False,
        )
        return [plain(event) for event in events]
