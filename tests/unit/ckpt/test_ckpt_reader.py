"""Any box is read out of any cutting, with few more bytes than it has; what can't be read is named."""

import errno
import os
from contextlib import contextmanager
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rayformer.ckpt.hash import shown
from rayformer.ckpt.manifest import Manifest
from rayformer.ckpt.reader import NEAR_BYTES, Source, find_damage, read_box, read_boxes, read_shard
from rayformer.ckpt.storage import LocalFolder
from rayformer.ckpt.writer import file_name, write_file
from rayformer.errors import CheckpointError, DamagedError
from rayformer.shards import Box, whole


def tensor(shape):
    return np.arange(whole(shape).numel, dtype=np.float32).reshape(shape)


def write(path, shape, boxes, num_files=2):
    """A tensor in boxes, dealt to files in turn: its manifest."""
    folder, values, records = LocalFolder(path), tensor(shape), []
    for number in range(num_files):
        mine = [("w", box, np.array(values[box.slices(whole(shape))], order="C")) for box in boxes[number::num_files]]
        if mine:
            records += write_file(folder, file_name("dp0", number), mine, {"w": shape}).records
    return Manifest(
        step=1, consumed_samples=0, layout={}, virtual_ranks=1, order="keyed", job={}, environment={},
        state_hash=shown(0), shards=records,
    )  # fmt: skip


@st.composite
def cut_up(draw, box):
    """``box`` cut at any places."""
    dims = [dim for dim, n in enumerate(box.shape) if n > 1]
    if not dims or draw(st.integers(0, 3)) == 0:
        return [box]
    dim = draw(st.sampled_from(dims))
    at = draw(st.integers(box.lo[dim] + 1, box.hi[dim] - 1))
    low = Box(lo=box.lo, hi=(*box.hi[:dim], at, *box.hi[dim + 1 :]))
    high = Box(lo=(*box.lo[:dim], at, *box.lo[dim + 1 :]), hi=box.hi)
    return draw(cut_up(low)) + draw(cut_up(high))


@st.composite
def box_in(draw, shape):
    lo = tuple(draw(st.integers(0, n - 1)) for n in shape)
    return Box(lo=lo, hi=tuple(draw(st.integers(a + 1, n)) for a, n in zip(lo, shape)))


@contextmanager
def read_bytes():
    """A list of how many bytes each read from a disk gave."""
    found, preadv = [], os.preadv

    def counted(*args):
        found.append(preadv(*args))
        return found[-1]

    with mock.patch("os.preadv", counted):
        yield found


@settings(max_examples=60)
@given(st.data(), st.sampled_from([(), (37,), (6, 50), (3, 4, 70), (2, 3, 2, 5)]), st.booleans())
def test_any_box_of_any_cutting_is_what_numpy_cuts_out(tmp_path_factory, data, shape, verify):
    boxes = data.draw(cut_up(whole(shape)))
    path = tmp_path_factory.mktemp("cut")
    manifest = write(path, shape, boxes)
    wanted = [
        ("w", box, np.full(box.shape, np.nan, np.float32)) for box in data.draw(st.sets(box_in(shape), max_size=3))
    ]
    with read_bytes() as counted:
        told = Source(path, manifest).read(wanted, verify=verify)
    for _, box, found in wanted:
        np.testing.assert_array_equal(found, tensor(shape)[box.slices(whole(shape))])
    assert verify or told == sum(counted)


@settings(max_examples=60)
@given(st.data(), st.sampled_from([(5000,), (9, 700), (3, 4, 600)]))
def test_few_more_bytes_are_read_than_are_wanted(tmp_path_factory, data, shape):
    """Of runs of 1 KiB and more, at most a gap that is not worth a second read between any two of them."""
    boxes = data.draw(cut_up(whole(shape)))
    path = tmp_path_factory.mktemp("cut")
    manifest = write(path, shape, boxes)
    first = data.draw(st.integers(0, shape[-1] - 256))
    last = data.draw(st.integers(first + 256, shape[-1]))
    rows = data.draw(box_in(shape[:-1]))
    box = Box(lo=(*rows.lo, first), hi=(*rows.hi, last))
    with read_bytes() as counted:
        told = read_boxes(path, manifest, [("w", box, np.empty(box.shape, np.float32))])
    runs = sum(box.numel // box.shape[-1] if part else 0 for part in map(box.intersect, boxes))
    assert 4 * box.numel <= sum(counted) == told <= 1.05 * 4 * box.numel + runs * NEAR_BYTES


def test_a_part_of_long_rows_costs_its_bytes_and_no_more(tmp_path):
    manifest = write(tmp_path, (64, 1024), [whole((64, 1024))])
    box = Box(lo=(0, 512), hi=(64, 1024))
    with read_bytes() as counted:
        read_boxes(tmp_path, manifest, [("w", box, np.empty(box.shape, np.float32))])
    assert sum(counted) == 4 * box.numel


@settings(max_examples=60)
@given(
    st.data(),
    st.sampled_from([(), (11,), (5, 300), (3, 4, 6)]),
    st.sampled_from(["<f4", "<u2", "u1"]),
    st.integers(0, 9),
)
def test_a_box_of_a_tensor_anywhere_in_a_file_is_read(tmp_path_factory, data, shape, dtype, offset):
    path, values = tmp_path_factory.mktemp("file"), tensor(shape).astype(dtype)
    (path / "file").write_bytes(b"x" * offset + values.tobytes() + b"x")
    box = data.draw(box_in(shape))
    with LocalFolder(path).open("file") as file:
        found = read_box(file, offset, shape, box, dtype)
    np.testing.assert_array_equal(found, values[box.slices(whole(shape))])


HALVES = [Box(lo=(0, 0), hi=(3, 5)), Box(lo=(3, 0), hi=(6, 5))]


@pytest.mark.parametrize("verify", [False, True])
def test_a_missing_file_a_short_one_and_changed_bytes_are_named(tmp_path, verify):
    def error(spoil):
        path = tmp_path / spoil.__name__
        manifest = write(path, (6, 5), HALVES)
        spoil(path / file_name("dp0", 1))
        with pytest.raises(DamagedError) as told:
            Source(path, manifest).read([("w", whole((6, 5)), np.empty((6, 5), np.float32))], verify=verify)
        assert str(path / file_name("dp0", 1)) in str(told.value) and "use an older checkpoint" in str(told.value)
        assert find_damage(path, manifest.shards) == str(told.value)
        return str(told.value)

    def missing(file):
        file.unlink()

    def short(file):
        file.write_bytes(file.read_bytes()[:-1])

    def changed(file):
        file.write_bytes(file.read_bytes()[:-1] + b"\x55")

    assert "it is missing" in error(missing)
    assert "it ends at byte" in error(short) and "w [3:6, 0:5] is not whole" in error(short)
    assert "are not those that were written" in error(changed)


class Unreadable(LocalFolder):
    """A folder whose files can't be opened, or not be read."""

    def __init__(self, path, opens):
        super().__init__(path)
        self._opens = opens

    @contextmanager
    def open(self, name):
        if not self._opens:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        yield self

    def read_into(self, offset, target):
        raise OSError(errno.EIO, os.strerror(errno.EIO))


@pytest.mark.parametrize("opens", [False, True])
@pytest.mark.parametrize("verify", [False, True])
def test_a_read_error_is_one_of_the_checkpoint_and_names_the_file(tmp_path, opens, verify):
    manifest = write(tmp_path, (6, 5), HALVES)
    folder, array = Unreadable(tmp_path, opens), np.empty((6, 5), np.float32)
    with pytest.raises(CheckpointError) as told:
        Source(folder, manifest).read([("w", whole((6, 5)), array)], verify=verify)
    assert f"{tmp_path}/{file_name('dp0', 0)}: it can't be read (Input/output error)" in str(told.value)
    assert not isinstance(told.value, DamagedError), "it may go another time"
    with pytest.raises(CheckpointError, match="Input/output error"):
        read_shard(folder, manifest.shards[0])


def test_what_a_checkpoint_does_not_hold_is_told(tmp_path):
    manifest = write(tmp_path, (6, 5), HALVES[:1])
    with pytest.raises(CheckpointError, match="it holds no v; is it of another model"):
        read_boxes(tmp_path, manifest, [("v", whole((6, 5)), np.empty((6, 5), np.float32))])
    with pytest.raises(CheckpointError, match="have 15 of the 30 elements"):
        read_boxes(tmp_path, manifest, [("w", whole((6, 5)), np.empty((6, 5), np.float32))])
