"""The bucket plan: aligned slots and shards, in the order in which backward completes them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayformer.optim.plan import ALIGNMENT, plan_buckets

sizes = st.lists(st.integers(1, 5 * ALIGNMENT), min_size=1, max_size=12)


@given(sizes, st.integers(1, 5), st.integers(1, 8 * ALIGNMENT))
def test_slots_and_shards_are_aligned_and_cover_the_buffer_without_overlap(numels, dp, bucket_elements):
    plan = plan_buckets([(f"p{i}", n) for i, n in enumerate(numels)], dp=dp, bucket_elements=bucket_elements)
    at = 0
    for bucket in plan.buckets:
        assert bucket.start == at
        for slot in bucket.slots:
            assert slot.start % ALIGNMENT == 0
            assert at <= slot.start < slot.stop <= bucket.stop
            at = slot.stop
        at = bucket.start
        for rank in range(dp):
            start, stop = plan.shard(bucket, rank)
            assert start == at
            assert stop % ALIGNMENT == 0
            at = stop
        assert at == bucket.stop
    assert at == plan.numel
    assert [slot.name for slot in plan.slots] == [f"p{i}" for i in reversed(range(len(numels)))]
    assert [slot.numel for slot in plan.slots] == numels[::-1]


@given(sizes, st.integers(1, 5), st.integers(1, 8 * ALIGNMENT))
def test_a_bucket_closes_as_soon_as_it_is_full(numels, dp, bucket_elements):
    plan = plan_buckets([(f"p{i}", n) for i, n in enumerate(numels)], dp=dp, bucket_elements=bucket_elements)
    for bucket in plan.buckets:
        before_last = -(-(bucket.slots[-2].stop - bucket.start) // ALIGNMENT) * ALIGNMENT if bucket.slots[1:] else 0
        assert before_last < bucket_elements
        padding = bucket.stop - bucket.slots[-1].stop
        assert padding < ALIGNMENT * (dp + 1)
    assert all(bucket.stop - bucket.start >= bucket_elements for bucket in plan.buckets[:-1])


def drawn(plan, dp):
    """A bucket a line, in blocks of 1024: a letter for a parameter, a dash for padding, bars between dp shards."""
    lines = []
    for bucket in plan.buckets:
        blocks = ["-"] * ((bucket.stop - bucket.start) // ALIGNMENT)
        for slot in bucket.slots:
            for block in range((slot.start - bucket.start) // ALIGNMENT, -(-(slot.stop - bucket.start) // ALIGNMENT)):
                blocks[block] = slot.name
        width = len(blocks) // dp
        lines.append("|".join("".join(blocks[rank * width : (rank + 1) * width]) for rank in range(dp)))
    return lines


@pytest.mark.parametrize(
    ("dp", "picture"),
    [
        (1, ["ddcc", "baaa", "z"]),
        (2, ["dd|cc", "ba|aa", "z|-"]),
        (3, ["dd|cc|--", "ba|aa|--", "z|-|-"]),
    ],
)
def test_plan_is_the_drawn_one(dp, picture):
    parameters = [("z", 10), ("a", 2049), ("b", 1), ("c", 1025), ("d", 2048)]
    assert drawn(plan_buckets(parameters, dp=dp, bucket_elements=4 * ALIGNMENT), dp) == picture


def test_a_plan_without_parameters_is_empty():
    assert plan_buckets([], dp=2).numel == 0
