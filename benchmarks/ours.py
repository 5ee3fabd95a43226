"""rayformer's side of a benchmark: one cell, built as a worker builds it and stepped as cell/loop.py does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from rayformer.cell.build import Cell, build_cell
from rayformer.cell.process import prepare_process
from rayformer.cell.step import StepRunner
from rayformer.config.job import resolve
from rayformer.config.load import job_from_tree
from rayformer.groups import Groups, StoreClients


def open_cell(tree: dict[str, Any], rank: int, world: int, store: dist.Store) -> Cell:
    """The cell of ``rank``, its groups formed over ``store``."""
    job = job_from_tree(tree)
    job = resolve(job, dp=job.layout.dp, recorded={})
    device = torch.device("cpu")
    prepare_process(job, device)
    groups = Groups.form(
        layout=job.layout.degrees,
        rank=rank,
        generation=1,
        run=job.run.name,
        store=StoreClients(store) if world > 1 else None,
        device=device,
    )
    return build_cell(job, groups, corpus_cache=Path("unused"))


def stepper(cell: Cell) -> Callable[[int], float]:
    """``step(number)`` trains step ``number``, from 0; its loss on rank 0, and 0 elsewhere."""
    runner = StepRunner(cell)

    def step(number: int) -> float:
        lr = runner.next_lr()
        measured = runner.begin(number + 1, number * cell.job.batch.global_)
        assert not runner.vote(stop=False).stop
        runner.finish(measured, lr)
        return measured.loss if cell.groups.world.rank == 0 else 0.0

    return step
