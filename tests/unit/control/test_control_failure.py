"""What a failed run says."""

from rayformer.control.failure import explain, first_cause
from rayformer.events import CellError


def error(cell, kind, message):
    number = int(cell[2:])
    return CellError(cell=cell, worker=f"worker-{number:04d}", kind=kind, message=message)


LOST = "CollectiveError: connection closed by peer"


def test_the_cause_comes_first_with_its_cell_and_worker_and_the_rest_in_one_line():
    errors = [
        error("pp0", "collateral", LOST),
        error("pp1", "died", "its process died: exit code 137"),
        error("pp2", "collateral", f"{LOST} [127.0.0.1]:4711"),
    ]
    assert explain(errors).splitlines() == [
        "cell pp1 (worker-0001): its process died: exit code 137",
        "  cells that only lost their connection to it: pp0, pp2",
    ]


def test_identical_errors_are_told_once_with_the_names_of_all_cells():
    errors = [error(f"pp{i}", "raised", "ValueError: token 300") for i in range(4)]
    assert explain(errors).splitlines() == [
        "cell pp0 (worker-0000): ValueError: token 300",
        "  the same in 3 more: pp1, pp2, pp3",
    ]


def test_different_errors_are_told_one_by_one_in_the_order_of_arrival_after_the_death():
    errors = [
        error("pp0", "raised", "ValueError: a"),
        error("pp1", "raised", "KeyError: b"),
        error("pp2", "died", "its process died"),
    ]
    assert explain(errors).splitlines() == [
        "cell pp2 (worker-0002): its process died",
        "  then cell pp0 (worker-0000): ValueError: a",
        "  then cell pp1 (worker-0001): KeyError: b",
    ]


def test_among_equals_the_first_to_arrive_is_the_cause():
    errors = [error("pp3", "raised", "later name"), error("pp0", "raised", "earlier name")]
    assert first_cause(errors) is errors[0]


def test_an_error_of_the_run_as_a_whole_names_no_cell():
    whole = CellError(cell="", worker="", kind="raised", message="2 of 4 bundles found no node")
    assert explain([whole]) == "2 of 4 bundles found no node"


def test_an_error_of_the_run_as_a_whole_comes_after_the_death_that_led_to_it():
    whole = CellError(cell="", worker="", kind="raised", message="OSError: disk full")
    first, then = explain([whole, error("pp1", "died", "its process died")]).splitlines()
    assert first == "cell pp1 (worker-0001): its process died"
    assert then == "  then the controller: OSError: disk full"


def test_a_cell_that_says_nothing_comes_before_those_that_lost_their_connection():
    silent = CellError(cell="pp1", worker="", kind="silent", message="it did not answer")
    assert explain([error("pp0", "collateral", LOST), silent]).splitlines() == [
        "cell pp1: it did not answer",
        "  cells that only lost their connection to it: pp0",
    ]
