"""What a terminal shows fits the terminal and says what counts."""

import io
import math
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from rayformer.events import CellDone, CheckpointSaved, StepReport
from rayformer.layout import Layout
from rayformer.observe.curve import BLOCKS, MAX_POINTS, Curve
from rayformer.observe.display import NoDisplay, make_display
from rayformer.observe.live import LiveDisplay, Screen
from rayformer.observe.metrics import metrics_line
from rayformer.observe.plain import PlainDisplay, step_line
from rayformer.observe.summary import summary

REPORT = StepReport(
    generation=1,
    step=120,
    loss=2.34561,
    grad_norm=0.911,
    lr=8.1e-4,
    tokens=2057,
    valid_tokens=2057,
    consumed_samples=1920,
    step_s=0.118,
)
SAVED = CheckpointSaved(generation=1, step=100, path="runs/tiny/c", state_hash="0" * 16, seconds=0.42)


def at(step: int, **changes) -> StepReport:
    return replace(REPORT, step=step, **changes)


def actors(layout: Layout, node: str = "node-a") -> dict[str, dict]:
    return {
        str(cell): {"worker": f"worker-{rank:04d}", "pid": 12000 + rank, "node": node}
        for rank, cell in enumerate(layout.cells())
    }


def test_a_step_is_one_line():
    assert step_line(REPORT, 200) == "step 120/200  loss 2.3456  norm 0.91  lr 8.1e-04  17,432 tokens/s  0.118 s"
    bad = at(7, grad_norm=math.nan, skipped=True, nonfinite=("a", "b", "c"), eval_loss=2.5)
    assert step_line(bad, 200) == (
        "step   7/200  loss 2.3456  norm nan  lr 8.1e-04  17,432 tokens/s  0.118 s  held-out 2.5000  skipped  "
        "gradient not finite in a and 2 more"
    )


def test_plain_prints_each_executed_step_once():
    out = io.StringIO()
    display = PlainDisplay(out)
    for step in (1, 2, 3, 2, 3, 4):
        display.step(at(step), total_steps=10)
    display.close()
    assert [line.split("/")[0].split()[1] for line in out.getvalue().splitlines()] == ["1", "2", "3", "2", "3", "4"]


def test_plain_names_only_the_cells_that_changed():
    out = io.StringIO()
    display = PlainDisplay(out)
    cells = actors(Layout(dp=12))
    display.membership(cells)
    assert len(out.getvalue().splitlines()) == 9 and out.getvalue().endswith("and 4 more cells\n")
    out.truncate(0)
    out.seek(0)
    display.membership({**cells, "pp0.dp3.cp0.tp0": {"worker": "worker-0012", "pid": 9, "node": "node-b"}})
    display.note("repaired")
    display.saved(SAVED)
    assert out.getvalue().splitlines() == [
        "pp0.dp3.cp0.tp0 is worker-0012, pid 9 on node-b",
        "repaired",
        "saved step 100 in 0.4 s: runs/tiny/c",
    ]


def drawn(screen: Screen, width: int, height: int) -> list[str]:
    file = io.StringIO()
    Console(file=file, width=width, height=height).print(screen, end="")
    return file.getvalue().splitlines()


def busy(layout: Layout, num_steps: int = 120, **changes) -> Screen:
    screen = Screen(run="tiny", dashboard="http://127.0.0.1:8265", cells=actors(layout, "9f" * 28), elapsed_s=75.2)
    for step in range(1, num_steps + 1):
        loss = 2 + 4 * math.exp(-step / 40)
        screen = screen.after(at(step, loss=loss, eval_loss=2.41 if step == 100 else None), 200)
    return replace(screen, saved=SAVED, **changes)


@pytest.mark.parametrize(("width", "height"), [(80, 24), (120, 40), (200, 12), (50, 6)])
@pytest.mark.parametrize("num_cells", [1, 4, 17, 1000])
def test_the_live_picture_fits_its_terminal(width: int, height: int, num_cells: int):
    lines = drawn(busy(Layout(dp=num_cells)), width, height)
    assert len(lines) < max(height, 8) and max(map(len, lines)) <= width
    num_listed = sum("worker-" in line for line in lines)
    hidden = [int(line.split()[1]) for line in lines if line.startswith("and ")]
    if width >= 80:
        assert num_listed + sum(hidden) == num_cells


def test_the_live_picture_says_what_counts():
    text = "\n".join(drawn(busy(Layout(dp=17)), 80, 24))
    for part in (
        "tiny   generation 1   http://127.0.0.1:8265",
        "0:01:15",
        "step 120/200",
        "0:00:09 left",
        "held-out 2.4100 (step 100)   17,432 tokens/s   0.118 s a step",
        "saved step 100: runs/tiny/c",
        "pp0.dp13.cp0.tp0  worker-0013  12013  9f9f",
        "and 3 more",
    ):
        assert part in text, text


def test_the_live_picture_before_the_first_step_says_what_it_waits_for():
    assert drawn(Screen(run="tiny"), 80, 24)[1].rstrip() == "waiting for the first step"


def test_the_live_picture_of_a_run_without_a_finite_loss_can_be_drawn():
    screen = Screen(run="tiny").after(at(1, loss=math.nan), 200)
    assert any("loss nan" in line for line in drawn(screen, 80, 24))


def test_live_leaves_its_last_picture_and_gives_the_cursor_back():
    out = io.StringIO()
    display = LiveDisplay(out, run="[tiny]", dashboard=None, clock=lambda: 0.0)
    display.note("[bold]not markup")
    display.membership(actors(Layout()))
    display.step(at(1, eval_loss=2.0), 1)
    display.saved(SAVED)
    display.close()
    display.close()
    assert "[bold]not markup" in out.getvalue() and "[tiny]" in out.getvalue() and "worker-0000" in out.getvalue()
    assert out.getvalue().rindex("\x1b[?25h") > out.getvalue().rindex("\x1b[?25l")


class Terminal(io.TextIOWrapper):
    def __init__(self, encoding: str = "utf-8") -> None:
        super().__init__(io.BytesIO(), encoding=encoding)

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("mode", "out", "term", "kind"),
    [
        ("auto", Terminal(), "xterm", LiveDisplay),
        ("auto", Terminal(), "dumb", PlainDisplay),
        ("auto", Terminal("ascii"), "xterm", PlainDisplay),
        ("auto", io.StringIO(), "xterm", PlainDisplay),
        ("live", io.StringIO(), "xterm", LiveDisplay),
        ("plain", Terminal(), "xterm", PlainDisplay),
        ("none", Terminal(), "xterm", NoDisplay),
    ],
)
def test_the_mode_and_the_terminal_choose_the_display(monkeypatch, mode, out, term, kind):
    monkeypatch.setenv("TERM", term)
    monkeypatch.setenv("FORCE_COLOR", "1")  # which makes rich take anything for a terminal
    display = make_display(mode, out, run="tiny")
    display.close()
    assert type(display) is kind


@given(st.lists(st.floats(-1e6, 1e6), max_size=3000), st.integers(1, 200))
def test_a_curve_stays_small_and_fits(values: list[float], width: int):
    curve = Curve()
    for value in values:
        curve = curve.add(value)
    assert len(curve.points) < MAX_POINTS
    assert len(curve.draw(width)) == min(width, len(curve.points))
    assert set(curve.draw(width)) <= set(BLOCKS)


def test_a_falling_curve_is_drawn_falling():
    curve = Curve()
    for i in range(5000):
        curve = curve.add(-float(i))
    assert curve.draw(8) == BLOCKS[::-1]
    assert Curve(points=(1.0, 1.0)).draw(8) == "▁▁" and Curve().draw(8) == ""


def lines_of(*reports: StepReport) -> list[dict]:
    return [metrics_line(report, attempt=1, time=0.0) for report in reports]


def test_the_summary_of_a_finished_run():
    done = CellDone(
        generation=1, outcome="finished", step=20, checkpoint="runs/tiny/c", sample="\ndef f():\n\treturn\x1b[2J\n"
    )
    lines = lines_of(*(at(step, loss=float(step), eval_loss=3.5 if step == 20 else None) for step in range(1, 21)))
    assert summary(
        done, total_steps=20, lines=lines, metrics=Path("runs/tiny/metrics.jsonl"), go_on=""
    ).splitlines() == [
        "finished: 20 of 20 steps",
        "  loss        15.5000 (mean of 10 steps to 20)",
        "  held-out    3.5000 (step 20)",
        "  metrics     runs/tiny/metrics.jsonl",
        "  checkpoint  runs/tiny/c",
        "  sample",
        "    def f():",
        "        return·[2J",
    ]


def test_the_summary_of_a_stopped_run_leaves_out_steps_of_an_attempt_that_is_void():
    done = CellDone(generation=1, outcome="stopped", step=2)
    lines = lines_of(at(1, loss=4.0), at(2, loss=math.nan), at(3, loss=1.0, eval_loss=1.0))
    assert summary(
        done, total_steps=20, lines=lines, metrics=Path("m"), go_on="give the same command again to go on"
    ).splitlines() == [
        "stopped: 2 of 20 steps; give the same command again to go on",
        "  loss        4.0000 (mean of 1 step to 2)",
        "  metrics     m",
    ]


def test_the_summary_of_a_run_without_a_step():
    done = CellDone(generation=1, outcome="stopped", step=0, checkpoint="c")
    assert (
        len(
            summary(
                done, total_steps=20, lines=[], metrics=Path("m"), go_on="give the same command again to go on"
            ).splitlines()
        )
        == 3
    )
