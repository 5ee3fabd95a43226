"""Where a run goes on from, by what is held where."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayformer.control.restore import SOURCES, Held, Holdings, Restore, choose_restore


def held(checkpoint=0, /, **cells):
    return Held(cells=cells, checkpoint=checkpoint)


def test_a_lost_cell_comes_from_its_slot_and_nobody_rolls_back():
    survivor, lost = Holdings(live=7, holder=(5, 6, 7), second_holder=(6,)), Holdings(holder=(5, 6, 7))
    assert choose_restore(held(a=survivor, b=lost)) == Restore(step=7, sources={"a": "live", "b": "holder"})


def test_the_newest_step_that_all_have_is_chosen_not_the_newest_that_one_has():
    ahead, behind = Holdings(live=8, holder=(6, 7, 8)), Holdings(holder=(5, 6, 7))
    assert choose_restore(held(a=ahead, b=behind)) == Restore(step=7, sources={"a": "holder", "b": "holder"})


@pytest.mark.parametrize(
    ("holdings", "source"),
    [
        (Holdings(live=7, holder=(7,), second_holder=(7,)), "live"),
        (Holdings(live=8, holder=(7,), second_holder=(7,)), "holder"),
        (Holdings(live=None, holder=(6,), second_holder=(7,)), "second_holder"),
    ],
)
def test_the_nearest_place_is_preferred(holdings, source):
    assert holdings.source_of(7) == source
    assert choose_restore(held(a=holdings, b=Holdings(live=7))).sources == {"a": source, "b": "live"}


def test_a_lost_node_comes_from_the_copies_even_if_they_are_a_step_behind():
    survivor, moved = Holdings(live=7, holder=(5, 6, 7)), Holdings(second_holder=(5, 6))
    restore = choose_restore(held(a=survivor, b=moved))
    assert restore == Restore(step=6, sources={"a": "holder", "b": "second_holder"})
    assert restore.source == "second_holder"


@pytest.mark.parametrize("gone", [Holdings(), Holdings(holder=(2, 3))], ids=["nothing", "only older"])
def test_all_come_from_the_checkpoint_if_one_has_nothing_newer(gone):
    restore = choose_restore(held(4, a=Holdings(live=7, holder=(4, 7)), b=gone))
    assert restore == Restore(step=4, sources={"a": "checkpoint", "b": "checkpoint"}, why=restore.why)
    assert restore.source == "checkpoint"
    later = "no step later than 4 is held of every cell: of b none after 3, of a none before 4"
    told = later if gone.steps else "no memory of b is left"
    assert restore.why.startswith(told)


def test_without_a_checkpoint_all_begin_anew_if_nothing_is_common():
    assert choose_restore(held(a=Holdings(live=2), b=Holdings(holder=(1,)))).step == 0


def test_memory_is_preferred_to_a_checkpoint_of_the_same_step():
    assert choose_restore(held(7, a=Holdings(live=7))) == Restore(step=7, sources={"a": "live"})


steps = st.integers(0, 6)
holdings = st.builds(
    Holdings,
    live=st.none() | steps,
    holder=st.lists(steps, max_size=3).map(tuple),
    second_holder=st.lists(steps, max_size=2).map(tuple),
)


@given(st.builds(Held, cells=st.dictionaries(st.sampled_from("abcd"), holdings, min_size=1), checkpoint=steps))
def test_the_choice_is_the_newest_that_is_really_there_in_its_nearest_place(held):
    restore = choose_restore(held)
    common = set.intersection(*(set(holdings.steps) for holdings in held.cells.values()))
    assert restore.step == max(common | {held.checkpoint})
    assert restore.sources.keys() == held.cells.keys()
    if restore.source == "checkpoint":
        assert set(restore.sources.values()) == {"checkpoint"} and restore.step == held.checkpoint
        return
    for cell, source in restore.sources.items():
        own = held.cells[cell]
        places = {"live": (own.live,), "holder": own.holder, "second_holder": own.second_holder}
        assert source == next(place for place in SOURCES if restore.step in places[place])
