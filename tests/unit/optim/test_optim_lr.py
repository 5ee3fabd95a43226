"""The learning rate and the weight decay: golden values, and their ends."""

import doctest
import math

import pytest

from rayformer.config.optim import OptimConfig
from rayformer.optim import lr as module
from rayformer.optim.lr import learning_rate, weight_decay

NUMBERS = (0, 5, 10, 35, 60, 90, 95, 100, 110, 111)
WSD = {"decay": "wsd", "wsd_steps": 20}


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ({"decay": "constant"}, (0, 5e-4, 1e-3, *[1e-3] * 7)),
        ({"decay": "linear"}, (0, 5e-4, 1e-3, 7.75e-4, 5.5e-4, 2.8e-4, 2.35e-4, 1.9e-4, 1e-4, 1e-4)),
        (
            {"decay": "cosine"},
            (0, 5e-4, 1e-3, 8.68198e-4, 5.5e-4, 1.85942e-4, 1.49047e-4, 1.22025e-4, 1e-4, 1e-4),
        ),
        (
            {"decay": "inverse_sqrt"},
            (0, 5e-4, 1e-3, 5.34522e-4, 4.08248e-4, 3.33333e-4, 3.24443e-4, 3.16228e-4, 3.01511e-4, 1e-4),
        ),
        (WSD, (0, 5e-4, *[1e-3] * 4, 7.75e-4, 5.5e-4, 1e-4, 1e-4)),
        ({**WSD, "wsd_decay": "linear"}, (0, 5e-4, *[1e-3] * 4, 7.75e-4, 5.5e-4, 1e-4, 1e-4)),
        ({**WSD, "wsd_decay": "cosine"}, (0, 5e-4, *[1e-3] * 4, 8.68198e-4, 5.5e-4, 1e-4, 1e-4)),
        ({**WSD, "wsd_decay": "exponential"}, (0, 5e-4, *[1e-3] * 4, 7.13614e-4, 4.72792e-4, 1e-4, 1e-4)),
        ({**WSD, "wsd_decay": "minus_sqrt"}, (0, 5e-4, *[1e-3] * 4, 5.5e-4, 3.63604e-4, 1e-4, 1e-4)),
    ],
)
def test_rates_are_megatrons(shape, expected):
    section = OptimConfig(lr=1e-3, min_lr=1e-4, warmup_steps=10, decay_steps=110, **shape)
    assert [learning_rate(n, section) for n in NUMBERS] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("style", "expected"),
    [
        ("constant", (0.1,) * 6),
        ("linear", (0.1, 0.15, 0.2, 0.25, 0.3, 0.3)),
        ("cosine", (0.1, 0.2 - 0.1 * math.sqrt(0.5), 0.2, 0.2 + 0.1 * math.sqrt(0.5), 0.3, 0.3)),
    ],
)
def test_weight_decays_are_megatrons(style, expected):
    section = OptimConfig(weight_decay=0.1, weight_decay_end=0.3, weight_decay_style=style, decay_steps=100)
    assert [weight_decay(n, section) for n in (0, 25, 50, 75, 100, 101)] == pytest.approx(expected, rel=1e-12)


def test_the_example_in_the_docstring_holds():
    result = doctest.testmod(module)
    assert result.attempted and not result.failed


@pytest.mark.parametrize("style", ["constant", "linear", "cosine"])
def test_without_an_end_the_weight_decay_is_the_same_for_ever_and_needs_no_length(style):
    section = OptimConfig(weight_decay=0.07, weight_decay_style=style)
    assert {weight_decay(n, section) for n in (0, 1, 10**9)} == {0.07}


@pytest.mark.parametrize("style", ["linear", "cosine"])
@pytest.mark.parametrize(("start", "end"), [(0.033, 0.1), (0.1, 0.033), (0.0, 0.3)])
def test_the_weight_decay_starts_and_ends_exactly_and_goes_one_way(style, start, end):
    section = OptimConfig(weight_decay=start, weight_decay_end=end, weight_decay_style=style, decay_steps=17)
    values = [weight_decay(n, section) for n in range(20)]
    assert (values[0], values[17:]) == (start, [end] * 3)
    assert values == sorted(values, reverse=end < start)


SHAPES = [
    {"decay": "linear"},
    {"decay": "cosine"},
    {"decay": "inverse_sqrt"},
    *({"decay": "wsd", "wsd_steps": 50, "wsd_decay": how} for how in ("linear", "cosine", "exponential", "minus_sqrt")),
]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("init_lr", [0.0, 1e-5])
@pytest.mark.parametrize("warmup", [1, 3, 250])
def test_every_shape_rises_to_exactly_the_peak_and_falls_to_exactly_the_minimum(shape, init_lr, warmup):
    section = OptimConfig(lr=3e-4, min_lr=7e-5, init_lr=init_lr, warmup_steps=warmup, decay_steps=300, **shape)
    rates = [learning_rate(n, section) for n in range(303)]
    assert (rates[0], max(rates), rates[warmup], rates[301:]) == (init_lr, 3e-4, 3e-4, [7e-5] * 2)
    assert rates[300] == 7e-5 or shape["decay"] == "inverse_sqrt"
    assert rates[: warmup + 1] == sorted(rates[: warmup + 1])
    assert rates[warmup:] == sorted(rates[warmup:], reverse=True)


@pytest.mark.parametrize("shape", [{"decay": "constant"}, *SHAPES])
def test_without_a_warmup_the_rate_starts_at_the_peak(shape):
    assert learning_rate(0, OptimConfig(lr=3e-4, min_lr=7e-5, decay_steps=300, **shape)) == 3e-4


def test_wsd_keeps_exactly_the_peak_until_its_final_decay():
    section = OptimConfig(lr=0.1, min_lr=0.03, warmup_steps=4, decay_steps=30, decay="wsd", wsd_steps=10)
    assert {learning_rate(n, section) for n in range(4, 21)} == {0.1}
    assert learning_rate(21, section) == pytest.approx(0.093)


def test_inverse_sqrt_does_not_fall_below_the_minimum():
    section = OptimConfig(lr=1.0, min_lr=0.5, warmup_steps=1, decay="inverse_sqrt", decay_steps=100)
    assert [learning_rate(n, section) for n in (3, 4, 5, 100)] == [pytest.approx(3**-0.5), 0.5, 0.5, 0.5]


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
