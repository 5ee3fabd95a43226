"""The training loop of one cell: a generator of events, which others interleave with what they like."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from rayformer.cell.build import Cell
from rayformer.cell.flops import flops_per_token
from rayformer.cell.progress import NoProgress, Progress
from rayformer.cell.sample import sample_text
from rayformer.cell.snapshot import Snapshots
from rayformer.cell.state import save_checkpoint
from rayformer.cell.step import StepRunner
from rayformer.ckpt.manifest import MANIFEST, read_manifest, step_folder
from rayformer.ckpt.storage import Folder, folder_at
from rayformer.errors import RunError
from rayformer.events import (
    CellDone,
    CellEvent,
    CheckpointSaved,
    SaveDue,
    SaveFailed,
    SaveSkipped,
    SaveWaits,
    StepReport,
)

MAX_SKIPPED = 10
STEPS_UNTIL_SETTLED = 5  # the first are slower, and first copies touch new memory
MOST_TOLD = 50  # names in an error


def train(
    cell: Cell,
    *,
    checkpoints: Path | Folder,
    until: int,
    should_stop: Callable[[], bool],
    snapshots: Snapshots | None = None,
    progress: Progress | None = None,
    is_given_up: Callable[[], bool] = bool,
    goes_on: bool = False,
) -> Iterator[CellEvent]:
    """Run the steps after the cell's position up to ``until``, with the evaluations and checkpoints of the job.

    With ``snapshots`` a checkpoint is pinned in them, and SaveDue says so; without, the cells write it before they go
    on. ``should_stop`` is asked once a step, before the vote; if it says so on any cell, all stop after that step with
    a checkpoint. A wait for the checkpoint before ends when the generation ``is_given_up``. ``goes_on`` says that an
    earlier generation did the last step, and may have been broken off before its evaluation, its checkpoint or its
    report were done: what is missing of them is done first. Ends with CellDone.
    Raises RunError after ten steps in a row whose gradient was not finite.
    """
    job, position = cell.job, cell.position
    runner = StepRunner(cell, progress)
    after = _AfterStep(cell, runner, folder_at(checkpoints), progress or NoProgress(), snapshots, is_given_up)
    generation, flops = cell.groups.generation, flops_per_token(job.model, job.batch.seq)
    if position.step == until or (goes_on and position.step > 0):
        yield from after.events(last=position.step == until, goes_on=goes_on)
        if position.step == until:
            return
    settled = position.step + STEPS_UNTIL_SETTLED
    started = time.monotonic()
    for step in range(position.step + 1, until + 1):
        batch_size = job.batch.size_after(position.consumed_samples)
        lr = runner.next_lr()
        measured = runner.begin(step, position.consumed_samples)
        vote = runner.vote(stop=should_stop(), busy=snapshots is not None and snapshots.is_pinned)
        runner.finish(measured, lr)
        position.report = StepReport(
            generation=generation,
            step=step,
            loss=measured.loss,
            grad_norm=measured.norm,
            lr=lr,
            tokens=batch_size * job.batch.seq,
            valid_tokens=measured.valid_tokens,
            consumed_samples=position.consumed_samples,
            step_s=time.monotonic() - started,
            skipped=bool(measured.nonfinite),
            nonfinite=measured.nonfinite,
            flops_per_token=flops,
            phase_s=runner.phase_s,  # the snapshot adds its own
        )
        if snapshots is not None:
            if snapshots.is_due(step):
                runner.snapshot(snapshots)
            if step == settled:  # on every cell, also where another interval was agreed on before
                snapshots.agree(position.report.step_s)
        last = step == until or vote.stop
        if job.observe.trace:
            yield runner.trace()
        for event in after.events(last=last, busy=vote.busy):
            started = time.monotonic()  # what it costs to hand over the report belongs to the next step
            yield event
        if last:
            return
        if position.skipped_in_row == MAX_SKIPPED:
            raise RunError(
                f"the gradient was not finite in {MAX_SKIPPED} steps in a row, last in {_some(measured.nonfinite)};"
                " lower optim.lr or look at the data of these steps"
            )


class _AfterStep:
    """What follows an update: evaluation, checkpoint and report, each where it is due."""

    def __init__(
        self,
        cell: Cell,
        runner: StepRunner,
        checkpoints: Folder,
        progress: Progress,
        snapshots: Snapshots | None,
        is_given_up: Callable[[], bool],
    ) -> None:
        self._cell, self._runner, self._checkpoints, self._progress = cell, runner, checkpoints, progress
        self._snapshots, self._is_given_up = snapshots, is_given_up

    def events(self, *, last: bool, busy: bool = False, goes_on: bool = False) -> Iterator[CellEvent]:
        """Evaluate and save as is due after the cell's position, then report it; the last step also ends the run.

        ``busy`` says that the checkpoint before is not written yet on some cell.
        """
        cell, job, position = self._cell, self._cell.job, self._cell.position
        step, generation = position.step, cell.groups.generation
        evaluates = step > 0 and (step == job.run.steps or (job.eval.every > 0 and step % job.eval.every == 0))
        saves = last or (step > 0 and job.checkpoint.every > 0 and step % job.checkpoint.every == 0)
        skips = saves and busy and not last and job.checkpoint.busy == "skip"
        eval_loss = self._runner.evaluate(job.eval.batches) if evaluates and (position.report or goes_on) else None
        report = None if position.report is None else replace(position.report, eval_loss=eval_loss)
        told: Iterator[CellEvent] = iter(())
        if skips:
            told = iter([SaveSkipped(generation=generation, step=step)])
        elif saves:
            if self._snapshots is not None and self._snapshots.is_pinned:
                yield SaveWaits(generation=generation, step=step)
            report, told = self._save(report, last, goes_on)
        if report is not None:
            yield report
        position.report = None
        yield from told
        if last:
            yield _done(cell, step, self._checkpoints / step_folder(step))

    def _save(
        self, report: StepReport | None, last: bool, goes_on: bool
    ) -> tuple[StepReport | None, Iterator[CellEvent]]:
        """Save the state as it is; what is to be told before of the step, and what of the saving.

        The last step's report waits for its hash.
        """
        step = self._cell.position.step
        self._progress.at("save", step)
        if self._snapshots is not None:
            self._snapshots.pin(self._is_given_up)
            due = SaveDue(generation=self._cell.groups.generation, step=step, report=report if last else None)
            return None if last else report, iter([due])
        saved = self._save_here(goes_on)
        if isinstance(saved, SaveFailed):
            if last:
                raise RunError(f"the checkpoint of step {step} could not be written: {saved.message}")
            return report, iter([saved])
        return None if report is None else replace(report, state_hash=saved.state_hash), iter([saved])

    def _save_here(self, goes_on: bool) -> CheckpointSaved | SaveFailed:
        cell, step = self._cell, self._cell.position.step
        folder = self._checkpoints / step_folder(step)
        if goes_on and any(cell.groups.world.gather_values(folder.size(MANIFEST) is not None)):
            found = read_manifest(folder)  # the generation before this one got that far
            return CheckpointSaved(
                generation=cell.groups.generation,
                step=step,
                path=str(folder),
                state_hash=found.state_hash,
                seconds=0.0,
            )
        return save_checkpoint(cell, self._checkpoints, step=step, consumed_samples=cell.position.consumed_samples)


def _some(names: tuple[str, ...]) -> str:
    more = f" and {len(names) - MOST_TOLD} more" if len(names) > MOST_TOLD else ""
    return f"{', '.join(names[:MOST_TOLD])}{more}"


def _done(cell: Cell, step: int, checkpoint: Folder) -> CellDone:
    finished = step == cell.job.run.steps
    cell.optimizer.await_parameters()
    writes = finished and cell.groups.cell.dp == 0
    return CellDone(
        generation=cell.groups.generation,
        outcome="finished" if finished else "stopped",
        step=step,
        checkpoint=str(checkpoint),
        sample=sample_text(cell) if writes else None,
    )
