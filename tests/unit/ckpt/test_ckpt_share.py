"""Who writes what: all of the state once, nobody more than others, in files that are not too large."""

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rayformer.ckpt.share import BYTES, cut, plan_files, shapes_of
from rayformer.ckpt.slots import IndexEntry
from rayformer.shards import Box, flat_pieces, whole

SHAPES = st.lists(st.integers(1, 7), min_size=0, max_size=3).map(tuple)


@st.composite
def states(draw):
    """The boxes of a state, each a flat range of a tensor cut into boxes, as an optimizer's shards are."""
    boxes = []
    for number, shape in enumerate(draw(st.lists(SHAPES, min_size=1, max_size=5))):
        numel = whole(shape).numel
        cuts = sorted({0, numel, *draw(st.lists(st.integers(0, numel), max_size=3))})
        for start, stop in pairwise(cuts):
            boxes += [(f"t{number}", piece.box) for piece in flat_pieces([whole(shape)], start, stop)]
    return boxes


@st.composite
def held(draw):
    """What each of several writers holds, in its own order; every box is held by one of them at least."""
    boxes = draw(states())
    writers = [f"dp{number}" for number in range(draw(st.integers(1, 4)))]
    having = [draw(st.sets(st.sampled_from(writers), min_size=1)) for _ in boxes]
    return {
        writer: in_memory(draw(st.permutations([box for box, by in zip(boxes, having) if writer in by])))
        for writer in writers
    }


def in_memory(boxes):
    entries, at = [], 0
    for tensor, box in boxes:
        entries.append(IndexEntry(tensor=tensor, box=box, start=at))
        at += box.numel
    return entries


def numel(entries):
    return sum(entry.box.numel for entry in entries)


@given(held(), st.integers(1, 200))
def test_every_element_is_written_once_by_one_who_holds_it(holdings, max_file_bytes):
    written = {tensor: np.zeros(shape, int) for tensor, shape in shapes_of(holdings.values()).items()}
    for writer, files in plan_files(holdings, max_file_bytes=max_file_bytes).items():
        mine = {entry.tensor: np.full(written[entry.tensor].shape, -1) for entry in holdings[writer]}
        for entry in holdings[writer]:
            mine[entry.tensor][entry.box.slices(whole(written[entry.tensor].shape))] = np.arange(
                entry.start, entry.start + entry.box.numel
            ).reshape(entry.box.shape)
        for piece in (piece for file in files for piece in file):
            at = piece.box.slices(whole(written[piece.tensor].shape))
            written[piece.tensor][at] += 1
            expected = np.arange(piece.start, piece.start + piece.box.numel).reshape(piece.box.shape)
            np.testing.assert_array_equal(
                mine[piece.tensor][at], expected, "it lies in one piece in the writer's memory"
            )
    assert all((count == 1).all() for count in written.values())


@given(held(), st.integers(1, 200))
def test_a_file_is_no_larger_than_it_may_be_unless_one_element_is(holdings, max_file_bytes):
    for files in plan_files(holdings, max_file_bytes=max_file_bytes).values():
        for file in files:
            assert 0 < BYTES * numel(file) <= max(max_file_bytes, BYTES)


@given(states(), st.integers(1, 6))
def test_bytes_are_dealt_evenly_where_all_hold_all(boxes, num_writers):
    holdings = {f"dp{number}": in_memory(boxes) for number in range(num_writers)}
    plan = plan_files(holdings, max_file_bytes=1 << 20)
    loads = [sum(map(numel, files)) for files in plan.values()]
    largest = max(box.numel for _, box in boxes)
    assert sum(loads) == sum(box.numel for _, box in boxes)
    assert max(loads) <= sum(loads) / num_writers + largest


@given(held(), st.integers(1, 200))
def test_the_plan_is_the_same_whoever_makes_it(holdings, max_file_bytes):
    again = {writer: list(entries) for writer, entries in holdings.items()}
    assert plan_files(holdings, max_file_bytes=max_file_bytes) == plan_files(again, max_file_bytes=max_file_bytes)


@given(SHAPES, st.integers(1, 40), st.integers(0, 9))
def test_pieces_of_a_box_follow_each_other_in_memory(shape, most, start):
    box = Box(lo=(3,) * len(shape), hi=tuple(3 + n for n in shape))
    pieces = list(cut(IndexEntry(tensor="t", box=box, start=start), most))
    memory, at = np.arange(start, start + box.numel).reshape(shape), start
    for piece in pieces:
        assert piece.start == at and piece.box.numel <= most
        assert memory[piece.box.slices(box)].reshape(-1).tolist() == list(range(at, at + piece.box.numel))
        at += piece.box.numel
    assert at == start + box.numel
