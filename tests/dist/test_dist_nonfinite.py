"""A gradient that is not finite on one cell: all cells skip the step, say where it came from, and change nothing."""

import math
from dataclasses import asdict, replace
from functools import cache
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from cells import SMALL_BUCKETS, job_tree, open_cell, the_same_on_all, world_of

from rayformer.cell.loop import MAX_SKIPPED, train
from rayformer.cell.state import load_checkpoint, save_checkpoint, state_hash
from rayformer.cell.step import StepRunner
from rayformer.ckpt.manifest import step_folder
from rayformer.errors import RunError

ROW, SAMPLES, SEQ = 200, 4, 16
GOOD, BAD = False, True


class Scripted:
    """A training order of the same 4 samples in every step; in a bad one the last two have the token 200."""

    num_samples = 10**6

    def __init__(self, steps):
        self._steps = steps

    def batch(self, first, count):
        block = np.random.default_rng(3).integers(0, ROW, (SAMPLES, SEQ + 1))
        if self._steps[first // SAMPLES] is BAD:
            block[2:, 5] = ROW
        rows = block[np.arange(first, first + count) % SAMPLES]
        return rows[:, :-1].copy(), rows[:, 1:].copy()


def scripted(built, steps):
    return replace(built, training=built.training and Scripted(steps))


def set_row(cell, name, value):
    """Give the masters of one row of ``name`` a value, as if loaded; what was there, None where the row is not."""
    before = None
    for shard in cell.optimizer.owned_state():
        if shard.tensor == f"{name}@master" and shard.box.lo[0] <= ROW < shard.box.hi[0]:
            row = shard.value[ROW - shard.box.lo[0]]
            before = row.clone()
            row.copy_(torch.as_tensor(value))
    cell.optimizer.start_gather()
    cell.optimizer.await_parameters()
    return before


def run_script(member, tree, name, heals, steps):
    """A task: what each step came to, what is left at the end, and the parameters that this cell computes with.

    Row 200 of ``name`` is inf, in bad steps only if it ``heals``.
    """
    with open_cell(member, tree, bucket_elements=SMALL_BUCKETS) as built:
        cell = scripted(built, steps)
        runner, found = StepRunner(cell), []
        healthy = set_row(cell, name, math.inf)
        now = state_hash(cell)
        for step, bad in enumerate(steps):
            if heals:
                set_row(cell, name, math.inf if bad else healthy)
                now = state_hash(cell)
            before, lr = now, runner.next_lr()
            measured = runner.begin(step + 1, step * SAMPLES)
            runner.vote(stop=False)
            runner.finish(measured, lr)
            cell.optimizer.await_parameters()
            now = state_hash(cell)
            found.append(
                {
                    "loss": str(measured.loss),
                    "norm": str(measured.norm),
                    "nonfinite": measured.nonfinite,
                    "changed": now != before,
                    "lr": lr,
                    "updates": cell.optimizer.num_updates,
                    "scale": cell.optimizer.loss_scale.scale,
                }
            )
        names = [f"{cell.groups.cell} {p.spec.name}" for p in cell.stages[0].parameters()]
        return found, now, names, cell.parameters.buffer.float().numpy().copy()


TIED = {"tie_embeddings": True}
CASES = {
    "one replica meets a bad row": ({"dp": 2}, {}, "embedding.weight", False),
    "one replica of two stages does": ({"dp": 2, "pp": 2}, {}, "embedding.weight", False),
    "the last stage has a bad row": ({"pp": 2}, {}, "output.linear.weight", True),
    "a tied table has": ({"dp": 2, "pp": 2}, TIED, "embedding.weight", True),
    "a tied table has in one process": ({}, TIED, "embedding.weight", True),
    "one of two parts of the table has": ({"tp": 2}, {}, "embedding.weight", True),
}
STEPS = [BAD, BAD, GOOD, GOOD, BAD, GOOD]
SCALES = [65536, 32768, 32768, 65536, 65536, 65536]  # two overflows are borne, two finite steps raise it


def job(corpus, layout, params="fp32", model=None, **options):
    return job_tree(
        corpus,
        layout=layout,
        model={"layers": 2, **(model or {})},
        batch={"global": SAMPLES, "virtual_ranks": 2},
        precision={"params": params, **({"scale_interval": 2} if params == "fp16" else {})},
        **options,
    )


@pytest.fixture(scope="module")
def run_case(run_cells, corpus):
    """``run_case(case, params)``: what `run_script` gives by rank, each run once."""

    @cache
    def run(case, params, steps=tuple(STEPS)):
        layout, model, name, heals = CASES[case]
        tree = job(corpus, layout, params, model, optim={"warmup_steps": 5})
        return run_cells(world_of(tree), run_script, tree, name, heals, list(steps))

    return run


FORMATS = ["fp32", "bf16", "fp16"]


@pytest.mark.parametrize("params", FORMATS)
@pytest.mark.parametrize("case", CASES)
def test_all_cells_skip_the_same_steps_and_go_on_as_if_they_had_not_been(run_case, case, params):  # B76
    layout, _, name, heals = CASES[case]
    cells = run_case(case, params)
    found, final = the_same_on_all([(found, final) for found, final, *_ in cells])

    bad_cells = cells[1::2] if name == "embedding.weight" and not heals else cells  # dp rank 1, or all
    expected = {text for *_, names, _ in bad_cells for text in names}
    for step, bad in zip(found, STEPS, strict=True):
        assert step["changed"] is not bad
        assert set(step["nonfinite"]) == (expected if bad else set())
        assert len(step["nonfinite"]) == len(set(step["nonfinite"]))
        assert (step["loss"] == step["norm"] == "nan") is bad
    assert [step["updates"] for step in found] == [0, 0, 1, 2, 2, 3]
    assert [step["lr"] / 1e-3 for step in found] == pytest.approx([0.2, 0.2, 0.2, 0.4, 0.6, 0.6])
    assert [step["scale"] for step in found] == (SCALES if params == "fp16" else [1.0] * len(STEPS))

    replica = cells[:: layout.get("dp", 1)] if "dp" in layout else None
    for (*_, one), (*_, other) in zip(replica or (), cells[1::2]):
        np.testing.assert_array_equal(one, other)

    good = [float(step["loss"]) for step, bad in zip(found, STEPS) if not bad]
    assert good[2] < good[1] < good[0]
    if params == "fp32":
        ((undisturbed, its_final, *_), *_) = run_case(case, params, (GOOD,) * 3)
        assert (good, final) == ([float(step["loss"]) for step in undisturbed], its_final)


@pytest.mark.parametrize("params", FORMATS)
@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("one replica meets a bad row", "one replica of two stages does"),
        ("a tied table has in one process", "a tied table has"),
    ],
)
def test_a_run_with_skips_has_the_same_bits_in_every_layout(run_case, one, other, params):
    ((steps, final, *_), *_), ((other_steps, other_final, *_), *_) = run_case(one, params), run_case(other, params)
    told = [[{**step, "nonfinite": bool(step["nonfinite"])} for step in run] for run in (steps, other_steps)]
    assert told[0] == told[1] and final == other_final


def poked(member, tree, name, values):
    """A task: what a step says whose own gradient of ``name`` has the value that is given for this rank, or none."""
    with open_cell(member, tree, bucket_elements=SMALL_BUCKETS) as cell:
        close = cell.grads.close_bucket

        def poke_and_close(bucket):
            parts = close(bucket)
            for slot in bucket.slots:
                if slot.name == name and values.get(member.rank) is not None:
                    parts[0][1][slot.start - bucket.start + slot.numel // 2] = values[member.rank]
            return parts

        cell.grads.close_bucket = poke_and_close
        return StepRunner(cell).begin(1, 0).nonfinite


DOWN = "layers.1.mlp.down.weight"


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize(
    ("layout", "rank", "cell"),
    [
        ({}, 0, "pp0.dp0.cp0.tp0"),
        ({"dp": 2}, 1, "pp0.dp1.cp0.tp0"),
        ({"tp": 2}, 1, "pp0.dp0.cp0.tp1"),
        ({"tp": 2, "dp": 2}, 2, "pp0.dp1.cp0.tp0"),
    ],
    ids=str,
)
def test_the_one_bad_parameter_of_one_cell_is_named(run_cells, corpus, layout, rank, cell, bad):
    tree = job_tree(corpus, layout=layout, batch={"micro": 2, "virtual_ranks": 2})
    told = the_same_on_all(run_cells(world_of(tree), poked, tree, DOWN, {rank: bad}))
    assert told == (f"{cell} {DOWN}",)


def test_finite_parts_whose_sum_is_not_are_told_without_a_cell(run_cells, corpus):
    tree = job_tree(corpus, layout={"dp": 2}, batch={"virtual_ranks": 2})
    assert the_same_on_all(run_cells(2, poked, tree, DOWN, {0: 3e38, 1: 3e38})) == (DOWN,)


def loop_through(member, tree, folder, steps):
    """A task: the reports of the training loop while row 200 of the embedding is inf, and its error if there is one."""
    with open_cell(member, tree) as built:
        cell = scripted(built, steps)
        set_row(cell, "embedding.weight", math.inf)
        events = train(
            cell,
            checkpoints=Path(folder),
            until=len(steps),
            should_stop=lambda: False,
        )
        reports = []
        try:
            reports += (
                (e.step, e.skipped, bool(e.nonfinite), e.lr, e.consumed_samples) for e in events if hasattr(e, "loss")
            )
        except RunError as error:
            return reports, str(error)
        return reports, None


@pytest.mark.parametrize("layout", [{"dp": 2}, {"dp": 2, "pp": 2}], ids=str)
def test_ten_skips_in_a_row_end_the_run_and_name_what_was_not_finite(run_cells, corpus, tmp_path, layout):
    tree = job(corpus, layout, checkpoint={"every": 4})
    reports, error = the_same_on_all(run_cells(world_of(tree), loop_through, tree, str(tmp_path), [BAD] * 12))
    assert [step for step, *_ in reports] == list(range(1, MAX_SKIPPED + 1))
    assert f"not finite in {MAX_SKIPPED} steps in a row" in error and "pp0.dp1.cp0.tp0 embedding.weight" in error
    assert "dp0" not in error


def test_nine_skips_in_a_row_are_borne_and_the_rate_waits_for_them(run_cells, corpus, tmp_path):
    steps = [*[BAD] * 9, GOOD, *[BAD] * 9, GOOD]
    tree = job(corpus, {"dp": 2}, optim={"warmup_steps": 4})
    reports, error = the_same_on_all(run_cells(2, loop_through, tree, str(tmp_path), steps))
    assert error is None and MAX_SKIPPED == 10
    assert [skipped for _, skipped, *_ in reports] == [nonfinite for _, _, nonfinite, *_ in reports] == steps
    assert [lr for *_, lr, _ in reports] == [*[2.5e-4] * 10, *[5e-4] * 10]
    assert [consumed for *_, consumed in reports] == [SAMPLES * n for n in range(1, 21)]


def scaled_steps(member, tree, folder, steps, done, save):
    """A task: of each step after ``done`` loss and scale, from a checkpoint if there are any, to one if ``save``."""
    with open_cell(member, tree) as built:
        cell = scripted(built, steps)
        if done:
            load_checkpoint(cell, Path(folder) / step_folder(done))
        else:
            set_row(cell, "embedding.weight", math.inf)
        runner, found = StepRunner(cell), [asdict(cell.optimizer.loss_scale)]
        for step in range(done, len(steps)):
            measured = runner.begin(step + 1, step * SAMPLES)
            runner.finish(measured, runner.next_lr())
            found.append((str(measured.loss), str(measured.norm), asdict(cell.optimizer.loss_scale)))
        cell.optimizer.await_parameters()
        if save:
            save_checkpoint(cell, Path(folder), step=len(steps), consumed_samples=SAMPLES * len(steps))
        return found, state_hash(cell)


@pytest.mark.parametrize("cut", [2, 4])
def test_the_loss_scale_goes_on_from_a_checkpoint_in_another_layout(run_cells, corpus, tmp_path, cut):
    steps = [BAD, BAD, GOOD, BAD, BAD, GOOD, GOOD, GOOD]

    def run(layout, *, until=8, done=0, save=False):
        tree = job(corpus, layout, "fp16")
        return the_same_on_all(run_cells(world_of(tree), scaled_steps, tree, str(tmp_path), steps[:until], done, save))

    whole, final = run({})
    first, _ = run({"dp": 2, "pp": 2}, until=cut, save=True)
    second, resumed = run({"dp": 2}, done=cut)
    assert second[0] == first[-1][-1] and second[0]["scale"] == {2: 32768, 4: 16384}[cut]
    assert (first + second[1:], resumed) == (whole, final)
    assert [step[-1]["scale"] for step in whole[1:]] == [65536, 32768, 32768, 16384, 8192, 8192, 16384, 16384]


def fp16_steps(member, tree, steps):
    """A task: of each step loss, norm, what was not finite and the scale after it; and the state hash at the end."""
    with open_cell(member, tree, bucket_elements=SMALL_BUCKETS) as cell:
        runner, found = StepRunner(cell), []
        for step in range(steps):
            measured = runner.begin(step + 1, step * SAMPLES)
            runner.finish(measured, 1e-3)
            found.append(
                (str(measured.loss), str(measured.norm), bool(measured.nonfinite), cell.optimizer.loss_scale.scale)
            )
        cell.optimizer.await_parameters()
        return found, state_hash(cell)


@pytest.fixture(scope="module")
def fp16_alone(run_cells, corpus):
    """20 steps in one process, in which the scale rises until gradients overflow."""
    return run_cells(1, fp16_steps, job(corpus, {}, "fp16"), 20)[0]


def test_the_scale_rises_until_gradients_overflow_and_then_falls(fp16_alone):
    steps, _ = fp16_alone
    scales, skipped = [scale for *_, scale in steps], [nonfinite for *_, nonfinite, _ in steps]
    assert scales[:6] == [65536, 131072, 131072, 262144, 262144, 524288] and not any(skipped[:6])
    assert 1 <= sum(skipped) <= 10 and min(scales) >= 65536 and any(b < a for a, b in pairwise(scales))
    assert all(loss != "nan" for loss, *_ in steps), "only the scaled gradient is not finite"


@pytest.mark.parametrize("layout", [{"dp": 2}, {"pp": 2}, {"dp": 2, "pp": 2}], ids=str)
def test_fp16_has_the_same_bits_over_dp_and_pp(run_cells, corpus, fp16_alone, layout):
    tree = job(corpus, layout, "fp16")
    assert the_same_on_all(run_cells(world_of(tree), fp16_steps, tree, 20)) == fp16_alone


def test_fp16_follows_the_curve_of_fp32_to_its_rounding(reference, corpus):
    rounded, _ = reference(job_tree(corpus, precision={"params": "fp16"}), 10)
    exact, _ = reference(job_tree(corpus), 10)
    losses, norms = (max(abs(a / b - 1) for a, b in zip(*column)) for column in zip(zip(*rounded), zip(*exact)))
    assert 0 < losses < 5e-5 and 0 < norms < 1e-3  # fp16 keeps 11 bits, 5e-4


def zeros_of_gradient(member, tree, scale):
    """A task: the share of the first gradient's elements that are zero with a fixed loss scale, and its norm."""
    precision = {"params": "fp16", "loss_scale": scale}
    with open_cell(member, {**tree, "precision": precision}) as cell:
        runner = StepRunner(cell)
        measured = runner.begin(1, 0)
        return float((torch.cat(runner.shards) == 0).float().mean()), measured.norm


def test_the_loss_scale_keeps_gradients_that_are_below_the_smallest_number_of_fp16(run_cells, reference, corpus):
    ((_, exact),) = reference(job_tree(corpus), 1)[0]
    ((few, norm),) = run_cells(1, zeros_of_gradient, job_tree(corpus), 65536.0)
    ((many, its_norm),) = run_cells(1, zeros_of_gradient, job_tree(corpus), 2.0**-14)
    assert few < 0.3 and many > 0.5  # padding included
    assert abs(norm / exact - 1) < 5e-5 and abs(its_norm / exact - 1) > 5e-3
