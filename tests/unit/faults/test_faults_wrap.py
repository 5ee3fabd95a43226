"""Faults in a cell: they happen where they are due, as often as they may, to their own cell, and are marked before."""

import mmap
import signal
import subprocess
import sys
from itertools import product

import pytest

from rayformer.cell.progress import read_word
from rayformer.faults import wrap
from rayformer.faults.marks import Mark, Marks, read_marks
from rayformer.faults.plan import Fault

CELL = "pp1.dp0.cp0.tp0"
# What a cell that runs two microbatches begins in one step: phase, instruction, number.
STEP = [
    ("data", "", -1),
    ("gather", "AwaitParams", 0),
    *[("forward", name, v) for v in (0, 1) for name in ("RecvAct", "Forward", "SendAct")],
    *[("backward", name, v) for v in (0, 1) for name in ("RecvGrad", "Backward", "SendGrad")],
    ("reduce", "FoldGrads", 0),
    ("reduce", "ReduceGrads", 1),
    ("reduce", "", -1),
    ("vote", "", -1),
    ("vote", "", -1),
    ("update", "", -1),
    ("gather", "", -1),
    ("snapshot", "", -1),
]


def fault(effect="kill", *, number=0, cell=CELL, step=7, at="forward", **options):
    return Fault(number=number, effect=effect, cell=cell, step=step, at=at, **options)


class Scene:
    """A cell's life with faults that only leave a note; ``used`` outlives its processes, like the marks."""

    def __init__(self, monkeypatch, *faults):
        self.faults, self.used, self.notes, self.words = faults, {}, [], []
        self.monkeypatch = monkeypatch
        self.start()

    def start(self):
        """A process takes the cell."""
        self.progress = wrap.FaultyProgress(
            self,
            self.faults,
            cell=CELL,
            used=lambda n: self.used.get(n, 0),
            mark=self.mark,
            poison=lambda: None,
            kill_holder=lambda: None,
        )
        self.monkeypatch.setattr(wrap, "carry_out", lambda fault, step, **_: self.happen(fault, step))

    def at(self, phase, step, instruction="", number=-1):
        self.words.append((phase, step, instruction, number))

    def mark(self, number, step, phase):
        self.used[number] = self.used.get(number, 0) + 1
        self.marked = (number, step, phase)

    def happen(self, fault, step):
        phase, seen, instruction, number = self.words[-1]  # the word was told before
        assert self.marked == (fault.number, step, phase) and seen == step  # and so was the mark
        self.notes.append((fault.number, step, instruction or phase, number))

    def steps(self, first, last):
        for step, (phase, instruction, number) in product(range(first, last + 1), STEP):
            self.progress.at(phase, step, instruction, number)


def carry_out(fault, step=7, poison=None, kill_holder=None):
    wrap.carry_out(fault, step, poison=poison, kill_holder=kill_holder)


@pytest.fixture
def scene(monkeypatch):
    return lambda *faults: Scene(monkeypatch, *faults)


def test_without_a_fault_of_its_own_a_cell_only_tells_its_words(scene):
    life = scene(fault(cell="pp0.dp0.cp0.tp0"), fault("drop_node", number=1), fault("kill_standby", number=2))
    life.steps(6, 8)
    assert life.notes == [] and len(life.words) == 3 * len(STEP)


@pytest.mark.parametrize(
    ("at", "microbatch", "place"),
    [
        ("forward", None, ("RecvAct", 0)),
        ("forward", 1, ("RecvAct", 1)),
        ("Forward", None, ("Forward", 0)),
        ("Forward", 1, ("Forward", 1)),
        ("backward", 1, ("RecvGrad", 1)),
        ("SendGrad", 1, ("SendGrad", 1)),
        ("reduce", None, ("FoldGrads", 0)),
        ("ReduceGrads", None, ("ReduceGrads", 1)),
        ("AwaitParams", None, ("AwaitParams", 0)),
        ("data", None, ("data", -1)),
        ("vote", None, ("vote", -1)),
        ("update", None, ("update", -1)),
        ("snapshot", None, ("snapshot", -1)),
    ],
)
def test_a_fault_happens_once_where_it_is_due(scene, at, microbatch, place):
    life = scene(fault(at=at, microbatch=microbatch))
    life.steps(1, 12)
    assert life.notes == [(0, 7, *place)]


def test_a_microbatch_is_not_mistaken_for_a_bucket(scene):
    life = scene(fault(at="backward", microbatch=1))
    for instruction in ("ReduceGrads", "FoldGrads", "AwaitParams"):
        life.progress.at("backward", 7, instruction, 1)
    assert life.notes == []


def test_who_takes_over_does_not_repeat_it(scene):
    life = scene(fault(at="vote"))
    life.steps(7, 7)
    life.start()
    life.steps(7, 9)
    assert len(life.notes) == 1


def test_times_is_how_often_it_happens_when_the_step_is_done_again(scene):
    life = scene(fault("raise", at="Backward", times=3))
    for _ in range(5):
        life.start()
        life.steps(7, 7)
    assert life.notes == [(0, 7, "Backward", 0)] * 3


def test_a_survivor_that_does_a_step_again_meets_its_fault_again(scene):
    life = scene(fault("gil", at="Backward", times=2))
    life.steps(7, 7)
    life.progress.at("joining", 6)
    life.steps(7, 8)
    assert life.notes == [(0, 7, "Backward", 0)] * 2


@pytest.mark.parametrize("effect", ["slow", "nan"])
def test_a_lasting_fault_happens_once_in_every_step_while_its_times_last(scene, effect):
    life = scene(fault(effect, at="forward", times=3))
    life.steps(5, 12)
    assert life.notes == [(0, step, "RecvAct", 0) for step in (7, 8, 9)]


@pytest.mark.parametrize("phase", ["save", "eval", "snapshot"])
def test_what_is_not_part_of_every_step_counts_when_it_comes_by(scene, phase):
    life = scene(fault(at=phase))
    for step in (5, 10, 15):
        life.progress.at(phase, step)
    assert life.notes == [(0, 10, phase, -1)]


@pytest.mark.parametrize("phase", ["joining", "idle", "load", "setup"])
def test_between_steps_it_happens_before_its_step_or_a_later_one_begins(scene, phase):
    life = scene(fault(at=phase))
    for step in (0, 5, 6, 7):
        life.progress.at(phase, step)
    assert life.notes == [(0, 6, phase, -1)]


def test_several_faults_happen_each_in_its_place(scene):
    life = scene(fault("slow", at="vote"), fault("slow", number=1, at="Forward", microbatch=1), fault(number=2, step=8))
    life.steps(6, 9)
    assert life.notes == [(1, 7, "Forward", 1), (0, 7, "vote", -1), (2, 8, "RecvAct", 0)]


def test_raise_names_the_fault():
    with pytest.raises(RuntimeError, match=r"fault 3 of the job: raise pp1.dp0.cp0.tp0 at vote of step 9"):
        carry_out(fault("raise", number=3, at="vote"), step=9)


def test_nan_poisons_and_slow_sleeps(monkeypatch):
    done = []
    monkeypatch.setattr(wrap.time, "sleep", done.append)
    carry_out(fault("nan"), poison=lambda: done.append("poisoned"))
    carry_out(fault("slow", seconds=0.25))
    carry_out(fault("kill_holder"), kill_holder=lambda: done.append("the holder"))
    assert done == ["poisoned", 0.25, "the holder"]


def test_the_controllers_faults_do_not_happen_in_a_cell():
    with pytest.raises(AssertionError, match="drop_node does not happen in a cell"):
        carry_out(fault("drop_node"))


def test_a_holder_is_killed_before_the_cell_that_is_killed_with_it(scene):
    life = scene(fault("kill"), fault("kill_holder", number=1))
    life.steps(7, 7)
    assert [number for number, *_ in life.notes] == [1, 0]


# Marks.


def test_marks_count_and_say_where(tmp_path):
    marks = Marks(tmp_path / "marks", CELL, clock=iter((10.5, 11.5)).__next__)
    assert read_marks(tmp_path / "marks") == [] and marks.used(0) == 0
    marks.mark(0, 7, "vote")
    marks.mark(700, 8, "joining")
    again = Marks(tmp_path / "marks", CELL, clock=lambda: 9.5)  # who takes over
    again.mark(0, 9, "save")
    assert (again.used(0), again.used(1), again.used(700)) == (2, 0, 1)
    Marks(tmp_path / "marks", "pp0.dp0.cp0.tp0", clock=lambda: 11.0).mark(3, 8, "load")
    assert read_marks(tmp_path / "marks") == [
        Mark(number=0, step=9, phase="save", time=9.5),
        Mark(number=0, step=7, phase="vote", time=10.5),
        Mark(number=3, step=8, phase="load", time=11.0),
        Mark(number=700, step=8, phase="joining", time=11.5),
    ]


# The real thing, in a process of its own.

CHILD = """
import mmap, os, sys, threading, time
from pathlib import Path
from rayformer.cell.progress import ProgressWord
from rayformer.faults.marks import Marks
from rayformer.faults.plan import Fault
from rayformer.faults.wrap import FaultyProgress
memory = mmap.mmap(os.open(sys.argv[1], os.O_RDWR), 4096)
marks = Marks(Path(sys.argv[1]).with_name("marks"), "pp0")
fault = Fault(number=5, effect=sys.argv[2], cell="pp0", step=3, at="vote", seconds=0.5)
progress = FaultyProgress(
    ProgressWord(memory), [fault], cell="pp0", used=marks.used, mark=marks.mark, poison=lambda: None,
    kill_holder=lambda: None,
)
ticks = []
def tick():
    while True:
        time.sleep(0.001)
        ticks.append(1)
threading.Thread(target=tick, daemon=True).start()
sys.setswitchinterval(1000)  # only a call that gives up the lock lets the other thread run
for step in (2, 3, 4):
    progress.at("data", step)
    before = len(ticks)
    progress.at("vote", step)
    print(step, "same" if len(ticks) == before else "ticked", flush=True)
os._exit(0)
"""


@pytest.fixture
def child(tmp_path):
    path = tmp_path / "page"
    path.write_bytes(bytes(4096))

    def start(effect):
        command = [sys.executable, "-c", CHILD, str(path), effect]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def page():
        with path.open("r+b") as file:
            return mmap.mmap(file.fileno(), 4096)

    start.page, start.marks = page, tmp_path / "marks"
    return start


@pytest.mark.parametrize(
    ("effect", "status"), [("kill", -signal.SIGKILL), ("exit", 1), ("raise", 1), ("gil", 0), ("slow", 0)]
)
def test_a_process_suffers_its_fault_and_leaves_its_word_and_mark(child, effect, status):
    process = child(effect)
    out, err = process.communicate(timeout=60)
    assert process.returncode == status, err
    assert ("RuntimeError: fault 5 of the job" in err) == (effect == "raise")
    lives = effect in ("gil", "slow")
    assert [line.split()[0] for line in out.splitlines()] == (["2", "3", "4"] if lives else ["2"])
    if lives:
        assert out.splitlines()[1] == ("3 same" if effect == "gil" else "3 ticked")
    page = child.page()
    (mark,) = read_marks(child.marks)
    assert (mark.number, mark.step, mark.phase) == (5, 3, "vote")
    word = read_word(page)
    assert (word.step, word.phase) == ((4, "vote") if lives else (3, "vote"))
    page.close()

    again = child(effect)  # who takes over is spared
    assert again.communicate(timeout=60)[0].split() == ["2", "same", "3", "same", "4", "same"]
    assert again.returncode == 0


def test_a_frozen_process_stops_where_it_is_and_can_be_woken(child):
    process = child("freeze")
    assert process.stdout.readline() == "2 same\n"
    with open(f"/proc/{process.pid}/stat", "rb") as stat:
        while stat.read().rpartition(b")")[2].split()[0] != b"T":
            stat.seek(0)
    page = child.page()
    assert [mark.step for mark in read_marks(child.marks)] == [3] and read_word(page).phase == "vote"
    process.send_signal(signal.SIGCONT)
    assert process.communicate(timeout=60)[0].splitlines()[-1].startswith("4")
    page.close()
