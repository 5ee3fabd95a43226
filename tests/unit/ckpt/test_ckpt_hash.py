"""The state hash: the documented sum, the same for every way to cut the state."""

import struct
import sys

import numpy as np
import pytest
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rayformer.ckpt.hash import box_hash, shown
from rayformer.shards import Box, whole

M = 2**64 - 1


def recomputed(tensor, array):
    """The definition with Python's integers, one element after the other."""

    def mix(z):
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & M
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB & M
        return z ^ (z >> 31)

    key = xxhash.xxh3_64_intdigest(tensor.encode())
    bits = [struct.unpack("<I", struct.pack("<f", value))[0] for value in array.reshape(-1).tolist()]
    return sum(mix(mix(key ^ i) ^ u) for i, u in enumerate(bits)) & M


@pytest.fixture(params=["numpy", "compiled"], autouse=True)
def loop(request, monkeypatch):
    """Either of the two loops that compute it, whatever the size."""
    monkeypatch.setattr("rayformer.ckpt.hash._MANY", {"numpy": 2**60, "compiled": 1}[request.param])
    monkeypatch.delitem(sys.modules, "rayformer.ckpt.compiled", raising=False)


def values(shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("shape", [(), (1,), (7,), (3, 5), (2, 3, 4), (0, 3)])
def test_hash_is_the_documented_sum(shape):
    array = np.asarray(values(shape))
    assert box_hash("layers.0.w@master", whole(shape), shape, array) == recomputed("layers.0.w@master", array)


def test_hash_of_many_elements_is_that_of_their_chunks():
    """More than are hashed at a time."""
    array = np.zeros((3, 400_000), np.float32)
    rows = [box_hash("w", Box(lo=(r, 0), hi=(r + 1, 400_000)), array.shape, array[r : r + 1]) for r in range(3)]
    assert box_hash("w", whole(array.shape), array.shape, array) == sum(rows) % 2**64


def partition(box, data):
    """``box`` cut at random places."""
    dims = [d for d, n in enumerate(box.shape) if n > 1]
    if not dims or data.draw(st.integers(0, 2)) == 0:
        return [box]
    d = data.draw(st.sampled_from(dims))
    at = data.draw(st.integers(box.lo[d] + 1, box.hi[d] - 1))
    low = Box(lo=box.lo, hi=(*box.hi[:d], at, *box.hi[d + 1 :]))
    high = Box(lo=(*box.lo[:d], at, *box.lo[d + 1 :]), hi=box.hi)
    return partition(low, data) + partition(high, data)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_hashes_of_any_partition_add_up_to_that_of_the_whole(data):
    shape = data.draw(st.sampled_from([(20,), (6, 7), (3, 4, 5)]))
    array = values(shape)
    boxes = partition(whole(shape), data)
    parts = [box_hash("w@exp_avg", box, shape, array[box.slices(whole(shape))]) for box in boxes]
    assert sum(parts) % 2**64 == box_hash("w@exp_avg", whole(shape), shape, array)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 11), st.integers(0, 31))
def test_one_flipped_bit_changes_it(element, bit):
    array = values((3, 4))
    flipped = array.copy()
    flipped.reshape(-1).view(np.uint32)[element] ^= np.uint32(1 << bit)
    assert box_hash("w", whole((3, 4)), (3, 4), flipped) != box_hash("w", whole((3, 4)), (3, 4), array)


def test_name_place_and_order_count():
    array = values((4,))
    base = box_hash("a@master", whole((4,)), (4,), array)
    assert box_hash("b@master", whole((4,)), (4,), array) != base
    assert box_hash("a@exp_avg", whole((4,)), (4,), array) != base
    assert box_hash("a@master", whole((4,)), (4,), array[::-1]) != base
    assert box_hash("a@master", Box(lo=(4,), hi=(8,)), (8,), array) != base


def test_zero_and_minus_zero_are_different_states():
    zeros = np.zeros(1, np.float32)
    assert box_hash("w", whole((1,)), (1,), zeros) != box_hash("w", whole((1,)), (1,), -zeros)


def test_values_that_do_not_fill_the_box_are_refused():
    with pytest.raises(AssertionError, match="values for"):
        box_hash("w", whole((4,)), (4,), np.zeros(1, np.float32))


def test_it_is_printed_as_16_hex_digits():
    assert [shown(n) for n in (0, 255, 2**64 + 1)] == ["0000000000000000", "00000000000000ff", "0000000000000001"]
