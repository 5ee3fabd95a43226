"""The holder without Ray: what it sees of a cell, whose process may have died."""

import subprocess

import pytest

from rayformer.actors.holder import Holder
from rayformer.cell.progress import ProgressWord
from rayformer.ckpt.slots import PAGE

CELL = "pp0.dp0.cp0.tp0"


@pytest.fixture
def process():
    """``process()``: another process that does nothing."""
    started = []

    def start():
        started.append(subprocess.Popen(["sleep", "60"]))
        return started[-1]

    yield start
    for one in started:
        one.kill()
        one.wait()


def test_what_a_dead_process_was_doing_is_not_held_against_the_one_that_takes_its_place(process):
    holder, first, second = Holder(), process(), process()
    holder.reserve(CELL, PAGE, first.pid)
    word = ProgressWord(holder._memory[CELL][1])
    word.at("backward", 5)
    assert holder.look()[CELL].word.step == 5
    first.kill()
    assert first.wait() and holder.look() == {}
    holder.reserve(CELL, PAGE, second.pid)
    assert holder.look() == {}
    word.at("setup", 4)
    assert (holder.look()[CELL].word.phase, holder.look()[CELL].is_stopped) == ("setup", False)


def test_who_reserves_again_keeps_its_word(process):
    holder, one = Holder(), process()
    holder.reserve(CELL, PAGE, one.pid)
    ProgressWord(holder._memory[CELL][1]).at("forward", 3)
    holder.reserve(CELL, PAGE, one.pid)
    assert holder.look()[CELL].word.step == 3
