"""The learning rate: golden values, and its ends."""

import pytest

from rayformer.config.optim import OptimConfig
from rayformer.optim.lr import learning_rate

NUMBERS = (0, 5, 10, 35, 60, 90, 95, 100, 110, 111)


@pytest.mark.parametrize(
    ("decay", "expected"),
    [
        ("cosine", (0, 5e-4, 1e-3, 8.68198e-4, 5.5e-4, 1.85942e-4, 1.49047e-4, 1.22025e-4, 1e-4, 1e-4)),
        ("constant", (0, 5e-4, 1e-3, *[1e-3] * 7)),
    ],
)
def test_rates_are_megatrons(decay, expected):
    section = OptimConfig(lr=1e-3, min_lr=1e-4, warmup_steps=10, decay=decay, decay_steps=110)
    assert [learning_rate(n, section) for n in NUMBERS] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("lr", [0.1, 3e-4, 1e-3])
@pytest.mark.parametrize("warmup", [1, 3, 10, 49, 200])
def test_warmup_ends_at_exactly_the_peak(lr, warmup):
    section = OptimConfig(lr=lr, warmup_steps=warmup, decay_steps=300)
    rates = [learning_rate(n, section) for n in range(1, 302)]
    assert max(rates) == rates[warmup - 1] == lr
    assert rates[: warmup - 1] == sorted(rates[: warmup - 1])
    assert rates[warmup:] == sorted(rates[warmup:], reverse=True)


def test_without_warmup_the_first_update_is_already_in_the_decay():
    section = OptimConfig(lr=1.0, min_lr=0.0, decay_steps=2)
    assert [learning_rate(n, section) for n in (1, 2, 3)] == [pytest.approx(0.5), 0.0, 0.0]


def test_decay_ends_at_exactly_the_minimum_and_keeps_it():
    section = OptimConfig(lr=3e-4, min_lr=7e-5, warmup_steps=3, decay_steps=17)
    assert [learning_rate(n, section) for n in (17, 18, 1000)] == [7e-5] * 3


def test_a_warmup_as_long_as_the_decay_goes_straight_to_the_minimum():
    section = OptimConfig(lr=1e-3, min_lr=1e-4, warmup_steps=4, decay_steps=4)
    assert [learning_rate(n, section) for n in (4, 5)] == [1e-3, 1e-4]


def test_an_unresolved_decay_has_no_rate():
    with pytest.raises(AssertionError, match="not resolved"):
        learning_rate(5, OptimConfig())
