"""The training loop of one cell: a generator of events, which others interleave with what they like."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

from rayformer.cell.build import Cell
from rayformer.cell.flops import flops_per_token
from rayformer.cell.sample import sample_text
from rayformer.cell.state import save_checkpoint
from rayformer.cell.step import StepRunner
from rayformer.errors import RunError
from rayformer.events import CellDone, CellEvent, CheckpointSaved, StepReport

MAX_SKIPPED = 10
MOST_TOLD = 50  # names in an error


def train(
    cell: Cell,
    *,
    checkpoints: Path,
    done_steps: int,
    consumed_samples: int,
    until: int,
    should_stop: Callable[[], bool],
) -> Iterator[CellEvent]:
    """Run the steps after ``done_steps`` up to ``until``, with the evaluations and checkpoints that the job asks for.

    ``consumed_samples`` are those of the steps done before.

    ``should_stop`` is asked once a step, before the vote; if it says so on any cell, all stop after that step with a
    checkpoint. Ends with CellDone. Raises RunError after ten steps in a row whose gradient was not finite.
    """
    job = cell.job
    runner = StepRunner(cell)
    generation, flops = cell.groups.generation, flops_per_token(job.model, job.batch.seq)
    skipped_in_row = 0
    if until == done_steps:
        saved = _save(cell, checkpoints, done_steps, consumed_samples)
        yield saved
        yield _done(cell, done_steps, saved)
    started = time.monotonic()
    for step in range(done_steps + 1, until + 1):
        batch_size = job.batch.size_after(consumed_samples)
        lr = runner.next_lr()
        measured = runner.begin(step, consumed_samples)
        consumed_samples += batch_size
        vote = runner.vote(stop=should_stop())
        runner.finish(measured, lr)
        step_s = time.monotonic() - started
        skipped_in_row = skipped_in_row + 1 if measured.nonfinite else 0
        last = step == until or vote.stop
        evaluates = step == job.run.steps or (job.eval.every > 0 and step % job.eval.every == 0)
        saves = last or (job.checkpoint.every > 0 and step % job.checkpoint.every == 0)
        eval_loss = runner.evaluate(job.eval.batches) if evaluates else None
        saved = _save(cell, checkpoints, step, consumed_samples) if saves else None
        started = time.monotonic()  # what it costs to hand over the report belongs to the next step
        yield StepReport(
            generation=generation,
            step=step,
            loss=measured.loss,
            grad_norm=measured.norm,
            lr=lr,
            tokens=batch_size * job.batch.seq,
            valid_tokens=measured.valid_tokens,
            consumed_samples=consumed_samples,
            step_s=step_s,
            skipped=bool(measured.nonfinite),
            nonfinite=measured.nonfinite,
            eval_loss=eval_loss,
            state_hash=saved.state_hash if saved else None,
            flops_per_token=flops,
            phase_s=dict(runner.phase_s),
        )
        if saved:
            yield saved
        if skipped_in_row == MAX_SKIPPED:
            raise RunError(
                f"the gradient was not finite in {MAX_SKIPPED} steps in a row, last in {_some(measured.nonfinite)};"
                " lower optim.lr or look at the data of these steps"
            )
        if last:
            assert saved is not None
            yield _done(cell, step, saved)
            return


def _some(names: tuple[str, ...]) -> str:
    more = f" and {len(names) - MOST_TOLD} more" if len(names) > MOST_TOLD else ""
    return f"{', '.join(names[:MOST_TOLD])}{more}"


def _save(cell: Cell, checkpoints: Path, step: int, consumed_samples: int) -> CheckpointSaved:
    return save_checkpoint(
        cell, checkpoints, step=step, consumed_samples=consumed_samples, keep=cell.job.checkpoint.keep
    )


def _done(cell: Cell, step: int, saved: CheckpointSaved) -> CellDone:
    finished = step == cell.job.run.steps
    cell.optimizer.await_parameters()
    writes = finished and cell.groups.cell.dp == 0
    return CellDone(
        generation=cell.groups.generation,
        outcome="finished" if finished else "stopped",
        step=step,
        checkpoint=saved.path,
        sample=sample_text(cell) if writes else None,
    )
