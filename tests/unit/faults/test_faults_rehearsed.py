"""How the runs of a rehearsal are judged; their folders are made by hand."""

import json

import pytest

from rayformer.config.load import job_from_tree
from rayformer.faults.rehearsed import Rehearsed, judge_calm, judge_resumed, judge_struck, no_devices, was_asked_to_stop
from rayformer.observe.rundir import RunDir

CELL = "pp0.dp1.cp0.tp0"
TREE = {
    "run": {"name": "r", "steps": 6},
    "model": {"layers": 2, "hidden": 64, "heads": 4, "ffn": 96, "vocab": 257},
    "layout": {"dp": 2},
    "batch": {"global": 16, "micro": 2, "seq": 32},
    "data": {"train": [{"path": "python-stdlib"}]},
}
LOST = {"faults": [{"kill": CELL, "step": 5, "at": "backward"}]}
STRUCK = [
    {"kind": "fault", "effect": "kill", "cell": CELL, "step": 5, "at": "backward", "time": 10.0},
    {"kind": "replace", "cells": [CELL], "time": 10.5},
    {"kind": "cell_placed", "cell": CELL, "time": 12.5},
    {
        "kind": "recovered",
        "cells": [CELL],
        "source": "holder",
        "step": 4,
        "steps_redone": 0,
        "total_s": 2.25,
        "time": 13.0,
    },
]


def step(number, **values):
    line = {"step": number, "loss": 5.0 - number / 8, "grad_norm": 0.5 * number, "step_s": 0.25, "skipped": False}
    return line | values


STEPS = [*map(step, range(1, 6)), step(6, state_hash="ab" * 8)]


@pytest.fixture
def ran(tmp_path):
    """``ran(name, metrics, journal, status, **sections)``: a run of the job with ``sections``, and its lines."""

    def write(name, metrics=STEPS, journal=(), status=0, **sections):
        files = RunDir(tmp_path / name)
        files.create()
        for path, lines in ((files.metrics, metrics), (files.journal, journal)):
            path.write_text("".join(json.dumps({"attempt": 1, **line}) + "\n" for line in lines))
        tree = {**TREE, **{key: {**TREE[key], **value} if key in TREE else value for key, value in sections.items()}}
        return Rehearsed(job=job_from_tree(tree), files=files, status=status, about={"about": name})

    return write


@pytest.fixture
def calm(ran):
    return ran("calm")


def told(verdict):
    """The error lines of a verdict that must have failed."""
    assert verdict.outcome == "failed"
    (problem,) = verdict.problems
    return str(problem)


def test_a_run_to_the_end_is_told_by_its_steps(ran):
    lines = [step(1, step_s=9.0), *STEPS[1:5], step(6, skipped=True)]
    verdict = judge_calm(ran("calm", lines))
    assert verdict.outcome == "held" and verdict.problems == ()
    assert verdict.in_words == "6 steps of 0.250 s, 1 without an update, saved after 3"


def test_an_undisturbed_run_that_fails_ends_with_its_status(ran):
    assert (
        told(judge_calm(ran("calm", status=1))) == "about=calm: it ended with status 1, undisturbed; mend the job first"
    )


def test_a_loss_that_is_no_number_is_no_success(ran):
    lines = [*STEPS[:2], step(3, loss=None), *STEPS[3:]]
    assert told(judge_calm(ran("calm", lines))).startswith("about=calm: the loss of step 3 is no finite number; ")


@pytest.mark.parametrize(
    ("placed", "source", "since", "words"),
    [
        (12.5, "holder", 4, "repaired in 2.25 s from holder by a cold start, no step done again; the same bits"),
        (10.51, "holder", 4, "repaired in 2.25 s from holder by a standby, no step done again; the same bits"),
        (12.5, "checkpoint", 3, "repaired in 2.25 s from checkpoint by a cold start, 1 step done again; the same bits"),
        (None, "holder", 2, "repaired in 2.25 s from holder, 2 steps done again; the same bits"),
    ],
)
def test_a_repair_is_told_with_its_time_and_source(ran, calm, placed, source, since, words):
    fault, asked, owner, recovered = STRUCK
    journal = [fault, asked, owner | {"time": placed}, recovered | {"source": source, "step": since}]
    if placed is None:
        journal.remove(owner | {"time": None})
    verdict = judge_struck(calm, ran("struck", journal=journal, **LOST))
    assert (verdict.outcome, verdict.in_words) == ("held", words)


@pytest.mark.parametrize(
    ("journal", "status", "sections", "message"),
    [
        (
            STRUCK[:1], 1, {"recovery": {"max_failures": 0}},
            f"recovery.max_failures=0: the loss of {CELL} in step 5 ended the run, as nothing may be repaired; use 10,",
        ),
        (STRUCK[:1], 1, {}, "about=struck: its loss in step 5 ended the run with status 1; see what it printed"),
        (STRUCK[:1], -9, {}, "about=struck: its loss in step 5 ended the run with status -9; see what it printed"),
        (STRUCK[:1], 75, {}, "about=struck: the lost cell found no place within cluster.wait_s; leave room: "),
        (STRUCK[1:], 0, {}, "about=struck: it was not lost in step 5, "),
        ([STRUCK[0] | {"step": 4}, *STRUCK[1:]], 0, {}, "about=struck: it was not lost in step 5, "),
        (STRUCK[:3], 0, {}, "about=struck: the journal tells of no repair; see "),
        ([*STRUCK[:3], STRUCK[3] | {"cells": ["pp0.dp0.cp0.tp0"]}], 0, {}, "about=struck: the journal tells of no"),
    ],
)  # fmt: skip
def test_what_went_wrong_with_a_loss_is_named(ran, calm, journal, status, sections, message):
    struck = ran("struck", journal=journal, status=status, **LOST, **sections)
    assert told(judge_struck(calm, struck)).startswith(message)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([*STEPS[:5], step(6, state_hash="cd" * 8)], f"state_hash at the end is {'cd' * 8}, and {'ab' * 8} in the"),
        ([*STEPS[:4], step(5, loss=4.375000001), STEPS[5]], "loss in step 5 is 4.375000001, and 4.375 in the"),
        (
            [*STEPS[:3], step(4, grad_norm=2.5), step(5, loss=4.0), STEPS[5]],
            "grad_norm in step 4 is 2.5, and 2.0 in the",
        ),
        (STEPS[:5], "step 6 is told of in one of the runs only and 1 more differences; compare"),
    ],
)
def test_a_repair_must_keep_every_bit(ran, calm, lines, message):
    assert told(judge_struck(calm, ran("struck", lines, STRUCK, **LOST))).startswith(f"about=struck: {message}")


def test_steps_that_the_lost_cell_had_not_told_are_no_difference(ran, calm):
    verdict = judge_struck(calm, ran("struck", [STEPS[0], *STEPS[3:]], STRUCK, **LOST))
    assert (verdict.outcome, verdict.problems) == ("held", ())
    assert verdict.in_words.endswith("no step done again, 2 steps before it untold; the same bits")


def test_where_kernels_need_not_be_deterministic_a_repair_keeps_the_curve_to_rounding(ran):
    free = {"precision": {"deterministic": False}}
    calm = ran("calm", **free)
    close = [*STEPS[:4], step(5, loss=4.37501), step(6, state_hash="cd" * 8)]
    verdict = judge_struck(calm, ran("struck", close, STRUCK, **LOST, **free))
    assert verdict.outcome == "held" and verdict.in_words.endswith("losses 2e-06 apart, 1e-05 being rounding")


def apart(by):
    """Steps 4 to 6, the losses by so much apart from the undisturbed ones, relatively."""
    return [line | {"loss": line["loss"] * (1 + by)} for line in STEPS[3:5]] + [step(6, state_hash="cd" * 8)]


@pytest.mark.parametrize(
    ("params", "by", "held"),
    [("fp32", 9e-6, True), ("fp32", 2e-5, False), ("bf16", 9e-3, True), ("bf16", 2e-2, False), ("fp16", 9e-3, True)],
)
def test_another_microbatch_keeps_the_curve_to_rounding(ran, params, by, held):
    calm = ran("calm", precision={"params": params})
    verdict = judge_resumed(calm, ran("micro", apart(by), batch={"micro": 1}, precision={"params": params}))
    assert (verdict.outcome == "held") is held
    if held:
        assert verdict.in_words.startswith(f"went on after step 3; losses {by:.1g} apart, ")
    else:
        assert "; rounding explains " in told(verdict)


def test_norms_may_be_ten_times_as_far_apart(ran, calm):
    lines = [line | {"grad_norm": line["grad_norm"] * (1 + 9e-5)} for line in STEPS[3:]]
    assert judge_resumed(calm, ran("micro", lines, batch={"micro": 1})).outcome == "held"
    lines = [line | {"grad_norm": line["grad_norm"] * (1 + 2e-4)} for line in STEPS[3:]]
    assert "grad_norm in step 4" in told(judge_resumed(calm, ran("more", lines, batch={"micro": 1})))


def test_a_skipped_step_is_the_same_in_both_or_a_difference(ran):
    lines = [*STEPS[:3], step(4, grad_norm=None), *STEPS[4:]]
    calm = ran("calm", lines)
    assert judge_resumed(calm, ran("micro", lines[3:], batch={"micro": 1})).outcome == "held"
    assert "grad_norm in step 4" in told(judge_resumed(calm, ran("other", STEPS[3:], batch={"micro": 1})))


@pytest.mark.parametrize(
    ("layout", "lines", "words"),
    [
        ({"dp": 1}, STEPS[3:], "went on after step 3; the same bits"),
        ({"dp": 4}, apart(2e-6), "went on after step 3; losses 2e-06 apart, 1e-05 being rounding"),  # beyond the shares
    ],
)
def test_another_width_keeps_the_bits_as_far_as_the_virtual_ranks_go(ran, calm, layout, lines, words):
    verdict = judge_resumed(calm, ran("dp", lines, layout=layout))
    assert (verdict.outcome, verdict.in_words) == ("held", words)


def test_another_width_within_the_virtual_ranks_may_not_change_a_bit(ran, calm):
    assert "loss in step 4" in told(judge_resumed(calm, ran("dp", apart(1e-9), layout={"dp": 1})))


def test_a_resumed_run_must_have_gone_on(ran, calm):
    message = told(judge_resumed(calm, ran("dp", layout={"dp": 1})))
    assert message.startswith("about=dp: its first step was 1, so it did not go on from the checkpoint of step 3; ")
    message = told(judge_resumed(calm, ran("more", [], status=2, layout={"dp": 1})))
    assert message.startswith("about=more: the run that was to go on from step 3 ended with status 2; ")


@pytest.mark.parametrize(
    ("dp", "journal", "printed", "why"),
    [
        (4, [{"kind": "placement_failed", "missing": "2 of 4 bundles are out"}], [], "2 of 4 bundles are out"),
        (4, [], ["x", "error: cluster.device=cuda, world=4: no; use"], "cluster.device=cuda, world=4: no; use"),
        (4, [], ["error: batch.global=3: no"], None),
        (1, [{"kind": "placement_failed", "missing": "all"}], ["error: cluster.device=cuda, world=1: no"], None),
    ],
)  # fmt: skip
def test_only_more_cells_than_the_job_has_may_find_no_devices(ran, calm, dp, journal, printed, why):
    run = ran("dp", [], journal, status=1, layout={"dp": dp})
    assert no_devices(calm, run, printed) == why


@pytest.mark.parametrize(("kind", "asked"), [("stop_asked", True), ("no_room", False)])
def test_a_stop_that_was_asked_for_is_in_the_journal(ran, kind, asked):
    assert was_asked_to_stop(ran("x", journal=[{"kind": kind}]).files) is asked
