"""The layout: which ranks form which groups, and the names of cells."""

from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayformer.layout import Cell, Layout


def groups(text):
    """ "{0,1}{2..4}" as tuples; whitespace separates nothing."""
    parts = text.replace(" ", "").strip("{}").split("}{")
    spread = [part.split("..") for part in parts]
    return tuple(
        tuple(range(int(ends[0]), int(ends[1]) + 1)) if len(ends) == 2 else tuple(map(int, ends[0].split(",")))
        for ends in spread
    )


@pytest.mark.parametrize(
    ("degrees", "axes", "expected"),
    [
        ({"tp": 2, "dp": 4}, "tp", "{0,1}{2,3}{4,5}{6,7}"),
        ({"tp": 2, "dp": 4}, "dp", "{0,2,4,6}{1,3,5,7}"),
        ({"tp": 2, "pp": 4, "dp": 2}, "dp", "{0,2}{1,3}{4,6}{5,7}{8,10}{9,11}{12,14}{13,15}"),
        ({"tp": 2, "pp": 4, "dp": 2}, "pp", "{0,4,8,12}{1,5,9,13}{2,6,10,14}{3,7,11,15}"),
        ({"tp": 2, "pp": 4, "dp": 2}, "tp pp", "{0,1,4,5,8,9,12,13}{2,3,6,7,10,11,14,15}"),
        ({"tp": 4, "cp": 2}, "cp", "{0,4}{1,5}{2,6}{3,7}"),
        ({"tp": 4, "cp": 2}, "dp cp", "{0,4}{1,5}{2,6}{3,7}"),
        ({"tp": 2, "cp": 2, "dp": 2, "pp": 2}, "cp", "{0,2}{1,3}{4,6}{5,7}{8,10}{9,11}{12,14}{13,15}"),
        ({"tp": 2, "cp": 2, "dp": 2, "pp": 2}, "dp", "{0,4}{1,5}{2,6}{3,7}{8,12}{9,13}{10,14}{11,15}"),
        ({"tp": 2, "cp": 2, "dp": 2, "pp": 2}, "dp cp", "{0,2,4,6}{1,3,5,7}{8,10,12,14}{9,11,13,15}"),
        ({"tp": 2, "cp": 2, "dp": 2, "pp": 2}, "pp", "{0,8}{1,9}{2,10}{3,11}{4,12}{5,13}{6,14}{7,15}"),
        ({"tp": 2, "cp": 2, "dp": 2, "pp": 2}, "tp pp", "{0,1,8,9}{2,3,10,11}{4,5,12,13}{6,7,14,15}"),
        ({"dp": 8, "pp": 2, "ep": 4}, "ep", "{0..3}{4..7}{8..11}{12..15}"),
        ({"dp": 8, "pp": 2, "ep": 4}, "edp", "{0,4}{1,5}{2,6}{3,7}{8,12}{9,13}{10,14}{11,15}"),
        ({"dp": 8, "pp": 2, "ep": 2, "etp": 2}, "etp", "{0,1}{2,3}{4,5}{6,7}{8,9}{10,11}{12,13}{14,15}"),
        ({"dp": 8, "pp": 2, "ep": 2, "etp": 2}, "ep", "{0,2}{1,3}{4,6}{5,7}{8,10}{9,11}{12,14}{13,15}"),
        ({"dp": 8, "pp": 2, "ep": 2, "etp": 2}, "edp", "{0,4}{1,5}{2,6}{3,7}{8,12}{9,13}{10,14}{11,15}"),
        ({"tp": 2, "cp": 2, "dp": 2, "pp": 2, "ep": 8}, "ep", "{0..7}{8..15}"),  # experts span tp, cp and dp
    ],
)
def test_groups_are_those_of_the_tables(degrees, axes, expected):
    assert Layout(**degrees).groups(*axes.split()) == groups(expected)


degree = st.integers(1, 3)
layouts = st.builds(Layout, tp=degree, cp=degree, dp=degree, pp=degree)


@st.composite
def expert_layouts(draw):
    dense = draw(layouts)
    per_stage = dense.tp * dense.cp * dense.dp
    etp = draw(st.sampled_from([d for d in range(1, per_stage + 1) if per_stage % d == 0]))
    ep = draw(st.sampled_from([d for d in range(1, per_stage // etp + 1) if per_stage // etp % d == 0]))
    return Layout(tp=dense.tp, cp=dense.cp, dp=dense.dp, pp=dense.pp, etp=etp, ep=ep)


@given(layouts)
def test_rank_and_cell_are_inverse_and_ranks_ascend_with_tp_fastest(layout):
    cells = layout.cells()
    assert [layout.rank(cell) for cell in cells] == list(range(layout.world))
    assert list(cells) == sorted(cells, key=lambda cell: (cell.pp, cell.dp, cell.cp, cell.tp))


@given(expert_layouts())
def test_both_views_have_the_same_pipeline_groups(layout):
    def coordinate(rank, axes):
        """By the closed forms of both views, written out."""
        tp, cp, dp, _ = (layout.size(axis) for axis in axes)
        return rank % tp, rank // tp % cp, rank // (tp * cp) % dp, rank // (tp * cp * dp)

    for axes in (("tp", "cp", "dp", "pp"), ("etp", "ep", "edp", "pp")):
        found = {}
        for rank in range(layout.world):
            found.setdefault(coordinate(rank, axes)[:3], []).append(rank)
        assert sorted(map(tuple, found.values())) == list(layout.groups("pp"))


@given(expert_layouts(), st.sampled_from(["tp", "cp dp", "tp cp dp pp", "etp", "ep etp", "edp", "ep etp pp"]))
def test_groups_partition_the_ranks_and_share_the_other_coordinates(layout, axes):
    axes = axes.split()
    found = layout.groups(*axes)
    size = 1
    for axis in axes:
        size *= layout.size(axis)
    assert sorted(rank for group in found for rank in group) == list(range(layout.world))
    assert {len(group) for group in found} == {size}
    assert all(layout.group_of(rank, *axes) == group for group in found for rank in group)


def test_axes_of_both_views_make_no_group():
    with pytest.raises(ValueError, match="not of one view"):
        Layout(dp=4, ep=2).groups("ep", "dp")


def test_cell_is_read_in_any_order_and_an_omitted_axis_is_0():
    cell = Cell(pp=1, dp=20, cp=3, tp=4)
    assert str(cell) == "pp1.dp20.cp3.tp4"
    assert {Cell.parse(".".join(parts)) for parts in permutations(str(cell).split("."))} == {cell}
    assert Cell.parse("tp2") == Cell(tp=2)
    assert Cell.parse("dp1.pp3") == Cell(pp=3, dp=1)


@pytest.mark.parametrize("text", ["", "pp", "pp1.", "pp1.pp2", "pp-1", "xp1", "pp1 dp2", "pp1,dp2", "PP1", "pp٣"])
def test_what_is_not_a_cell_is_refused_with_an_example(text):
    with pytest.raises(ValueError, match=r"write it like pp1\.dp0\.tp1") as error:
        Cell.parse(text)
    assert repr(text) in str(error.value)


@pytest.mark.parametrize("cell", [Cell(tp=2), Cell(pp=1), Cell(dp=-1)])
def test_cell_outside_of_the_layout_has_no_rank(cell):
    layout = Layout(tp=2, dp=2)
    with pytest.raises(AssertionError, match="outside"):
        layout.rank(cell)


@pytest.mark.parametrize("degrees", [{"tp": 0}, {"dp": 4, "ep": 3}, {"dp": 2, "ep": 2, "etp": 2}])
def test_degrees_that_do_not_fit_are_refused(degrees):
    with pytest.raises(AssertionError):
        Layout(**degrees)
