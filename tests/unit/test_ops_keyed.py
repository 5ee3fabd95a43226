"""Keyed randomness: the golden draws, and that a box's draws do not depend on the box."""

import json
from math import prod
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rayformer.ops.keyed import BLOCK, normal_box, normal_range
from rayformer.shards import Box, whole

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "keyed_normal.json").read_text())


@pytest.mark.parametrize("case", GOLDEN["ranges"], ids=lambda case: f"{case['name']}-{case['seed']}-{case['start']}")
def test_draws_are_the_golden_ones(case):
    """A changed value here changes the initial weights of every run."""
    values = normal_range(case["start"], case["stop"], seed=case["seed"], name=case["name"])
    assert values.dtype == np.float32
    assert values.view(np.uint32).tolist() == [int(bits, 16) for bits in case["bits"]]


@st.composite
def boxes(draw):
    shape = draw(st.sampled_from([(3000,), (50, 60), (2, 40, 30), (5, 1)]))
    corners = [sorted(draw(st.lists(st.integers(0, n), min_size=2, max_size=2, unique=True))) for n in shape]
    return shape, Box(lo=tuple(lo for lo, _ in corners), hi=tuple(hi for _, hi in corners))


@settings(max_examples=40)
@given(boxes())
def test_a_box_is_the_slice_of_the_whole(drawn):
    shape, box = drawn
    all_of_it = normal_box(whole(shape), shape, seed=7, name="w")
    assert all_of_it.shape == shape
    assert np.array_equal(normal_box(box, shape, seed=7, name="w"), all_of_it[box.slices(whole(shape))])


def test_draws_follow_the_row_major_index_whatever_the_shape():
    flat = normal_range(0, 3000, seed=7, name="w")
    for shape in ((3000,), (50, 60), (2, 50, 30)):
        assert np.array_equal(normal_box(whole(shape), shape, seed=7, name="w").reshape(-1), flat[: prod(shape)])


def test_draws_are_standard_normal():
    values = normal_range(0, 200 * BLOCK, seed=1234, name="w").astype(np.float64)
    n = values.size
    assert abs(values.mean()) < 4 / n**0.5
    assert abs(values.var() - 1) < 4 * (2 / n) ** 0.5
    assert abs((values**4).mean() - 3) < 4 * (96 / n) ** 0.5
    assert 3.8 < abs(values).max() < 6.5
    assert abs(np.corrcoef(values[:-1], values[1:])[0, 1]) < 4 / n**0.5


def test_names_seeds_and_blocks_draw_apart():
    draws = {
        (seed, name, block): tuple(normal_range(block * BLOCK, block * BLOCK + 8, seed=seed, name=name).tolist())
        for seed in (0, 1, 2**63 - 1)
        for name in ("layers.0.w", "layers.1.w", "")
        for block in (0, 1, 2**32, 2**40)
    }
    assert len(set(draws.values())) == len(draws)


def test_neighbouring_blocks_are_not_shifted_copies_of_each_other():
    values = normal_range(0, 3 * BLOCK, seed=0, name="w")
    assert np.unique(values).size > 3 * BLOCK - 4
