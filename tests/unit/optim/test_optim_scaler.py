"""The loss scale of fp16: the golden sequence, and formats that have none."""

import json
from dataclasses import asdict

import pytest

from rayformer.config.optim import PrecisionConfig
from rayformer.optim.scaler import SMALLEST, LossScale


def scales_after(overflows, **options):
    """The scale after each step of a run."""
    section = PrecisionConfig(**options)
    scale, found = LossScale.initial(section), []
    for overflow in overflows:
        scale = scale.after(section, overflow=bool(overflow))
        found.append(scale.scale)
    return found


GOLDEN = {"params": "fp16", "initial_scale": 16.0, "scale_interval": 3, "scale_hysteresis": 2}
FLAGS = (0, 1, 1, 0, 1, 0, 0, 0, 1, 0, 1, 1, 1, 1, 1, 1)
SCALES = [16, 16, 8, 8, 4, 4, 4, 8, 8, 8, 4, 2, 1, 1, 1, 1]


def test_scales_are_megatrons():
    assert scales_after(FLAGS, **GOLDEN) == SCALES


@pytest.mark.parametrize("at", range(len(FLAGS) + 1))
def test_a_scale_written_as_json_goes_on_as_if_it_had_not_been(at):
    section, scale = PrecisionConfig(**GOLDEN), LossScale.initial(PrecisionConfig(**GOLDEN))
    found = []
    for i, flag in enumerate(FLAGS):
        if i == at:
            scale = LossScale(**json.loads(json.dumps(asdict(scale))))
        scale = scale.after(section, overflow=bool(flag))
        found.append(scale.scale)
    assert found == SCALES


@pytest.mark.parametrize(
    ("hysteresis", "expected"), [(1, [8, 4, 2, 1]), (2, [16, 8, 4, 2]), (3, [16, 16, 8, 4]), (9, [16] * 4)]
)
def test_overflows_are_borne_before_the_scale_falls_at_each(hysteresis, expected):
    assert scales_after([1] * 4, **{**GOLDEN, "scale_hysteresis": hysteresis}) == expected


def test_finite_steps_give_no_patience_back_but_a_rise_does():
    apart = [1, 0, 0, 1, 0, 0, 1]  # never three finite ones in a row
    assert scales_after(apart, **GOLDEN) == [16, 16, 16, 8, 8, 8, 4]
    assert scales_after([1, 0, 0, 0, 1, 1], **GOLDEN) == [16, 16, 16, 32, 32, 16]


@pytest.mark.parametrize("interval", [1, 2, 5])
def test_an_overflow_starts_the_count_of_finite_steps_anew(interval):
    options = {**GOLDEN, "scale_interval": interval, "scale_hysteresis": 99}
    almost = [0] * (interval - 1)
    assert scales_after([*almost, 1, *almost, 1, *almost, 0], **options) == [16] * (3 * interval - 1) + [32]


def test_the_scale_does_not_fall_below_the_smallest():
    assert scales_after([1] * 40, **GOLDEN)[-1] == SMALLEST == 1.0


def test_a_constant_scale_stays():
    assert set(scales_after(FLAGS, params="fp16", loss_scale=128.0, scale_interval=3)) == {128.0}


@pytest.mark.parametrize("params", ["fp32", "bf16"])
def test_other_formats_have_the_scale_1_for_ever(params):
    section = PrecisionConfig(params=params, scale_interval=1, scale_hysteresis=1)
    scale = LossScale.initial(section)
    assert scale.scale == 1.0
    assert all(scale.after(section, overflow=overflow) == scale for overflow in (True, False))


def test_the_defaults_start_high_and_rise_after_a_thousand_finite_steps():
    scales = scales_after([0] * 1000, params="fp16")
    assert (scales[0], scales[998], scales[999]) == (65536.0, 65536.0, 131072.0)
