import doctest
import importlib
import json
import re
from pathlib import Path

import pytest

from rayformer.errors import ConfigError
from rayformer.stages.check import Costs, ScheduleError, check
from rayformer.stages.draw import draw
from rayformer.stages.instructions import Backward, Forward, InputGrad, WeightGrad
from rayformer.stages.lowering import lower
from rayformer.stages.schedules import SCHEDULES, get_schedule, problems
from rayformer.stages.schedules.forward_only import forward_only
from rayformer.stages.schedules.interleaved import group_size, interleaved
from rayformer.stages.schedules.table import from_table

interleaved_module = importlib.import_module("rayformer.stages.schedules.interleaved")  # the package has its function
table_module = importlib.import_module("rayformer.stages.schedules.table")

PP = range(1, 9)
MICROBATCHES = range(1, 33)
BOTH = pytest.mark.parametrize("name", ["gpipe", "1f1b"])
EACH = pytest.mark.parametrize("name", list(SCHEDULES))
UNIT = Costs(forward=1, backward=2, weight=1)
GOLDEN = json.loads((Path(__file__).parent / "makespans.json").read_text())


def chunks_of(name) -> range:
    wanted = SCHEDULES[name].chunks
    return range(1, 5) if wanted is None else range(wanted, wanted + 1)


def report_of(name, pp, chunks, microbatches, *, costs=UNIT, rendezvous=False):
    schedule = SCHEDULES[name]
    programs = schedule.programs(pp, chunks, microbatches)
    return check(programs, costs=costs, rendezvous=rendezvous, vee=schedule.vee)


def drawing_of(schedule) -> str:
    return "\n".join(line.strip() for line in schedule.orders.__doc__.splitlines() if re.match(r" *pp\d ", line))


@pytest.mark.parametrize(
    ("name", "microbatches", "costs"),
    [
        ("gpipe", 4, UNIT),
        ("1f1b", 8, UNIT),
        ("interleaved", 4, Costs(forward=1, backward=1)),
        ("zb_h1", 8, UNIT),
        ("zbv", 4, UNIT),
    ],
)
def test_the_schedule_runs_as_its_docstring_draws_it(name, microbatches, costs):
    schedule = get_schedule(name)
    report = report_of(name, 4, schedule.chunks or 2, microbatches, costs=costs)
    assert draw(report) == drawing_of(schedule)
    assert [tuple(slot.op for slot in row) for row in report.timeline] == list(
        schedule(4, schedule.chunks or 2, microbatches)
    )
    assert from_table(draw(report)) == schedule(4, schedule.chunks or 2, microbatches)


@pytest.mark.parametrize(
    ("name", "pp", "chunks", "microbatches", "orders"),
    [
        (
            "1f1b",
            4,
            1,
            8,
            """F0 F1 F2 F3 B0 F4 B1 F5 B2 F6 B3 F7 B4 B5 B6 B7
               F0 F1 F2 B0 F3 B1 F4 B2 F5 B3 F6 B4 F7 B5 B6 B7
               F0 F1 B0 F2 B1 F3 B2 F4 B3 F5 B4 F6 B5 F7 B6 B7
               F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 F6 B6 F7 B7""",
        ),
        (
            "interleaved",
            2,
            2,
            4,
            """F0 F1 F0c1 F1c1 F2 B0c1 F3 B1c1 F2c1 B0 F3c1 B1 B2c1 B3c1 B2 B3
               F0 F1 F0c1 B0c1 F1c1 B1c1 F2 B0 F3 B1 F2c1 B2c1 F3c1 B3c1 B2 B3""",
        ),
        (
            "zb_h1",
            4,
            1,
            8,
            """F0 F1 F2 F3 B0 W0 F4 B1 W1 F5 B2 W2 F6 B3 W3 F7 B4 W4 B5 W5 B6 W6 B7 W7
               F0 F1 F2 B0 F3 B1 W0 F4 B2 W1 F5 B3 W2 F6 B4 W3 F7 B5 W4 B6 W5 B7 W6 W7
               F0 F1 B0 F2 B1 F3 B2 W0 F4 B3 W1 F5 B4 W2 F6 B5 W3 F7 B6 W4 B7 W5 W6 W7
               F0 B0 F1 B1 F2 B2 F3 B3 W0 F4 B4 W1 F5 B5 W2 F6 B6 W3 F7 B7 W4 W5 W6 W7""",
        ),
    ],
)
def test_the_known_orders(name, pp, chunks, microbatches, orders):
    assert get_schedule(name)(pp, chunks, microbatches) == from_table(orders)


def test_interleaved_takes_microbatches_in_groups():
    first = interleaved(2, 2, 5, group=3)[0]
    assert " ".join(str(op) for op in first if isinstance(op, Forward)) == "F0 F1 F2 F0c1 F1c1 F2c1 F3 F4 F3c1 F4c1"
    warmups = [next(i for i, op in enumerate(order) if isinstance(op, Backward)) - 1 for order in interleaved(4, 2, 8)]
    assert warmups == [10, 8, 6, 4]
    assert report_of("interleaved", 4, 2, 8).peak_live[0] == 11


@EACH
@pytest.mark.parametrize("pp", PP)
def test_every_size_runs_without_deadlock_as_long_and_in_as_much_memory_as_it_says(name, pp):
    for chunks in chunks_of(name):
        for m in MICROBATCHES:
            report = report_of(name, pp, chunks, m)
            assert report.ideal == 3 * chunks * m
            assert report.makespan - report.ideal == bubble(name, pp, chunks, m), (name, pp, chunks, m)
            assert all(live <= most for live, most in zip(report.peak_live, peaks(name, pp, chunks, m))), (chunks, m)
            report_of(name, pp, chunks, m, rendezvous=True)


def bubble(name, pp, chunks, m) -> float:
    """What is lost where F, B and W take 1, by the closed form where there is one, else as simulated before."""
    closed = {"gpipe": True, "1f1b": True, "zb_h1": m >= pp, "interleaved": m % pp == 0, "zbv": 4 >= pp <= m}
    if not closed[name]:
        return GOLDEN[f"{name} pp {pp} virtual {chunks}"][m - 1]
    return (pp - 1) * {"zb_h1": 1, "zbv": 1}.get(name, 3)


def peaks(name, pp, chunks, m) -> list[int]:
    if name in ("gpipe", "1f1b"):
        return [m if name == "gpipe" else min(pp - rank, m) for rank in range(pp)]
    if name == "interleaved":
        size = group_size(pp, m)
        return [min(2 * (pp - rank - 1) + (chunks - 1) * size + 1, chunks * m) for rank in range(pp)]
    return [min(pp, m) * chunks] * pp


@pytest.mark.parametrize(("f", "b", "w"), [(1, 1.2, 0.8), (1, 1, 1), (2, 3, 1)])
def test_the_bubbles_follow_their_formulas_at_other_costs(f, b, w):
    costs = Costs(forward=f, backward=b + w, weight=w)
    for pp, m in ((2, 4), (4, 8), (4, 16), (8, 32)):
        assert report_of("1f1b", pp, 1, m, costs=costs).idle == pytest.approx([(pp - 1) * (f + b + w)] * pp)
        assert report_of("zb_h1", pp, 1, m, costs=costs).idle[0] == pytest.approx((pp - 1) * (f + b - w))
        report = report_of("interleaved", pp, 2, m, costs=costs)
        assert report.bubble_of_ideal == pytest.approx((pp - 1) / (2 * m))
        assert report.bubble_of_total == pytest.approx(1 - report.ideal / report.makespan)


@pytest.mark.parametrize(("name", "pp", "microbatches", "makespan"), [("1f1b", 4, 8, 33), ("zb_h1", 4, 8, 27)])
def test_the_known_makespans(name, pp, microbatches, makespan):
    assert report_of(name, pp, 1, microbatches).makespan == makespan
    assert report_of("1f1b", 8, 1, 32).makespan == 117
    assert report_of("zb_h1", 8, 1, 32).makespan == 103
    assert report_of("zbv", 4, 2, 8).makespan == 48 + 3
    assert report_of("zbv", 4, 2, 16).makespan == 96 + 3


@BOTH
@pytest.mark.parametrize("pp", PP)
def test_every_rank_does_every_microbatch_once_and_backwards_ascend(name, pp):
    for m in MICROBATCHES:
        for order in get_schedule(name)(pp, 1, m):
            assert [op for op in order if isinstance(op, Forward)] == [Forward(v) for v in range(m)]
            assert [op for op in order if isinstance(op, Backward)] == [Backward(v) for v in range(m)]


@BOTH
@pytest.mark.parametrize("microbatches", [1, 2, 3, 4, 5])
def test_fewer_microbatches_than_stages_is_an_ordinary_job(name, microbatches):
    assert list(problems(name, pp=4, chunks=1, microbatches={microbatches})) == []
    report = check(lower(get_schedule(name)(4, 1, microbatches)), rendezvous=True)
    assert all(len(slots) == 2 * microbatches for slots in report.timeline)


@BOTH
def test_a_single_rank_sends_nothing_and_never_waits(name):
    schedule = get_schedule(name)(1, 1, 5)
    assert lower(schedule) == schedule
    assert check(schedule, rendezvous=True).idle == (0,)


def test_evaluation_only_goes_forward_and_keeps_nothing():
    for pp in PP:
        programs = lower(forward_only(pp, 1, 6))
        report = check(programs, rendezvous=True)
        assert [[slot.op for slot in slots] for slots in report.timeline] == [[Forward(v) for v in range(6)]] * pp
        assert report.peak_live == (1,) * pp
        assert check(programs, rendezvous=False).makespan == 6 + pp - 1


def test_an_unknown_schedule_is_told_the_nearest():
    [problem] = problems("1f1", pp=2, chunks=1, microbatches={4})
    known = "gpipe, 1f1b, interleaved, zb_h1, zbv, table"
    assert str(problem) == f"schedule.name=1f1: the schedules are {known}; did you mean 1f1b?"
    with pytest.raises(ConfigError, match=r"schedule\.name=dapple: .*; use one of these"):
        get_schedule("dapple")


@BOTH
def test_virtual_stages_are_refused(name):
    [problem] = problems(name, pp=2, chunks=2, microbatches={4})
    assert problem.keys == {"layout.virtual_stages": 2, "schedule.name": name}
    assert "use layout.virtual_stages=1" in str(problem)


TABLE = """F0 F1 B0 B1
           F0 B0 F1 B1"""


@pytest.mark.parametrize(
    ("name", "options", "told"),
    [
        ("1f1b", {"group": 4}, ["schedule.group=4, schedule.name=1f1b: group has a meaning for interleaved only"]),
        ("zbv", {"vee": True}, ["use layout.virtual_stages=2", "vee has a meaning for table only"]),
        (
            "interleaved",
            {"group": 3},
            ["no group may be smaller than pp, and none larger than all; use one of 2, 4, or leave"],
        ),
        ("interleaved", {"group": 2}, []),
        ("table", {}, ["schedule.table='': it has a line for no rank"]),
        ("table", {"table": "F0 X0"}, ["the line of pp0 has a word that is none"]),
        (
            "table",
            {"table": "F0 B0"},
            ["it has 1 lines, and there are 2", "it has 1 microbatches, and there are 4 or 6"],
        ),
        ("table", {"table": TABLE.replace("F1 B1", "F1 B2")}, ["3 microbatches"]),
    ],
    ids=str,
)
def test_options_that_do_not_fit_are_refused(name, options, told):
    found = [str(problem) for problem in problems(name, pp=2, chunks=1, microbatches={4, 6}, **options)]
    assert len(found) == len(told) and all(any(text in one for one in found) for text in told), found


def test_a_table_that_can_not_be_executed_is_refused_and_a_good_one_is_a_schedule():
    options = {"pp": 2, "chunks": 1, "microbatches": {2}}
    assert not list(problems("table", table=TABLE, **options))
    assert get_schedule("table", table=TABLE)(2, 1, 2) == get_schedule("1f1b")(2, 1, 2)
    [problem] = problems("table", table=TABLE.replace("F0 B0 F1 B1", "B0 F0 F1 B1"), **options)
    assert "pp1 has B0 without F0" in str(problem) and "mend the table" in str(problem)
    with pytest.raises(ConfigError, match=r"2 microbatches, and there are 3 of a replica"):
        get_schedule("table", table=TABLE).programs(2, 1, 3)


def test_a_table_is_read_as_it_is_written():
    orders = from_table("r0: F0 F1 B0 B1\n\npp1 . F0 B0-- F1 B1--\n")
    assert orders == get_schedule("1f1b")(2, 1, 2)
    assert from_table("F0 F0c1 B0c1 W0c1 B0 W0") == (
        (Forward(0), Forward(0, 1), InputGrad(0, 1), WeightGrad(0, 1), InputGrad(0), WeightGrad(0)),
    )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "it has a line for no rank"),
        ("F0 B0\nF0 X0", "schedule.table=X0: the line of pp1 has a word that is none; write F3, B3 and W3"),
    ],
)
def test_a_table_that_is_none_is_refused(text, said):
    with pytest.raises(ConfigError, match=re.escape(said)):
        from_table(text)


def test_a_table_that_would_go_wrong_is_refused_before_it_runs():
    with pytest.raises(ScheduleError, match="never computed: pp0 at B1"):
        lower(from_table("F0 F1 B0 B1\nF0 B0"))
    with pytest.raises(ScheduleError, match="pp0 has B1 0 times, not once"):
        check(lower(from_table("F0 F1 B0\nF0 F1 B0 B1")), rendezvous=True)


@pytest.mark.parametrize("module", [interleaved_module, table_module])
def test_the_examples_in_the_docstrings_hold(module):
    result = doctest.testmod(module)
    assert result.attempted and not result.failed
