"""A batch that grows: its sizes, every sample once, the same bits in every layout, and a resume in the middle."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from cells import SMALL_BUCKETS, job_tree, open_cell, the_same_on_all, world_of

from rayformer.cell.loop import train
from rayformer.cell.state import load_checkpoint
from rayformer.ckpt.manifest import step_folder
from rayformer.config.batch import BatchConfig
from rayformer.data.order import sample_at
from rayformer.events import plain


@pytest.mark.parametrize(
    ("whole", "start", "increment", "samples", "sizes"),
    [
        (8, 2, 2, 30, {0: 2, 9: 2, 10: 4, 19: 4, 20: 6, 29: 6, 30: 8, 31: 8, 10**9: 8}),
        (128, 32, 32, 1000, {0: 32, 333: 32, 334: 64, 666: 64, 667: 96, 999: 96, 1000: 128, 1001: 128}),
        (48, 16, 32, 100, {0: 16, 99: 16, 100: 48, 101: 48}),
        (1536, 16, 16, 5_859_375, {0: 16, 61_677: 16, 61_678: 32, 5_797_697: 1504, 5_797_698: 1520, 5_859_376: 1536}),
    ],
)
def test_sizes_are_megatrons(whole, start, increment, samples, sizes):
    ramp = {"start": start, "increment": increment, "samples": samples}
    batch = BatchConfig.model_validate({"global": whole, "seq": 4, "rampup": ramp})
    assert {consumed: batch.size_after(consumed) for consumed in sizes} == sizes


def test_without_a_ramp_every_batch_is_the_whole_one():
    assert {BatchConfig.model_validate({"global": 8, "seq": 4}).size_after(n) for n in (0, 1, 100)} == {8}


SIZES = [2, 2, 2, 2, 2, 4, 4, 4, 6, 6, 8, 8]  # by step, of the first ramp above
BATCH = {"virtual_ranks": 2, "rampup": {"start": 2, "increment": 2, "samples": 30}}


class Read:
    """A training order that notes which samples of the run were read."""

    def __init__(self, order):
        self._order = order
        self.num_samples = order.num_samples
        self.numbers = []

    def batch(self, first, count):
        self.numbers += range(first, first + count)
        return self._order.batch(first, count)


def ramp_up(member, tree, folder, done, until):
    """A task: reports of the steps after ``done``, the samples this cell read, of how many, and whether it is first."""
    with open_cell(member, tree, bucket_elements=SMALL_BUCKETS) as built:
        training = Read(built.training) if built.training else None
        cell = replace(built, training=training)
        if done:
            load_checkpoint(cell, Path(folder) / step_folder(done))
        events = train(
            cell,
            checkpoints=Path(folder),
            until=until,
            should_stop=lambda: False,
        )
        reports = [{**plain(e), "step_s": 0, "phase_s": None} for e in events if hasattr(e, "loss")]
        return reports, training.numbers, training.num_samples, cell.stages[0].is_first


def ramped(run_cells, corpus, layout, folder, *, done=0, until=12):
    """The reports, which all cells must agree on, and the samples that the first stages read."""
    tree = job_tree(corpus, layout=layout, batch=BATCH, checkpoint={"every": 6})
    cells = run_cells(world_of(tree), ramp_up, tree, str(folder), done, until)
    read = [number for _, numbers, _, is_first in cells if is_first for number in numbers]
    return the_same_on_all([reports for reports, *_ in cells]), read, cells[0][2]


@pytest.fixture(scope="module")
def alone(run_cells, corpus, tmp_path_factory):
    """The run in one process."""
    return ramped(run_cells, corpus, {}, tmp_path_factory.mktemp("alone"))


def test_steps_have_the_sizes_of_the_ramp(alone):
    reports, _, _ = alone
    assert [report["tokens"] // 16 for report in reports] == SIZES
    assert [report["consumed_samples"] for report in reports] == [sum(SIZES[: n + 1]) for n in range(len(SIZES))]
    assert [report["valid_tokens"] for report in reports] == [16 * size for size in SIZES]


@pytest.mark.parametrize("layout", [{}, {"dp": 2}, {"dp": 2, "pp": 2}], ids=str)
def test_every_sample_is_read_once_and_the_bits_are_the_same(run_cells, corpus, tmp_path, alone, layout):
    reports, read, num_samples = ramped(run_cells, corpus, layout, tmp_path)
    assert reports == alone[0] and reports[-1]["state_hash"]
    assert sorted(read) == list(range(sum(SIZES)))
    first_epoch = [sample_at(number, num_samples=num_samples, seed=1234) for number in read if number < num_samples]
    assert sorted(first_epoch) == list(range(num_samples))


@pytest.fixture(scope="module")
def begun(run_cells, corpus, tmp_path_factory):
    """The run stopped after 7 steps on 2 stages of 2 replicas: its folder, reports and samples."""
    folder = tmp_path_factory.mktemp("begun")
    return folder, *ramped(run_cells, corpus, {"dp": 2, "pp": 2}, folder, until=7)[:2]


@pytest.mark.parametrize("layout", [{"dp": 2}, {"pp": 2}], ids=str)
def test_a_run_stopped_within_the_ramp_goes_on_in_another_layout_as_if_it_had_not(
    run_cells, corpus, tmp_path, alone, begun, layout
):
    folder, first, read_first = begun
    shutil.copytree(folder, tmp_path / "copy")
    second, read_second, _ = ramped(run_cells, corpus, layout, tmp_path / "copy", done=7)
    expected = [{**report, "state_hash": None} for report in alone[0]]
    assert [{**report, "state_hash": None} for report in first + second] == expected
    assert second[-1]["state_hash"] == alone[0][-1]["state_hash"]
    assert sorted(read_first) == list(range(sum(SIZES[:7])))
    assert sorted(read_second) == list(range(sum(SIZES[:7]), sum(SIZES)))
