"""The gradient norm: the same bits for every cut at blocks, and a norm."""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rayformer.optim.norm import RangeSums, block_sums, tree_sum


def gradients(num_blocks, seed=0):
    """Values over many magnitudes, so that any other order of additions shows."""
    rng = np.random.default_rng(seed)
    values = rng.standard_normal(num_blocks * 1024) * 10.0 ** rng.uniform(-6, 3, num_blocks * 1024)
    return torch.from_numpy(values.astype(np.float32))


@settings(max_examples=40)
@given(st.integers(1, 12), st.sets(st.integers(1, 11)), st.integers(0, 9))
def test_any_cut_at_blocks_gives_the_same_bits(num_blocks, cuts, seed):
    flat = gradients(num_blocks, seed)
    bounds = [0, *sorted(cut for cut in cuts if cut < num_blocks), num_blocks]
    shards = [flat[lo * 1024 : hi * 1024].clone() for lo, hi in pairwise(bounds)]
    assert torch.equal(torch.cat([block_sums(shard) for shard in shards]), block_sums(flat))


def test_blocks_fold_by_halving():
    """Against the same additions in numpy."""
    flat = torch.from_numpy(np.random.default_rng(0).standard_normal(20 * 1024).astype(np.float32))
    for block, found in zip(flat.numpy().reshape(20, 1024), block_sums(flat)):
        squares = block * block
        while squares.size > 1:
            half = squares.size // 2
            squares = squares[:half] + squares[half:]
        assert found.item() == squares[0]


@pytest.mark.parametrize("n", [*range(1, 10), 31, 33])
def test_tree_adds_neighbours_and_carries_an_odd_last_one(n):
    values = gradients(1)[:n]
    expected = list(values.numpy())
    while len(expected) > 1:
        pairs = [np.float32(a + b) for a, b in zip(expected[::2], expected[1::2])]
        expected = pairs + expected[len(pairs) * 2 :]
    assert tree_sum(values).item() == expected[0]
    assert tree_sum(values).shape == ()


def test_the_sum_of_nothing_is_zero():
    assert tree_sum(torch.empty(0)).item() == 0.0


def test_it_is_the_norm_and_padding_does_not_change_it():
    flat = gradients(5)
    padded = torch.cat([flat, torch.zeros(3 * 1024)])
    norm = math.sqrt(tree_sum(block_sums(flat)))
    assert norm == pytest.approx(torch.linalg.norm(flat.double()).item(), rel=1e-6)
    assert math.sqrt(tree_sum(block_sums(padded))) == pytest.approx(norm, rel=1e-6)


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_a_value_that_is_not_finite_shows_in_its_block(value):
    flat = gradients(3)
    flat[1500] = value
    assert block_sums(flat).isfinite().tolist() == [True, False, True]
    assert not tree_sum(block_sums(flat)).isfinite()


def test_a_part_of_a_block_is_refused():
    with pytest.raises(RuntimeError):
        block_sums(torch.zeros(1500))


def test_ranges_sum_as_one_by_one():
    values = torch.rand(1000, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    values[17] = math.inf
    ranges = [(3, 4), (0, 3), (4, 17), (17, 18), (18, 900), (900, 903), (903, 1000), (5, 5)]
    sums = RangeSums(ranges, values.device)(values)
    assert sums.tolist() == [tree_sum(values[start:stop]).item() for start, stop in ranges]


def test_no_ranges_have_no_sums():
    assert RangeSums([], torch.device("cpu"))(torch.rand(3)).shape == (0,)
