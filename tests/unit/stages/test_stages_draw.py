import doctest

from rayformer.stages import draw as module
from rayformer.stages.check import Costs, check
from rayformer.stages.draw import draw
from rayformer.stages.instructions import Backward, Forward
from rayformer.stages.lowering import lower
from rayformer.stages.schedules import get_schedule


def drawing(name, pp, microbatches, costs):
    return draw(check(lower(get_schedule(name)(pp, 1, microbatches)), costs=costs, rendezvous=False))


def test_the_example_in_the_docstring_holds():
    result = doctest.testmod(module)
    assert result.attempted and not result.failed


def test_the_unit_of_the_costs_does_not_matter():
    assert drawing("1f1b", 4, 8, Costs(forward=0.003, backward=0.006)) == drawing("1f1b", 4, 8, Costs())


def test_chunks_and_long_numbers_stay_in_their_columns():
    order = [Forward(10), Forward(10, 1), Backward(10, 1), Backward(10)]
    report = check(lower([order, order]), costs=Costs(forward=1, backward=1), rendezvous=False)
    assert draw(report).splitlines() == [
        "pp0 F10   .     F10c1 .     .     B10c1 .     B10",
        "pp1 .     F10   .     F10c1 B10c1 .     B10   .",
    ]


def test_a_cost_between_two_columns_hides_nothing():
    rows = drawing("1f1b", 3, 4, Costs(forward=1.0, backward=1.5)).splitlines()
    assert [row.replace("-", " ").replace(".", " ").split() for row in rows] == [
        ["pp0", "F0", "F1", "F2", "B0", "F3", "B1", "B2", "B3"],
        ["pp1", "F0", "F1", "B0", "F2", "B1", "F3", "B2", "B3"],
        ["pp2", "F0", "B0", "F1", "B1", "F2", "B2", "F3", "B3"],
    ]
