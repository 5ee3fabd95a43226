"""Slots of snapshots: three of them, the oldest is written next, and nothing half-written is ever taken for whole."""

import mmap

import numpy as np
import pytest

from rayformer.ckpt.slots import EXTRA_BYTES, PAGE, Cadence, IndexEntry, SlotFile, dump_index, holdings_of
from rayformer.errors import SnapshotError
from rayformer.shards import Box, plan_transfers

BOXES = [Box(lo=(0, 0), hi=(2, 3)), Box(lo=(2, 0), hi=(3, 2))]
INDEX = [IndexEntry(tensor="w@master", box=BOXES[0], start=0), IndexEntry(tensor="w@master", box=BOXES[1], start=6)]
NUMEL = 8


def slot_file(index=INDEX, num_slots=3):
    memory = mmap.mmap(-1, SlotFile.bytes_needed(4 * NUMEL, len(dump_index(index)), num_slots))
    file = SlotFile(memory)
    file.prepare(index, 4 * NUMEL, num_slots, Cadence(every=1))
    return file, memory


def take(file, step, *, generation=1, value=None, is_anchor=False, **extra):
    slot = file.begin(step)
    np.frombuffer(file.payload(slot), dtype="<f4")[:] = step if value is None else value
    file.commit(slot, step=step, generation=generation, extra=extra, is_anchor=is_anchor)


def test_the_newest_three_are_kept_and_read_with_their_small_values():
    file, _ = slot_file()
    assert file.steps() == {}
    for step in range(1, 6):
        take(file, step, generation=step // 2, samples=8 * step)
    assert file.steps() == {3: 1, 4: 2, 5: 2}
    for step in (3, 4, 5):
        snapshot = file.read(step)
        assert (snapshot.step, snapshot.generation, snapshot.extra) == (step, step // 2, {"samples": 8 * step})
        assert snapshot.payload.tolist() == [step] * NUMEL
    with pytest.raises(SnapshotError, match=r"no whole snapshot of step 2, but of \[3, 4, 5\]"):
        file.read(2)


def test_a_slot_is_none_while_it_is_written():
    file, _ = slot_file()
    for step in (1, 2, 3):
        take(file, step)
    file.payload(file.begin(4))[:4] = b"half"
    assert sorted(file.steps()) == [2, 3]


def test_the_last_two_anchors_stay_beside_the_last_two_steps():
    """Between any two writes, what a slow reader copied of an anchor is there until the second one after it."""
    file, _ = slot_file(num_slots=4)
    for step in range(1, 40):
        take(file, step, is_anchor=step % 5 == 0)
        anchors = [s for s in range(1, step + 1) if s % 5 == 0][-2:]
        assert sorted(file.anchors())[-2:] == anchors
        assert {*anchors, *range(max(1, step - 1), step + 1)} <= set(file.steps()) and len(file.steps()) == min(step, 4)


def test_a_cadence_says_when():
    cadence = Cadence(every=3, anchor_every=6)
    assert [step for step in range(1, 13) if cadence.is_due(step)] == [3, 6, 9, 12]
    assert [step for step in range(1, 13) if cadence.is_anchor(step)] == [6, 12]
    assert not Cadence(every=1).is_anchor(6) and not Cadence(every=0).is_due(6)


def test_a_step_that_is_done_again_takes_the_place_of_its_first_time():
    file, _ = slot_file()
    for step in (1, 2, 3):
        take(file, step)
    take(file, 2, generation=2, value=7.0)
    assert file.steps() == {1: 1, 2: 2, 3: 1} and file.read(2).payload[0] == 7.0


def test_what_lies_ahead_of_the_step_that_a_run_goes_on_from_is_forgotten():
    file, _ = slot_file()
    for step in (1, 2, 3):
        take(file, step)
    file.forget_after(1)
    assert list(file.steps()) == [1]


@pytest.mark.parametrize("at", ["payload", "small values", "checksum"])
def test_a_changed_byte_makes_it_no_snapshot(at):
    file, memory = slot_file()
    take(file, 1, samples=8)
    start = file._slot_at(0)
    place = {"payload": start + PAGE + EXTRA_BYTES + 5, "small values": start + PAGE + 2, "checksum": start + 32}[at]
    memory[place] ^= 1
    with pytest.raises(SnapshotError, match="no whole snapshot of step 1"):
        file.read(1)


def test_another_process_of_the_same_cell_finds_what_the_first_one_left():
    file, memory = slot_file()
    take(file, 1)
    second = SlotFile(memory)
    second.prepare(INDEX, 4 * NUMEL, 3, Cadence(every=7))
    assert second.read(1).payload[0] == 1.0 and second.cadence == Cadence(every=1)  # as the first one went by
    second.prepare(INDEX[:1], 4 * NUMEL, 3, Cadence(every=1))  # one of other boxes does not take them for its own
    assert second.steps() == {}


def test_memory_that_nobody_prepared_holds_nothing():
    assert SlotFile(mmap.mmap(-1, 10 * PAGE)).steps() == {}


def test_holdings_say_in_model_coordinates_what_lies_where():
    file, _ = slot_file()
    slot = file.begin(1)
    np.frombuffer(file.payload(slot), dtype="<f4")[:] = range(NUMEL)
    file.commit(slot, step=1, generation=1, extra={})
    snapshot = file.read(1)
    want = Box(lo=(1, 0), hi=(3, 2))
    found = np.full((3, 3), -1.0)
    for transfer in plan_transfers(holdings_of(file.index_text, snapshot), [("w@master", want)]):
        holder, start = transfer.source.place
        box = transfer.source.box
        values = holder.payload[start : start + box.numel].reshape(box.shape)
        whole = Box(lo=(0, 0), hi=(3, 3))
        found[transfer.part.slices(whole)] = values[transfer.part.slices(box)]
    np.testing.assert_array_equal(found, [[-1, -1, -1], [3, 4, -1], [6, 7, -1]])


def test_a_pinned_snapshot_stays_as_it_is_until_it_is_let_go():
    file, _ = slot_file()
    for step in (1, 2, 3):
        take(file, step)
    assert file.pin(1) and file.pinned() == (1,)
    for step in range(4, 20):
        take(file, step)
        assert file.pinned() == (1,) and sorted(file.steps()) == [1, step - 1, step]
        assert file.read(1).payload.tolist() == [1] * NUMEL
    file.unpin()
    assert file.pinned() == ()
    take(file, 20)
    assert sorted(file.steps()) == [18, 19, 20]


def test_only_a_snapshot_that_is_there_can_be_pinned():
    file, _ = slot_file()
    take(file, 1)
    assert not file.pin(2) and file.pinned() == ()


def test_a_pin_says_in_which_generation_it_was_made():
    file, _ = slot_file()
    take(file, 1)
    assert not file.is_pinned(1, generation=0)
    file.pin(1, 2)
    assert file.is_pinned(1, generation=1) and file.is_pinned(1, generation=2)
    assert not file.is_pinned(1, generation=3) and not file.is_pinned(2, generation=0)


@pytest.mark.parametrize("pinned", range(1, 12))
def test_anchors_and_the_newest_stay_beside_a_pinned_one(pinned):
    """Whichever step is pinned, an anchor or none: with five slots there is always one to write into."""
    file, _ = slot_file(num_slots=5)
    for step in range(1, 40):
        take(file, step, is_anchor=step % 5 == 0)
        if step == pinned:
            assert file.pin(step)
        if step >= pinned:
            assert file.pinned() == (pinned,) and file.read(pinned).payload[0] == pinned
        anchors = [s for s in range(1, step + 1) if s % 5 == 0][-2:]
        assert {*anchors, *range(max(1, step - 1), step + 1)} <= set(file.steps())


def test_a_step_that_is_done_again_is_not_the_one_that_was_pinned():
    """Who saves it looks afterwards whether it is pinned still, and is not told that of other bytes."""
    file, _ = slot_file()
    for step in (1, 2):
        take(file, step)
    file.pin(2)
    slot = file.begin(2)
    assert file.pinned() == ()
    file.commit(slot, step=2, generation=2, extra={})
    assert file.pinned() == () and file.steps() == {1: 1, 2: 2}


def test_what_is_forgotten_is_not_pinned_any_more():
    file, _ = slot_file()
    for step in (1, 2, 3):
        take(file, step)
    file.pin(1)
    file.pin(3)
    assert sorted(file.pinned()) == [1, 3]
    file.forget_after(1)
    assert file.pinned() == (1,)


def test_slots_that_are_prepared_for_other_boxes_hold_no_pins():
    file, memory = slot_file()
    take(file, 1)
    file.pin(1)
    SlotFile(memory).prepare(INDEX, 4 * NUMEL, 3, Cadence(every=1))
    assert file.pinned() == (1,), "the same boxes keep what they have"
    SlotFile(memory).prepare(INDEX[:1], 4 * NUMEL, 3, Cadence(every=1))
    assert file.pinned() == ()
    for step in range(1, 5):
        take(file, step)
    assert file.pinned() == () and sorted(file.steps()) == [2, 3, 4]
