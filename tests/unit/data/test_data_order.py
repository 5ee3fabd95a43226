"""The sample order: a permutation an epoch, keyed by seed and epoch, and final."""

import json
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rayformer.data.order import sample_at

GOLDEN = json.loads((Path(__file__).parents[2] / "golden" / "sample_order.json").read_text())
G, M = 0x9E3779B97F4A7C15, 2**64


def order(num_samples: int, *, seed: int = 1234, epoch: int = 0) -> list[int]:
    first = epoch * num_samples
    return [sample_at(n, num_samples=num_samples, seed=seed) for n in range(first, first + num_samples)]


def mix(z: int) -> int:
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % M
    z = (z ^ z >> 27) * 0x94D049BB133111EB % M
    return z ^ z >> 31


def position_of(sample: int, *, num_samples: int, seed: int, epoch: int) -> int:
    """The inverse of sample_at within an epoch, written from its docstring."""
    state = mix(mix((seed + G) % M) ^ epoch)
    h = next(h for h in range(1, 33) if 4**h >= num_samples)
    x = sample
    while True:
        left, right = divmod(x, 2**h)
        for r in reversed(range(8)):
            left, right = right ^ (mix(mix((state + (r + 1) * G) % M) ^ left) % 2**h), left
        x = left * 2**h + right
        if x < num_samples:
            return x


@pytest.mark.parametrize("case", GOLDEN["cases"], ids=lambda case: f"{case['num_samples']}-{case['seed']}")
def test_order_is_the_recorded_one(case):
    samples = [
        sample_at(case["first"] + i, num_samples=case["num_samples"], seed=case["seed"])
        for i in range(len(case["samples"]))
    ]
    assert samples == case["samples"]


def test_every_epoch_reads_every_sample_once():
    for num_samples in range(1, 201):
        for epoch in (0, 1, 1000):
            assert sorted(order(num_samples, epoch=epoch)) == list(range(num_samples))
    assert sorted(order(20011)) == list(range(20011))


@settings(deadline=None)
@given(
    num_samples=st.one_of(st.integers(1, 300), st.integers(1, 2**62)),
    seed=st.integers(-(2**63), 2**64 - 1),
    epoch=st.integers(0, 2**20),
    data=st.data(),
)
def test_inverse_of_the_documented_algorithm_returns_the_position(num_samples, seed, epoch, data):
    position = data.draw(st.integers(0, num_samples - 1))
    sample = sample_at(epoch * num_samples + position, num_samples=num_samples, seed=seed)
    assert 0 <= sample < num_samples
    assert position_of(sample, num_samples=num_samples, seed=seed, epoch=epoch) == position


def test_epochs_and_seeds_have_orders_of_their_own():
    orders = [tuple(order(64, seed=seed, epoch=epoch)) for seed in range(-4, 8) for epoch in range(8)]
    assert len(set(orders)) == len(orders)


@pytest.mark.parametrize("num_samples", [999, 1024, 4097])
def test_order_has_no_trend_and_neighbours_are_not_kept(num_samples):
    samples = order(num_samples)
    variance = (num_samples**2 - 1) / 12
    mean = (num_samples - 1) / 2

    def correlation(pairs):
        return sum((a - mean) * (b - mean) for a, b in pairs) / (num_samples * variance)

    noise = 4 / num_samples**0.5
    assert abs(correlation(enumerate(samples))) < noise
    assert abs(correlation(pairwise(samples))) < noise
    assert abs(correlation(zip(samples, order(num_samples, epoch=1)))) < noise
    displacement = sum(abs(i - sample) for i, sample in enumerate(samples)) / num_samples
    assert displacement == pytest.approx(num_samples / 3, rel=0.1)


def test_every_sample_is_equally_likely_at_every_position():
    num_samples, num_epochs = 12, 3000
    counts = [[0] * num_samples for _ in range(num_samples)]
    for epoch in range(num_epochs):
        for position, sample in enumerate(order(num_samples, epoch=epoch)):
            counts[position][sample] += 1
    expected = num_epochs / num_samples
    chi2 = sum((count - expected) ** 2 / expected for row in counts for count in row)
    freedom = (num_samples - 1) ** 2
    assert abs(chi2 - freedom) < 5 * (2 * freedom) ** 0.5
