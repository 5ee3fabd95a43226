"""metrics.jsonl and journal.jsonl say what happened, whatever happened to their writer."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from rayformer.events import JournalEntry, StepReport
from rayformer.observe.journal import Journal, read_journal
from rayformer.observe.jsonl import JsonlWriter, read_lines
from rayformer.observe.metrics import MetricsFile, metrics_line, read_metrics

REPORT = StepReport(
    generation=1,
    step=7,
    loss=0.1 + 0.2,
    grad_norm=1.5,
    lr=1e-3,
    tokens=2048,
    valid_tokens=2000,
    consumed_samples=112,
    step_s=0.5,
)


def strict(text: str) -> dict:
    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is not JSON")

    return json.loads(text, parse_constant=refuse)


def test_a_line_has_the_keys_of_the_contract_and_all_digits():
    line = metrics_line(REPORT, attempt=2, time=5.0)
    keys = "attempt generation step loss grad_norm lr tokens valid_tokens consumed_samples"
    assert list(line) == [*keys.split(), "step_s", "tokens_per_s", "skipped", "time"]
    assert json.loads(json.dumps(line))["loss"] == 0.30000000000000004
    assert (line["attempt"], line["tokens_per_s"], line["skipped"], line["time"]) == (2, 4096.0, False, 5.0)


def test_what_is_known_only_sometimes_is_there_only_then():
    report = replace(REPORT, eval_loss=2.5, state_hash="00ff", flops_per_token=6)
    line = metrics_line(report, attempt=1, time=0.0)
    assert {key: line[key] for key in ("eval_loss", "state_hash", "flops_per_token")} == {
        "eval_loss": 2.5,
        "state_hash": "00ff",
        "flops_per_token": 6,
    }


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_number_that_is_not_finite_is_null_and_named_with_the_parameters(tmp_path: Path, bad: float):
    path = tmp_path / "metrics.jsonl"
    report = replace(REPORT, grad_norm=bad, eval_loss=bad, nonfinite=("layers.0.norm.weight",), skipped=True)
    MetricsFile(path, attempt=1).write(report)
    line = strict(path.read_text())
    assert line["grad_norm"] is None and line["eval_loss"] is None and line["loss"] == REPORT.loss
    assert line["nonfinite"] == ["grad_norm", "eval_loss", "layers.0.norm.weight"] and line["skipped"]


def test_of_a_redone_step_the_last_line_counts(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    for attempt, steps in ((1, (1, 2, 3)), (2, (2, 3, 4))):
        file = MetricsFile(path, attempt, clock=lambda: 0.0)
        for step in steps:
            file.write(replace(REPORT, step=step))
        file.close()
    assert len(read_lines(path)) == 6
    assert [(line["step"], line["attempt"]) for line in read_metrics(path)] == [(1, 1), (2, 2), (3, 2), (4, 2)]


@pytest.mark.parametrize("cut", range(1, len('{"step": 2}\n')))
def test_half_a_last_line_costs_that_line_and_no_other(tmp_path: Path, cut: int):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n' + '{"step": 2}\n'[:cut])
    whole = [{"step": 1}, {"step": 2}] if cut == len('{"step": 2}') else [{"step": 1}]
    assert read_lines(path) == whole
    JsonlWriter(path).append({"step": 3})
    assert read_lines(path) == [*whole, {"step": 3}]
    JsonlWriter(path).append({"step": 4})
    assert read_lines(path) == [*whole, {"step": 3}, {"step": 4}]


def test_a_file_that_is_not_there_has_no_lines(tmp_path: Path):
    assert read_lines(tmp_path / "metrics.jsonl") == []


def test_text_that_breaks_lines_elsewhere_does_not_break_them_here(tmp_path: Path):
    values = {"text": "a\nb\u2028c\rd\x85 é"}
    JsonlWriter(tmp_path / "x.jsonl").append(values)
    assert read_lines(tmp_path / "x.jsonl") == [values]


def test_two_writers_of_one_file_do_not_mix_their_lines(tmp_path: Path):
    one, two = (JsonlWriter(tmp_path / "x.jsonl") for _ in range(2))
    for i in range(3):
        one.append({"i": i, "by": "one"})
        two.append({"i": i, "by": "two"})
    assert [(line["i"], line["by"]) for line in read_lines(tmp_path / "x.jsonl")] == [
        (i, by) for i in range(3) for by in ("one", "two")
    ]


def test_a_journal_line_is_the_common_keys_and_the_values(tmp_path: Path):
    path = tmp_path / "journal.jsonl"
    journal = Journal(path, attempt=3, clock=lambda: 5.0)
    cells = {"pp0.dp0.cp0.tp0": {"worker": "worker-0000", "pid": 1}}
    journal.write(JournalEntry(kind="membership", generation=1, values={"cells": cells}))
    journal.write(JournalEntry(kind="recovered", generation=2))
    journal.close()
    assert [list(line.items()) for line in read_journal(path)] == [
        [("time", 5.0), ("attempt", 3), ("generation", 1), ("kind", "membership"), ("cells", cells)],
        [("time", 5.0), ("attempt", 3), ("generation", 2), ("kind", "recovered")],
    ]


def test_a_journal_value_may_not_hide_a_common_key(tmp_path: Path):
    with pytest.raises(AssertionError, match="common key"):
        Journal(tmp_path / "j.jsonl", attempt=1).write(JournalEntry(kind="fault", generation=1, values={"time": 0}))
