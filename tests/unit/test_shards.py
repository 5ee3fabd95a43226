"""Boxes, splits, flat ranges and transfers: pieces of a tensor lie where they say, and are copied exactly once."""

from itertools import pairwise
from math import prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayformer.shards import (
    Box,
    CoverageError,
    Holding,
    Init,
    ParamSpec,
    Split,
    flat_pieces,
    plan_transfers,
    share_start,
    tensor_name,
    whole,
)


def numbered(shape):
    return np.arange(prod(shape)).reshape(shape)


def cut(array, box):
    return array[box.slices(whole(array.shape))]


shapes = st.lists(st.integers(1, 6), min_size=1, max_size=4).map(tuple)


@st.composite
def boxes_of(draw, shape):
    corners = [sorted(draw(st.lists(st.integers(0, n), min_size=2, max_size=2, unique=True))) for n in shape]
    return Box(lo=tuple(lo for lo, _ in corners), hi=tuple(hi for _, hi in corners))


@st.composite
def partitions_of(draw, box, depth=4):
    """Boxes that fill ``box`` exactly, by cutting it again and again at random places."""
    dims = [d for d, n in enumerate(box.shape) if n > 1]
    if depth == 0 or not dims or not draw(st.booleans()):
        return [box]
    dim = draw(st.sampled_from(dims))
    at = draw(st.integers(box.lo[dim] + 1, box.hi[dim] - 1))
    low = Box(lo=box.lo, hi=(*box.hi[:dim], at, *box.hi[dim + 1 :]))
    high = Box(lo=(*box.lo[:dim], at, *box.lo[dim + 1 :]), hi=box.hi)
    return [*draw(partitions_of(low, depth - 1)), *draw(partitions_of(high, depth - 1))]


def test_box_tells_its_shape_its_size_and_itself():
    box = Box(lo=(2, 0), hi=(5, 4))
    assert (box.shape, box.numel, str(box)) == ((3, 4), 12, "[2:5, 0:4]")
    assert (whole((3, 4)), whole(()).numel) == (Box(lo=(0, 0), hi=(3, 4)), 1)


@given(shapes.flatmap(lambda shape: st.tuples(st.just(shape), boxes_of(shape), boxes_of(shape))))
def test_intersection_is_the_common_elements(drawn):
    shape, a, b = drawn
    array = numbered(shape)
    common = a.intersect(b)
    expected = set(cut(array, a).flat) & set(cut(array, b).flat)
    assert (set() if common is None else set(cut(array, common).flat)) == expected
    assert common == b.intersect(a)


@given(shapes.flatmap(lambda shape: st.tuples(st.just(shape), boxes_of(shape), boxes_of(shape))))
def test_slices_find_a_part_in_the_memory_of_a_box(drawn):
    shape, a, b = drawn
    array, part = numbered(shape), a.intersect(b)
    if part is not None:
        assert np.array_equal(cut(array, a)[part.slices(a)], cut(array, part))


@pytest.mark.parametrize(
    ("split", "length", "size", "expected"),
    [
        (Split(dim=0), 8, 2, [[(0, 4)], [(4, 8)]]),
        (Split(dim=0), 257, 2, [[(0, 129)], [(129, 257)]]),
        (Split(dim=0), 2, 3, [[(0, 1)], [(1, 2)], [(2, 2)]]),
        (Split(dim=0, parts=2), 12, 2, [[(0, 3), (6, 9)], [(3, 6), (9, 12)]]),
        (Split(dim=0, parts=2), 12, 4, [[(0, 2), (6, 8)], [(2, 4), (8, 10)], [(4, 5), (10, 11)], [(5, 6), (11, 12)]]),
        (Split(dim=0, unit=4), 12, 2, [[(0, 8)], [(8, 12)]]),
        (Split(dim=0, unit=2, parts=2), 12, 2, [[(0, 4), (6, 10)], [(4, 6), (10, 12)]]),
    ],
)
def test_split_deals_whole_units_of_every_part_the_first_ranks_get_more(split, length, size, expected):
    assert [list(split.bounds(length, size, rank)) for rank in range(size)] == expected


@pytest.mark.parametrize("split", [Split(dim=0, parts=2), Split(dim=0, unit=2)])
def test_split_that_does_not_fit_is_refused(split):
    with pytest.raises(AssertionError, match="does not fit 257 rows"):
        split.bounds(257, 1, 0)


@given(st.integers(0, 50), st.integers(1, 9))
def test_shares_follow_each_other_and_differ_by_at_most_one(num_items, size):
    starts = [share_start(num_items, size, rank) for rank in range(size + 1)]
    lengths = [b - a for a, b in pairwise(starts)]
    assert (starts[0], starts[-1]) == (0, num_items)
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] - lengths[-1] <= 1


def test_fused_parameter_gives_every_rank_matching_halves():
    spec = ParamSpec(name="gate_up", shape=(6, 2), init=Init(), split=Split(dim=0, parts=2))
    assert spec.boxes(3, 1) == (Box(lo=(1, 0), hi=(2, 2)), Box(lo=(4, 0), hi=(5, 2)))
    assert spec.local_shape(3, 1) == (2, 2)


def test_parameter_split_along_its_columns():
    spec = ParamSpec(name="down", shape=(2, 5), init=Init(), split=Split(dim=1))
    assert [spec.boxes(2, rank) for rank in range(2)] == [
        (Box(lo=(0, 0), hi=(2, 3)),),
        (Box(lo=(0, 3), hi=(2, 5)),),
    ]
    assert [spec.local_shape(2, rank) for rank in range(2)] == [(2, 3), (2, 2)]


def test_parameter_that_is_not_split_is_whole_on_every_rank():
    spec = ParamSpec(name="norm", shape=(5,), init=Init(kind="ones"))
    assert spec.boxes(4, 3) == (whole((5,)),)
    assert spec.local_shape(4, 3) == (5,)


@st.composite
def flat_ranges(draw):
    blocks = draw(st.lists(shapes.flatmap(boxes_of), min_size=1, max_size=3))
    total = sum(block.numel for block in blocks)
    start, stop = sorted((draw(st.integers(0, total)), draw(st.integers(0, total))))
    return blocks, start, stop


@given(flat_ranges())
def test_pieces_cover_a_flat_range_exactly_and_in_order_with_few_boxes(drawn):
    blocks, start, stop = drawn
    at, seen = start, []
    elements = np.concatenate([numbered_box(block, i) for i, block in enumerate(blocks)])
    pieces = flat_pieces(blocks, start, stop)
    offset = 0
    for i, block in enumerate(blocks):
        inside = [piece for piece in pieces if offset <= piece.start < offset + block.numel]
        assert len(inside) <= 2 * len(block.shape) - 1
        for piece in inside:
            assert (piece.start, piece.stop) == (at, at + piece.box.numel)
            assert piece.box.intersect(block) == piece.box
            seen += list(numbered_box(piece.box, i))
            at = piece.stop
        offset += block.numel
    assert at == stop
    assert seen == list(elements[start:stop])


def numbered_box(box, block):
    """Every element of a box as (block, coordinates), in row-major order."""
    result = np.empty(box.numel, dtype=object)
    for i, index in enumerate(np.ndindex(*box.shape)):
        result[i] = (block, *(lo + k for lo, k in zip(box.lo, index)))
    return result


def test_a_range_inside_a_block_can_need_2n_minus_1_boxes():
    pieces = flat_pieces([whole((4, 4, 4))], 1, 63)
    assert [str(piece.box) for piece in pieces] == [
        "[0:1, 0:1, 1:4]",
        "[0:1, 1:4, 0:4]",
        "[1:3, 0:4, 0:4]",
        "[3:4, 0:3, 0:4]",
        "[3:4, 3:4, 0:3]",
    ]


def test_a_scalar_is_one_piece():
    (piece,) = flat_pieces([whole(())], 0, 1)
    assert (piece.box, piece.start, piece.stop) == (whole(()), 0, 1)


@st.composite
def moves(draw):
    shape = draw(shapes)
    have, want = (draw(partitions_of(whole(shape))) for _ in range(2))
    return shape, have, draw(st.permutations(want)), draw(boxes_of(shape))


@given(moves())
def test_transfers_copy_every_wanted_element_once_from_any_partition_to_any_other(drawn):
    shape, have, want, extra = drawn
    array = numbered(shape) + 1
    holdings = [Holding(tensor="w", box=box, place=i) for i, box in enumerate(have)]
    wanted = list(dict.fromkeys([*want, extra]))  # a box across the others too
    filled = {box: np.zeros(box.shape, dtype=int) for box in wanted}
    for transfer in plan_transfers(holdings, [("w", box) for box in wanted]):
        source, part = transfer.source.box, transfer.part
        filled[transfer.target][part.slices(transfer.target)] += cut(array, source)[part.slices(source)]
    assert all(np.array_equal(filled[box], cut(array, box)) for box in wanted)


@given(st.data())
def test_a_missing_holding_is_a_hole_and_a_second_one_an_overlap(data):
    shape = data.draw(st.sampled_from([(6,), (4, 3), (2, 3, 2)]))
    boxes = data.draw(partitions_of(whole(shape)))
    one = data.draw(st.sampled_from(boxes))
    holdings = [Holding(tensor="layers.0.w@master", box=box, place=0) for box in boxes]
    want = [("layers.0.w@master", whole(shape))]
    plan_transfers(holdings, want)
    with pytest.raises(CoverageError, match=r"layers\.0\.w@master: .* not all") as hole:
        plan_transfers([holding for holding in holdings if holding.box != one], want)
    assert str(whole(shape)) in str(hole.value)
    with pytest.raises(CoverageError, match=r"layers\.0\.w@master: .* overlap") as overlap:
        plan_transfers([*holdings, Holding(tensor="layers.0.w@master", box=one, place=1)], want)
    assert str(one) in str(overlap.value)


def test_a_hole_is_not_hidden_by_an_overlap_of_the_same_size():
    holdings = [Holding(tensor="w", box=Box(lo=(lo,), hi=(hi,)), place=lo) for lo, hi in ((0, 3), (2, 4), (5, 6))]
    with pytest.raises(CoverageError, match=r"w: the holdings \[0:3\] and \[2:4\] overlap"):
        plan_transfers(holdings, [("w", whole((6,)))])


def test_only_holdings_of_the_same_tensor_count():
    holdings = [Holding(tensor="w@exp_avg", box=whole((4,)), place=0)]
    with pytest.raises(CoverageError, match=r"w@master: the holdings have 0 of the 4 elements of \[0:4\]"):
        plan_transfers(holdings, [("w@master", whole((4,)))])


def test_state_tensors_are_named_after_their_parameter():
    assert tensor_name("layers.0.w", "exp_avg") == "layers.0.w@exp_avg"
    with pytest.raises(AssertionError):
        tensor_name("layers.0.w", "momentum")
