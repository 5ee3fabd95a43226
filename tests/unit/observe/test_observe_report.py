"""report.html: everything a run left behind is on it, nothing of it gets out of its place, and it stays small."""

import doctest
import json
import math
import re
from html.parser import HTMLParser
from importlib import import_module
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from rayformer.cell.measured import measured_pipeline
from rayformer.cell.report import pipeline_of, report_at_end, report_run
from rayformer.cli.main import main
from rayformer.config.job import resolve
from rayformer.config.load import job_from_tree
from rayformer.events import Span, StepTrace
from rayformer.observe.report.bars import Pipeline, phases_figure, pipeline_figure
from rayformer.observe.report.charts import NUM_BUCKETS, Chart, Series, axis, figure, log_axis, thinned
from rayformer.observe.report.page import write_report
from rayformer.observe.report.record import read_record
from rayformer.observe.rundir import RunDir
from rayformer.observe.trace import TraceFile, last_step

CELL = "pp1.dp0.cp0.tp0"
HOSTILE = "</script><script>alert(1)</script><img src=x onerror='a()'>\"&\x1b\u202e"
TREE = {
    "run": {"name": "tiny", "steps": 20},
    "model": {"layers": 4, "hidden": 64, "heads": 4, "ffn": 96, "vocab": 257},
    "layout": {"pp": 2, "dp": 2},
    "batch": {"global": 16, "micro": 2, "seq": 32},
    "data": {"train": [{"path": "python-stdlib"}]},
}
JOB = resolve(job_from_tree(TREE), dp=2, recorded={})


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    files = RunDir(tmp_path / "tiny")
    files.create()
    return files


def step_line(step, **values):
    line = {
        "attempt": 1, "generation": 1, "step": step, "loss": 5.0 / max(step, 1), "grad_norm": 1.0, "lr": 1e-3,
        "tokens": 512, "valid_tokens": 512, "consumed_samples": 16 * step, "step_s": 0.5, "tokens_per_s": 1024.0,
        "skipped": False, "time": 1000.0 + step,
    }  # fmt: skip
    return {**line, **values}


def entry(kind, time, **values):
    return {"time": time, "attempt": 1, "generation": 1, "kind": kind, **values}


def fill(files, steps=(), journal=(), job=None):
    for path, lines in ((files.metrics, steps), (files.journal, journal)):
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    files.job_yaml.write_text(yaml.safe_dump(job or JOB.dump()))


def page_of(files, **options):
    return write_report(files, **options).read_text(encoding="utf-8")


class Tags(HTMLParser):
    """The start tags of a page, and its text."""

    def __init__(self, page):
        super().__init__()
        self.tags, self.text, self.open = [], "", []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "input"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data + " "


def whole(page):
    """The page's tags, after checking that it is well-formed, fetches nothing, and has no number that is none."""
    tags = Tags(page)
    assert tags.open == []
    names = {name for name, _ in tags.tags}
    assert names.isdisjoint({"link", "img", "iframe", "object", "base", "form", "a"})
    assert not any({"src", "href", "srcset"} & attrs.keys() for _, attrs in tags.tags)
    assert "default-src 'none'" in page and "url(" not in page and "@import" not in page
    for _, attrs in tags.tags:
        for name in ("d", "x", "y", "width", "height", "cx", "cy", "viewbox"):
            assert not re.search("nan|inf|None", attrs.get(name) or ""), attrs
    return tags


@pytest.mark.parametrize("name", ["charts", "bars", "story", "record", "page", "text"])
def test_the_examples_in_the_docstrings_hold(name):
    assert doctest.testmod(import_module(f"rayformer.observe.report.{name}")).failed == 0


def test_the_page_shows_what_a_run_was_and_how_it_went(run: RunDir):
    phases = {"data": 0.1, "forward": 0.15, "backward": 0.25}
    steps = [step_line(step, phase_s=phases) for step in range(1, 21)]
    steps[9]["eval_loss"] = 0.75
    steps[-1].update(eval_loss=0.5, state_hash="00ff00ff00ff00ff")
    fill(run, steps, [entry("membership", 1000.0, cells={CELL: {"worker": "worker-0001", "pid": 7, "node": "n"}}),
                      entry("done", 1021.0, outcome="finished", step=20)])  # fmt: skip
    page = page_of(run, pipelines=[pipeline_of(JOB)], environment={"torch": "2.13.0", "cuda": None})
    tags = whole(page)
    for told in (
        "tiny", "finished", "0.5000", "00ff00ff00ff00ff", "after step 20", "tp 1 × pp 2 × dp 2 = 4 cells", "1f1b",
        "1,024", "500 ms", "torch 2.13.0", "worker-0001", "finished at step 20", "1970-01-01 00:16:40", "forward 30 %",
        "Pipeline", "F3", "B3", "python-stdlib",
    ):  # fmt: skip
        assert told in tags.text, told
    assert "cuda" not in tags.text.split("environment")[1].split("Loss")[0]
    titles = [attrs["aria-label"] for tag, attrs in tags.tags if tag == "svg"]
    assert set(titles) == {
        "Loss", "Gradient norm", "Learning rate", "Step time", "Throughput", "Phases of a step", "Timeline", "Pipeline",
    }  # fmt: skip
    assert titles.count("Loss") == 2  # linear and logarithmic


def test_a_step_that_was_redone_counts_as_its_last_line_says_and_half_lines_do_not_count(run: RunDir):
    steps = [step_line(1), step_line(2), step_line(3, loss=9.0), step_line(3, loss=1.0, generation=2), step_line(4)]
    fill(run, steps, [entry("grant", 1000.0)])
    with run.metrics.open("a") as metrics, run.journal.open("a") as journal:
        metrics.write('{"attempt": 1, "step": 5, "los')
        journal.write('{"time": 3')
    record = read_record(run)
    assert [(line["step"], line["loss"]) for line in record.steps] == [(1, 5.0), (2, 2.5), (3, 1.0), (4, 1.25)]
    assert (record.num_redone, record.outcome) == (1, "open")
    tags = whole(page_of(run))
    assert "1 steps redone" in tags.text and "no end recorded" in tags.text


def test_steps_beyond_the_one_a_run_stopped_at_are_void(run: RunDir):
    steps = [step_line(step) for step in (1, 2, 3, 4, 5)] + [step_line(3, attempt=2)]
    fill(run, steps, [entry("done", 1006.0, attempt=2, outcome="stopped", step=3)])
    record = read_record(run)
    assert ([line["step"] for line in record.steps], record.num_redone) == ([1, 2, 3], 3)
    assert record.outcome == "stopped"


@pytest.mark.parametrize(
    ("journal", "outcome"),
    [
        ([], "open"),
        ([entry("done", 1, outcome="finished", step=2)], "finished"),
        ([entry("failed", 1, errors=[])], "failed"),
        ([entry("done", 1, outcome="stopped", step=2), entry("placed", 2, attempt=2)], "open"),
        ([entry("failed", 1, errors=[]), entry("placed", 2, attempt=2), entry("done", 3, attempt=2, outcome="finished",
          step=2)], "finished"),
    ],
)  # fmt: skip
def test_the_outcome_is_that_of_the_last_attempt(run: RunDir, journal, outcome):
    fill(run, [step_line(1), step_line(2)], journal)
    assert read_record(run).outcome == outcome
    assert f'class="outcome {outcome}"' in page_of(run)


def test_failures_and_recoveries_are_drawn_and_told(run: RunDir):
    error = {"cell": CELL, "worker": "worker-0002", "kind": "died", "message": "its process died: SIGKILL"}
    fill(run, [step_line(step, time=1000.0 + 10 * step) for step in range(1, 9)], [
        entry("fault", 1040.0, effect="kill", cell=CELL, step=4, at="backward"),
        entry("cell_failed", 1040.5, role="event", error=error),
        entry("stall", 1041.0, cell=CELL, instruction="RecvAct3<0", microbatch=3, waiters=["pp0.dp0.cp0.tp0"]),
        {**entry("recovered", 1044.0, cells=[CELL], cause="died", source="holder", steps_redone=1, detect_s=0.02,
                 drain_s=0.1, form_s=0.2, restore_s=0.3, first_step_s=0.4, total_s=1.02), "generation": 2},
        {**entry("failed", 1081.0, errors=[error]), "generation": 2},
    ])  # fmt: skip
    tags = whole(page_of(run))
    crosses = [attrs for tag, attrs in tags.tags if tag == "path" and attrs.get("class") == "cross"]
    assert len(crosses) == 4
    assert any(tag == "rect" and attrs.get("class") == "fill good" for tag, attrs in tags.tags)
    for told in ("holder", "1.02 s", "20 ms", f"{CELL} back after 1.02 s", "RecvAct3<0", "SIGKILL", "generation 2"):
        assert told in tags.text, told


def test_nothing_that_stands_in_a_file_becomes_a_part_of_the_page(run: RunDir):
    bad = {HOSTILE: HOSTILE}
    job = {**JOB.dump(), "schedule": {"name": HOSTILE}, "data": {"train": [{"path": HOSTILE}]}, HOSTILE: HOSTILE}
    journal = [entry(kind, 1001.0, **dict.fromkeys(("effect", "cell", "cause", "source", "outcome", "by"), HOSTILE),
                     cells=[HOSTILE], errors=[bad, {"message": HOSTILE}], error={"message": HOSTILE})
               for kind in ("fault", "recovered", "cell_failed", "stop_asked", "failed", "done", HOSTILE)]  # fmt: skip
    journal += [entry("membership", 1002.0, cells={HOSTILE: {"worker": HOSTILE, "pid": HOSTILE, "node": HOSTILE}})]
    journal = [{**line, "generation": HOSTILE} for line in journal]
    steps = [step_line(1, phase_s={HOSTILE: 1.0}, state_hash=HOSTILE, generation=HOSTILE, nonfinite=[HOSTILE])]
    fill(run, steps, journal, job)
    files = RunDir(run.path.rename(run.path.with_name("<script>alert(1)<"[:8] + "&'\"")))
    drawn = Pipeline(ranks=[[(HOSTILE, 0.0, 1.0)]], note=HOSTILE)
    page = page_of(files, pipelines=[drawn], environment=bad)
    tags = whole(page)
    assert "onerror" not in {name for _, attrs in tags.tags for name in attrs}
    scripts = [attrs for tag, attrs in tags.tags if tag == "script"]
    assert len(scripts) == page.count('<script type="application/json">') + 1
    assert "alert(1)" in tags.text and "\x1b" not in page and "\u202e" not in page


@pytest.mark.parametrize(
    "lines",
    [
        ["[]", "7", "null", '{"step": 1}', '{"attempt": "x", "time": 1, "step": 1}'],
        [json.dumps(step_line(1, loss="low", grad_norm=True, lr=None, step_s=[], tokens={}, tokens_per_s="")), "{"],
        ['{"attempt": 1, "time": 1, "step": 1}'],
        ['{"attempt": 1, "time": 1e300, "step": 1, "phase_s": {"data": "x"}, "loss": 1e308}'],
        [json.dumps(step_line(step, loss=0.0, step_s=0.0, lr=0.0, grad_norm=-1.0)) for step in (1, 2, 3)],
        [json.dumps(step_line(step, loss=2.5)) for step in (5,)],
        [json.dumps(step_line(step, loss=None, nonfinite=["loss"])) for step in (1, 2)],
    ],
)
def test_odd_lines_and_flat_curves_break_nothing(run: RunDir, lines):
    run.metrics.write_text("\n".join(lines))
    run.journal.write_text(
        "\n".join(['{"kind": 1, "time": 1, "attempt": 1}', '{"kind": "recovered", "time": 1, "attempt": 1}'])
    )
    run.job_yaml.write_text("run: [broken")
    whole(page_of(run))


def test_a_folder_with_nothing_in_it_makes_a_page_that_says_so(run: RunDir):
    tags = whole(page_of(run))
    assert "No step was executed" in tags.text and "nothing is recorded" in tags.text


def test_a_hundred_thousand_steps_make_a_small_page_that_shows_the_extremes(run: RunDir):
    steps = [step_line(step, phase_s={"forward": 0.1}) for step in range(1, 100_001)]
    steps[61_234]["loss"], steps[61_999]["skipped"] = 987.5, True
    steps[77_777].update(grad_norm=None, nonfinite=["grad_norm"])
    journal = [entry("saved", 1000.0 + step, step=step, seconds=0.1) for step in range(0, 100_000, 50)]
    journal += [entry("fault", 1000.0 + step, effect="kill", cell=CELL, step=step) for step in range(0, 100_000, 10)]
    fill(run, steps, journal)
    page = page_of(run)
    tags = whole(page)
    assert len(page) < 600_000
    assert [61235, 987.5] in next(points for name, points in _data(page) if name == "training")
    assert sum(attrs.get("class") == "mark bad" for _, attrs in tags.tags) >= 2
    assert "The first 9700 are left out" in tags.text


def _data(page):
    for text in re.findall(r'<script type="application/json">(.*?)</script>', page):
        yield from json.loads(text)


values = st.one_of(st.none(), st.floats(-1e6, 1e6))


@given(st.lists(values, max_size=400), st.integers(1, 20))
def test_thinning_keeps_the_order_the_ends_and_the_extremes(heights, num_buckets):
    points = [(step, height) for step, height in enumerate(heights, 1)]
    kept = thinned(points, num_buckets)
    assert len(kept) <= max(4 * num_buckets, 4)
    assert kept == [point for point in points if point in kept]
    finite = [point for point in points if point[1] is not None]
    if finite:
        shown = [point for point in kept if point[1] is not None]
        assert (shown[0], shown[-1]) == (finite[0], finite[-1])
        for extreme in (min, max):
            assert extreme(y for _, y in shown) == extreme(y for _, y in finite)


@given(st.floats(-1e9, 1e9), st.floats(1e-6, 1e9))
def test_an_axis_has_a_few_rising_numbers_within_it(low, span):
    ticks = axis(low, low + span)
    assert ticks == sorted(set(ticks)) and 1 <= len(ticks) <= 7
    assert all(low - 1e-6 * span - 1e-6 * abs(low) <= tick <= low + span * 1.000001 + 1e-6 * abs(low) for tick in ticks)


@given(st.floats(1e-9, 1e9), st.floats(1.06, 1e9))
def test_a_logarithmic_axis_has_a_few_rising_numbers_above_zero(low, factor):
    ticks = log_axis(low, low * factor)
    assert ticks == sorted(set(ticks)) and 1 <= len(ticks) <= 12
    assert min(ticks) > 0


def test_a_value_that_is_missing_is_a_gap_and_its_step_is_marked():
    series = Series(name="loss", color="c1", points=[(1, 1.0), (2, 2.0), (3, None), (4, 2.0), (5, None), (6, 4.0)])
    drawn = figure(Chart(title="Loss", unit="", series=[series], marks=[3, 5], mark_name="not finite"))
    linear = Tags(drawn.split("</svg>")[0] + "</svg>").tags
    (line,) = [attrs["d"] for _, attrs in linear if attrs.get("class") == "line c1"]
    assert line.count("M") == 1 and line.count("L") == 1  # 1 to 2; the others stand alone, as dots
    assert sum(tag == "circle" for tag, _ in linear) == 2
    assert sum(attrs.get("class") == "mark bad" for _, attrs in linear) == 2
    assert "not finite" in drawn


@pytest.mark.parametrize(("low", "high", "choice"), [(1.0, 5.0, 2), (0.0, 5.0, 0), (-1.0, 5.0, 0), (2.0, 2.0, 0)])
def test_a_logarithmic_axis_is_offered_where_there_can_be_one(low, high, choice):
    series = Series(name="x", color="c1", points=[(1, low), (2, high)])
    drawn = figure(Chart(title="X", unit="s", series=[series], scale="log"))
    assert (drawn.count("<input"), drawn.count("<svg")) == (choice, max(choice, 1))
    assert drawn.count(" checked") == min(choice, 1)


@pytest.mark.parametrize("num_steps", [1, 7, 5000])
def test_phases_are_stacked_to_the_height_of_the_step(num_steps):
    steps = [step_line(step, phase_s={"other": 1.0, "backward": 2.0, "data": 1.0}) for step in range(1, num_steps + 1)]
    drawn = phases_figure([step_line(0), *steps])
    tags = Tags(drawn)
    assert re.findall(r'key c\d">(\w+ \d+ %)', drawn) == ["data 25 %", "backward 50 %", "other 25 %"]
    edges = [
        tuple(map(float, re.match(r"M\S+ ([\d.]+)V([\d.]+)", attrs["d"]).groups()))
        for tag, attrs in tags.tags
        if "fill" in (attrs.get("class") or "")
    ]
    assert edges[0][1] == edges[1][0] and edges[1][1] == edges[2][0]
    assert edges[1][0] - edges[1][1] == pytest.approx(2 * (edges[0][0] - edges[0][1]), abs=0.2)
    assert len(drawn) < 40_000


def test_without_phases_and_without_a_pipeline_nothing_is_drawn_of_them():
    assert phases_figure([step_line(1)]) == pipeline_figure(Pipeline(ranks=[[], []])) == ""


def test_the_pipeline_is_that_of_the_job():
    drawn = pipeline_of(JOB)
    assert [[op for op, _, _ in row] for row in drawn.ranks] == [
        ["F0", "F1", "B0", "F2", "B1", "F3", "B2", "B3"],
        ["F0", "B0", "F1", "B1", "F2", "B2", "F3", "B3"],
    ]
    assert drawn.note.startswith("1f1b, one step of a replica: 2 ranks, 4 microbatches; 20.0 % of the time is lost")
    assert pipeline_figure(drawn).count('class="op') == 16


def test_of_a_long_pipeline_the_first_microbatches_are_drawn():
    tree = {**TREE, "layout": {"pp": 4}, "batch": {"global": 4096, "micro": 1, "seq": 32}}
    drawn = pipeline_of(resolve(job_from_tree(tree), dp=1, recorded={}))
    assert "4 ranks, 200 of 4096 microbatches" in drawn.note and "lost" not in drawn.note
    assert len(pipeline_figure(drawn)) < 400_000
    assert pipeline_of(job_from_tree({**TREE, "layout": {"dp": "auto"}})) is None


def test_the_report_at_the_end_says_where_it_is_or_why_it_is_not_and_raises_nothing(run: RunDir, tmp_path: Path):
    fill(run, [step_line(1)], [entry("done", 1002.0, outcome="finished", step=1)])
    assert report_at_end(run) == str(run.report)
    assert "Pipeline" in run.report.read_text() and not list(run.path.glob(".report*"))
    (tmp_path / "file").write_text("")
    assert report_at_end(RunDir(tmp_path / "file")).startswith("not written: ")


def test_the_command_writes_it_anew_and_refuses_a_folder_without_a_run(run: RunDir, tmp_path: Path, capsys):
    fill(run, [step_line(1)])
    assert main(["report", str(run.path)]) == 0
    assert capsys.readouterr().out == f"{run.report}\n"
    assert "<title>tiny: open</title>" in run.report.read_text()
    assert main(["report", str(tmp_path)]) == 2
    assert capsys.readouterr().err == (
        f"error: RUN_DIR={tmp_path}: it has no metrics.jsonl and no journal.jsonl; name the folder of a run\n"
    )


def test_enough_points_are_drawn_for_every_second_pixel():
    points = [(step, math.sin(step)) for step in range(100_000)]
    assert len({int((step / 100_000) * NUM_BUCKETS) for step, _ in thinned(points)}) == NUM_BUCKETS


def spans_of(ops, *, start=0.0, took=0.01, waited=0.0):
    """One span after the other, each so long, after so long a wait."""
    return [
        Span(
            name=op,
            phase="forward",
            start_us=int(1e6 * (start + number * took)),
            length_us=int(1e6 * took),
            waited_us=int(1e6 * waited),
        )
        for number, op in enumerate(ops)
    ]


def test_a_trace_is_whole_after_every_step_and_its_last_step_can_be_read_again(tmp_path):
    path, cells = tmp_path / "trace.json", ("pp0.dp0.cp0.tp0", "pp1.dp0.cp0.tp0")
    assert last_step(path) is None
    for attempt in (1, 2):  # another attempt appends
        file = TraceFile(path)
        for step in (1, 2):
            trace = StepTrace(
                generation=attempt, step=step, spans={cell: spans_of(["F0", "SendAct0>1", "B0"]) for cell in cells}
            )
            file.write(trace)
            events = json.loads(path.read_text())
            assert last_step(path) == trace
    executed = [event for event in events if event["ph"] == "X"]
    assert len(executed) == 2 * 2 * 2 * 3
    assert {event["args"]["cell"]: event["tid"] for event in executed} == {cells[0]: 0, cells[1]: 1_000_000}
    assert [e["args"]["name"] for e in events if e["name"] == "thread_name"] == [*cells, *cells]


def test_a_measured_step_is_drawn_beside_what_the_schedule_allows(run):
    job = resolve(job_from_tree({**TREE, "batch": {"global": 4, "micro": 1, "seq": 32}}), dp=2, recorded={})
    fill(run, [step_line(1)], job=job.dump())
    TraceFile(run.trace).write(
        StepTrace(
            generation=1,
            step=1,
            spans={
                "pp0.dp0.cp0.tp0": spans_of(["F0", "SendAct0>1", "F1", "Fold0", "idle", "B0", "idle", "B1"]),
                "pp1.dp0.cp0.tp0": spans_of(["F0", "B0", "F1", "B1"], start=0.02),
                "pp0.dp1.cp0.tp0": spans_of(["F0"], took=9.0),
            },
        )
    )
    drawn = measured_pipeline(job, last_step(run.trace))
    assert [[op for op, _, _ in row] for row in drawn.ranks] == [["F0", "F1", "B0", "B1"], ["F0", "B0", "F1", "B1"]]
    # 8 units of 10 ms in all, of which each rank computes for 4; where nothing else is to do the two take 6
    assert "step 1, 80.0 ms, of which 50.0 % are lost" in drawn.note
    assert "the schedule loses 33.3 % of 60.0 ms" in drawn.note
    assert "Pipeline, measured" in report_run(run).read_text()


def test_what_a_computation_waited_is_not_computing():
    trace = StepTrace(generation=1, step=1, spans={"pp0.dp0.cp0.tp0": spans_of(["F0", "B0"], waited=0.004)})
    drawn = measured_pipeline(JOB.model_copy(update={"layout": JOB.layout.model_copy(update={"pp": 1})}), trace)
    assert [round(stop - start, 4) for start, stop in ((a, b) for _, a, b in drawn.ranks[0])] == [0.006, 0.006]
    assert measured_pipeline(JOB, None) is None
