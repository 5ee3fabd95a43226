"""How many failures a run bears, and how long it pauses before it tries again."""

import pytest

from rayformer.control.policy import UNLIMITED, Budget, cause_of
from rayformer.events import CellError


def error(kind, message="it happened"):
    return CellError(cell="pp0", worker="w", kind=kind, message=message)


def after(budget, *failures):
    for kind, step in failures:
        budget = budget.after(error(kind), step=step)
    return budget


def test_as_many_failures_as_allowed_are_borne_and_one_more_is_not():
    budget = after(Budget(max_failures=2), ("died", 5), ("died", 5))
    assert not budget.is_exceeded
    assert after(budget, ("died", 5)).is_exceeded


def test_each_cause_has_its_own_budget():
    budget = after(Budget(max_failures=1), ("died", 5), ("raised", 5), ("silent", 5), ("collateral", 5))
    assert budget.used == {"died": 1, "raised it happened": 1, "silent": 1, "collateral": 1}
    assert not budget.is_exceeded


def test_an_exception_counts_by_its_type_whatever_it_says():
    same = [cause_of(error("raised", message)) for message in ("OSError: disk", "OSError: network")]
    assert same == ["raised OSError"] * 2
    assert cause_of(error("raised", "ValueError: disk")) == "raised ValueError"
    assert cause_of(error("died", "its process died: 9")) == cause_of(error("died", "its process died: 11")) == "died"


def test_a_new_step_fills_it_up_and_an_old_one_does_not():
    budget = after(Budget(max_failures=1), ("died", 5))
    assert not after(budget, ("died", 6)).is_exceeded
    assert after(budget, ("died", 3)).is_exceeded
    assert after(budget, ("node", 3), ("died", 4)).is_exceeded  # how far it once came is not forgotten


def test_lost_nodes_are_free_unless_nothing_is_allowed():
    free = after(Budget(max_failures=1), *[("node", 5)] * 20)
    assert free.used == {} and not free.is_exceeded and free.pause_s == 0.0
    assert after(Budget(max_failures=0), ("node", 5)).is_exceeded


def test_the_pause_doubles_from_the_second_failure_on_up_to_half_a_minute():
    budget, pauses = Budget(max_failures=UNLIMITED), []
    for _ in range(8):
        budget = after(budget, ("died", 5))
        pauses.append(budget.pause_s)
    assert pauses == [0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]
    assert after(budget, ("died", 6)).pause_s == 0.0
    assert Budget(max_failures=1).pause_s == 0.0


@pytest.mark.parametrize("many", [10, 5000])
def test_an_unlimited_budget_is_never_exceeded_and_never_pauses_longer(many):
    budget = Budget(max_failures=UNLIMITED, used={"died": many}, reached=5)
    assert not budget.is_exceeded and budget.pause_s == 30.0
