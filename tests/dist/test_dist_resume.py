"""A run that is broken off and goes on does what it would have done: rates, samples, and one checkpoint at the end."""

from pathlib import Path

import pytest
from cells import advance, job_tree, open_cell, the_same_on_all, train_events, world_of

from rayformer.cell.state import load_checkpoint, save_checkpoint
from rayformer.ckpt.manifest import find_checkpoints, step_folder
from rayformer.data.loader import TrainingOrder

# Peak 1e-3, floor 1e-4, four steps of warmup, cosine to step 20: the rate that update n uses.
RATES = {
    1: 2.5e-4, 2: 5e-4, 4: 1e-3, 5: 9.9135e-4, 8: 8.6820e-4, 12: 5.5e-4, 16: 2.3180e-4, 20: 1e-4, 21: 1e-4,
}  # fmt: skip


def test_the_rate_of_a_step_does_not_depend_on_interruptions(run_cells, corpus, tmp_path):
    rate = {"lr": 1e-3, "min_lr": 1e-4, "warmup_steps": 4, "decay_steps": 20}
    tree = job_tree(corpus, run={"steps": 22}, optim=rate, checkpoint={"every": 0, "keep": 0})
    found, done = {}, 0
    for until in (2, 4, 12, 22):
        (events,) = run_cells(1, train_events, tree, str(tmp_path), done, until)
        found |= {event["step"]: event["lr"] for event in events if "lr" in event}
        done = until
    assert list(found) == list(range(1, 23))
    assert {step: found[step] for step in RATES} == pytest.approx(RATES, rel=1e-4)


def read_places(member, tree, folder, done, steps):
    """Go on from a checkpoint for some steps, and save: which places of the order were read in each step."""
    read = []
    batch = TrainingOrder.batch

    def recorded(order, first, count):
        read.append((first, first + count))
        return batch(order, first, count)

    TrainingOrder.batch = recorded
    try:
        with open_cell(member, tree) as cell:
            if done:
                load_checkpoint(cell, Path(folder) / step_folder(done))
                assert cell.position.consumed_samples == 8 * done
            advance(cell, steps, done=done)
            save_checkpoint(cell, Path(folder), step=done + steps, consumed_samples=8 * (done + steps))
    finally:
        TrainingOrder.batch = batch
    return read


def test_samples_go_on_where_they_stopped_whatever_dp_is(run_cells, corpus, tmp_path):
    """dp 2, 1, 4, with changes in the middle of epochs: every place of the order is read once, in its step."""
    done, places = 0, []
    for dp, steps in ((2, 2), (1, 3), (4, 4)):
        tree = job_tree(corpus, layout={"dp": dp}, batch={"virtual_ranks": 4}, checkpoint={"keep": 0})
        by_cell = run_cells(dp, read_places, tree, str(tmp_path), done, steps)
        for ranges in zip(*by_cell):
            places.append(sorted(place for start, stop in ranges for place in range(start, stop)))
        done += steps
    assert places == [list(range(8 * step, 8 * (step + 1))) for step in range(done)]


@pytest.mark.parametrize(
    ("steps", "every", "saved"), [(3, 2, [2, 3]), (4, 2, [2, 4]), (3, 100, [3]), (3, None, [3]), (3, 0, [3])]
)
def test_the_end_is_saved_once(run_cells, corpus, tmp_path, steps, every, saved):
    section = {"keep": 0} if every is None else {"keep": 0, "every": every}
    tree = job_tree(corpus, run={"steps": steps}, layout={"dp": 2}, optim={"decay_steps": 20}, checkpoint=section)
    events = the_same_on_all(
        [[e["step"] for e in of_cell if "path" in e] for of_cell in run_cells(2, train_events, tree, str(tmp_path), 0, steps)]
    )
    assert events == saved
    assert [folder.name for folder in find_checkpoints(tmp_path)] == [step_folder(step) for step in reversed(saved)]


@pytest.mark.parametrize("keep", [0, 1, 2, 3])
@pytest.mark.parametrize("keep_every", [0, 4])
def test_as_many_checkpoints_stay_as_the_job_says(run_cells, corpus, tmp_path, keep, keep_every):
    section = {"every": 1, "keep": keep, "keep_every": keep_every}
    tree = job_tree(corpus, run={"steps": 6}, optim={"decay_steps": 20}, checkpoint=section)
    run_cells(world_of(tree), train_events, tree, str(tmp_path), 0, 6)
    kept = {step for step in range(1, 7) if keep == 0 or step > 6 - keep or (keep_every and step % keep_every == 0)}
    assert {int(folder.name[-3:]) for folder in find_checkpoints(tmp_path)} == kept
    assert {path.name for path in tmp_path.glob("step-*")} == {step_folder(step) for step in kept}
