"""A few steps of a small model in this process, so that a cell that it takes over later starts warm.

Everything that a first step loads or sets up once is then there: modules, kernels, the allocator, the corpus index.
"""

from __future__ import annotations

import torch

from rayformer.cell.build import build_cell
from rayformer.cell.plan import RunPlan
from rayformer.cell.step import StepRunner
from rayformer.config.job import Job
from rayformer.config.model import ModelConfig
from rayformer.groups import Groups
from rayformer.layout import Layout

STEPS = 2


def rehearse(plan: RunPlan) -> None:
    """Train a small model on the data of ``plan``'s job, on the CPU, and forget it."""
    job = small_job(plan.job)
    groups = Groups.form(layout=Layout(), rank=0, generation=0, run="rehearsal", store=None, device=torch.device("cpu"))
    cell = build_cell(job, groups, corpus_cache=plan.files.corpus_cache, base_dir=plan.base_dir)
    runner = StepRunner(cell)
    for step in range(STEPS):
        measured = runner.begin(step + 1, step)
        runner.vote(stop=False)
        runner.finish(measured, runner.next_lr())
    cell.optimizer.await_parameters()


def small_job(job: Job) -> Job:
    """``job`` for one process, with a model of one small layer and one sample a step."""
    model = ModelConfig(layers=1, hidden=32, heads=2, ffn=32, vocab=job.model.vocab, norm=_norm(job))
    layout = job.layout.model_copy(update={"tp": 1, "pp": 1, "dp": 1, "sequence_parallel": False, "stages": "auto"})
    batch = job.batch.model_copy(update={"global_": 1, "micro": 1, "virtual_ranks": 1, "rampup": None})
    return job.model_copy(update={"model": model, "layout": layout, "batch": batch})


def _norm(job: Job) -> str:
    return getattr(job.model, "norm", "rmsnorm")
