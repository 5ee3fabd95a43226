"""The page: what a run was, how it ended, its curves, and what happened to it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

import yaml

from rayformer.observe.report.bars import Pipeline, phases_figure, pipeline_figure
from rayformer.observe.report.charts import Chart, Series, figure
from rayformer.observe.report.record import Line, Record, inner, integer, number, read_record
from rayformer.observe.report.story import events_table, members_table, recoveries_table, timeline_figure
from rayformer.observe.report.style import CSS, SCRIPT
from rayformer.observe.report.text import escaped, moment, seconds, short
from rayformer.observe.rundir import RunDir

NUM_LOSSES = 10
AXES = ("tp", "pp", "dp", "cp", "ep", "etp")


def write_report(
    files: RunDir, *, pipelines: Sequence[Pipeline] = (), environment: Mapping[str, Any] | None = None
) -> Path:
    """Write the page of the run in a folder and return its path; an older one is replaced in one go.

    ``pipelines`` are what a step looks like, ``environment`` what the run's bits depend on besides the job.
    """
    page = report_page(read_record(files), pipelines=pipelines, environment=environment or {})
    half = files.report.with_name(f".{files.report.name}.half")
    half.write_text(page, encoding="utf-8")
    os.replace(half, files.report)
    return files.report


def report_page(record: Record, *, pipelines: Sequence[Pipeline] = (), environment: Mapping[str, Any]) -> str:
    """The whole page."""
    charts = "".join(_charts(record.steps))
    job = yaml.safe_dump(record.job, sort_keys=False, allow_unicode=True) if record.job else ""
    parts = [
        _header(record, environment),
        f'<div class="charts">{charts}</div>' if charts else "<p>No step was executed.</p>",
        timeline_figure(record),
        *map(pipeline_figure, pipelines),
        recoveries_table(record),
        events_table(record),
        members_table(record),
        f"<details><summary>Job</summary><pre>{escaped(job, 50_000)}</pre></details>" if job else "",
    ]
    return _page(f"{record.name}: {record.outcome}", parts)


def drawings_page(
    title: str, pipelines: Sequence[Pipeline], *, head: Sequence[object], rows: Sequence[Sequence[object]]
) -> str:
    """A page of drawings of pipelines, and a table."""
    lines = [("th", head), *(("td", row) for row in rows)]
    table = "".join(f"<tr>{''.join(f'<{tag}>{escaped(value)}</{tag}>' for value in line)}</tr>" for tag, line in lines)
    parts = [f"<header><h1>{escaped(title)}</h1></header>", f"<table>{table}</table>", *map(pipeline_figure, pipelines)]
    return _page(title, parts)


def _page(title: str, parts: Sequence[str]) -> str:
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline';"
        " script-src 'unsafe-inline'\">"
        f"<title>{escaped(title)}</title><style>{CSS}</style></head>\n"
        f"<body>{''.join(parts)}\n<script>{SCRIPT}</script></body></html>\n"
    )


def _header(record: Record, environment: Mapping[str, Any]) -> str:
    times = [line["time"] for line in (*record.executed, *record.journal)]
    when = f"{moment(min(times))} to {moment(max(times))} UTC" if times else "nothing is recorded"
    tiles = "".join(
        f'<dl class="tile"><dt>{escaped(name)}</dt><dd>{escaped(value)}<small>{escaped(more)}</small></dd></dl>'
        for name, value, more in _tiles(record)
    )
    facts = "".join(f"<dt>{escaped(name)}</dt><dd>{value}</dd>" for name, value in _facts(record, environment) if value)
    outcome = {"open": "no end recorded"}.get(record.outcome, record.outcome)
    return (
        f"<header><h1>{escaped(record.name)}</h1>"
        f'<span class="outcome {escaped(record.outcome)}">{escaped(outcome)}</span>'
        f'<p>{when}</p></header><div class="tiles">{tiles}</div><dl class="facts">{facts}</dl>'
    )


def _tiles(record: Record) -> Iterator[tuple[str, str, str]]:
    """The numbers that are looked for first: name, value, and a remark."""
    steps, total = record.steps, record.total_steps
    at = steps[-1]["step"] if steps else 0
    skipped = sum(line.get("skipped") is True for line in steps)
    remarks = [f"of {total:,}" if total else "", f"{skipped:,} updates skipped" if skipped else ""]
    yield "steps", f"{at:,}", "; ".join(filter(None, remarks))
    losses = [loss for line in steps if (loss := number(line, "loss")) is not None][-NUM_LOSSES:]
    if losses:
        yield (
            "loss",
            f"{fmean(losses):.4f}",
            f"mean of the last {len(losses)} steps" if len(losses) > 1 else "of one step",
        )
    held_out = [(line["step"], loss) for line in steps if (loss := number(line, "eval_loss")) is not None]
    if held_out:
        yield "held-out loss", f"{held_out[-1][1]:.4f}", f"at step {held_out[-1][0]:,}"
    speeds = [speed for line in steps if (speed := number(line, "tokens_per_s")) is not None]
    if speeds:
        yield "tokens/s", f"{median(speeds):,.0f}", "median over steps"
    times = [time for line in steps if (time := number(line, "step_s")) is not None]
    if times:
        yield "step time", seconds(median(times)), f"median; {seconds(sum(times))} in steps"
    tokens = sum(number(line, "tokens") or 0 for line in steps)
    if tokens:
        yield "tokens", short(tokens), f"{tokens:,.0f}"
    recovered = sum(line["kind"] == "recovered" for line in record.journal)
    yield "attempts", str(len(record.attempts)), f"{recovered} recoveries; {record.num_redone:,} steps redone"


def _facts(record: Record, environment: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """What the run was, as names and texts that are escaped already."""
    job = record.job
    hashes = [line for line in record.steps if isinstance(line.get("state_hash"), str)]
    if hashes:
        last = hashes[-1]
        yield "state hash", f"<code>{escaped(last['state_hash'])}</code> after step {last['step']:,}"
    degrees = {axis: integer(job, "layout", axis) for axis in AXES}
    if degrees["tp"]:
        shown = " × ".join(f"{axis} {n}" for axis, n in degrees.items() if n and (n > 1 or axis in ("tp", "pp", "dp")))
        world = 1
        for axis in ("tp", "pp", "dp", "cp"):
            world *= degrees[axis] or 1
        yield "layout", f"{shown} = {world} cell{'s' * (world > 1)}, schedule {escaped(inner(job, 'schedule', 'name'))}"
    yield "model", _settings(job, "model", ("layers", "hidden", "heads", "kv_heads", "ffn", "vocab"))
    yield "batch", _settings(job, "batch", ("global", "micro", "seq", "virtual_ranks"))
    yield (
        "optimizer",
        _settings(job, "optim", ("lr", "min_lr", "decay", "warmup_steps", "weight_decay", "clip", "zero")),
    )
    yield "data", ", ".join(escaped(inner(source, "path")) for source in inner(job, "data", "train") or ())
    yield "environment", ", ".join(f"{escaped(k)} {escaped(v)}" for k, v in environment.items() if v is not None)


def _settings(job: Line, section: str, keys: Sequence[str]) -> str:
    return ", ".join(f"{key} {escaped(value)}" for key in keys if (value := inner(job, section, key)) is not None)


def _charts(steps: Sequence[Line]) -> Iterator[str]:
    def curve(name: str, key: str, color: str) -> Series:
        return Series(name=name, color=color, points=[(line["step"], number(line, key)) for line in steps])

    held_out = [(line["step"], loss) for line in steps if (loss := number(line, "eval_loss")) is not None]
    losses = [curve("training", "loss", "c1")]
    if held_out:
        losses.append(Series(name="held-out", color="c2", points=held_out, dotted=True))
    odd = [line["step"] for line in steps if line.get("skipped") is True or line.get("nonfinite")]
    marks: dict[str, Any] = {"marks": odd, "mark_name": "skipped, or not finite"}
    yield figure(Chart(title="Loss", unit="per token, in nats", series=losses, **marks))
    norm = [curve("before clipping", "grad_norm", "c3")]
    yield figure(Chart(title="Gradient norm", unit="", series=norm, scale="log", **marks))
    yield figure(Chart(title="Learning rate", unit="", series=[curve("rate", "lr", "c4")], from_zero=True))
    yield figure(
        Chart(title="Step time", unit="s", series=[curve("step time", "step_s", "c5")], scale="log", from_zero=True)
    )
    speed = [curve("tokens/s", "tokens_per_s", "c7")]
    yield figure(Chart(title="Throughput", unit="tokens/s", series=speed, from_zero=True))
    yield phases_figure(steps)
