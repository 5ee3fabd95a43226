"""One curve for every layout: to rounding over tp, and bit for bit over dp, pp, schedule, zero and buckets."""

from itertools import pairwise
from math import hypot

import numpy as np
import pytest
from cells import SMALL_BUCKETS, assembled, job_tree, the_same_on_all, train_curve, train_state, world_of

from rayformer.optim.plan import BUCKET_ELEMENTS

TOLERANCE = 1e-5  # relative


def deviation(curve, expected):
    """The largest relative deviation of losses and norms."""
    assert len(curve) == len(expected) > 0
    return max(abs(a - b) / b for pair, want in zip(curve, expected) for a, b in zip(pair, want))


@pytest.mark.parametrize(
    ("layout", "steps"),
    [
        ({"tp": 2}, 20),
        ({"pp": 2}, 20),
        ({"pp": 4}, 20),
        ({"dp": 2}, 20),
        ({"dp": 4}, 20),
        ({"tp": 2, "pp": 2}, 20),
        ({"pp": 2, "dp": 2}, 20),
        ({"tp": 2, "dp": 2}, 6),
        ({"tp": 2, "pp": 2, "dp": 2}, 10),
    ],
    ids=str,
)
def test_layout_follows_the_curve_of_one_process(run_cells, reference, corpus, layout, steps):  # B26
    tree = job_tree(corpus, layout=layout, batch={"micro": 2})
    curve, _ = the_same_on_all(run_cells(world_of(tree), train_curve, tree, steps))
    expected, _ = reference({**tree, "layout": {}}, 20)
    assert deviation(curve, expected[:steps]) < TOLERANCE


def test_four_tensor_parallel_ranks_follow_the_curve_of_one_process(run_cells, reference, corpus):
    tree = job_tree(corpus, layout={"tp": 4}, model={"kv_heads": 4}, batch={"micro": 4})
    curve, _ = the_same_on_all(run_cells(4, train_curve, tree, 5))
    assert deviation(curve, reference(tree, 5)[0]) < TOLERANCE


@pytest.mark.parametrize("micro", [1, 4, 8])
def test_microbatch_size_does_not_change_the_curve(reference, corpus, micro):
    curve, _ = reference(job_tree(corpus, batch={"micro": micro}), 20)
    expected, _ = reference(job_tree(corpus, batch={"micro": 2}), 20)
    assert deviation(curve, expected) < TOLERANCE


def test_microbatches_and_zero_may_change_along_with_the_layout(run_cells, reference, corpus):
    tree = job_tree(corpus, layout={"tp": 2, "dp": 2}, batch={"micro": 4}, optim={"zero": 0})
    curve, _ = the_same_on_all(run_cells(4, train_curve, tree, 6))
    expected, _ = reference(job_tree(corpus, batch={"micro": 2}), 20)
    assert deviation(curve, expected[:6]) < TOLERANCE


VIRTUAL = {"virtual_ranks": 4, "micro": 1}  # 8 microbatches in 4 virtual ranks


@pytest.mark.parametrize(
    ("layout", "schedule", "zero", "buckets"),
    [
        ({}, "gpipe", 0, SMALL_BUCKETS),
        ({"dp": 2}, "1f1b", 1, BUCKET_ELEMENTS),
        ({"dp": 3}, "1f1b", 1, SMALL_BUCKETS),
        ({"dp": 3}, "gpipe", 0, SMALL_BUCKETS),
        ({"dp": 4}, "1f1b", 1, SMALL_BUCKETS),
        ({"dp": 4}, "gpipe", 0, BUCKET_ELEMENTS),
        ({"pp": 2}, "1f1b", 1, SMALL_BUCKETS),
        ({"pp": 2}, "gpipe", 0, BUCKET_ELEMENTS),
        ({"pp": 4}, "1f1b", 1, BUCKET_ELEMENTS),
        ({"pp": 4}, "gpipe", 1, SMALL_BUCKETS),
        ({"pp": 2, "dp": 2}, "1f1b", 1, SMALL_BUCKETS),
        ({"pp": 2, "dp": 2}, "gpipe", 0, SMALL_BUCKETS),
        ({"pp": 2, "dp": 3}, "1f1b", 1, SMALL_BUCKETS),
        ({"pp": 2, "dp": 4}, "1f1b", 0, BUCKET_ELEMENTS),
        ({"pp": 4, "dp": 2}, "1f1b", 1, SMALL_BUCKETS),
    ],
)
def test_bits_do_not_depend_on_dp_pp_schedule_zero_or_buckets(
    run_cells, reference, corpus, layout, schedule, zero, buckets
):
    tree = job_tree(corpus, layout=layout, batch=VIRTUAL, schedule=schedule, optim={"zero": zero})
    found = the_same_on_all(run_cells(world_of(tree), train_curve, tree, 20, buckets))
    assert found == reference(job_tree(corpus, batch=VIRTUAL), 20)


def test_bits_do_not_depend_on_dp_and_pp_within_one_tp(run_cells, corpus):
    trees = [
        job_tree(corpus, layout={"tp": 2, **layout}, batch={"virtual_ranks": 2, "micro": 2}, optim={"zero": zero})
        for layout, zero in (({}, 1), ({"dp": 2}, 0), ({"pp": 2}, 1))
    ]
    found = [the_same_on_all(run_cells(world_of(tree), train_curve, tree, 4, SMALL_BUCKETS)) for tree in trees]
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("microbatches", [1, 2, 3, 4, 5])
def test_pipeline_of_four_runs_any_number_of_microbatches(run_cells, reference, corpus, microbatches):  # B40
    tree = job_tree(corpus, layout={"pp": 4}, batch={"global": microbatches})
    assert the_same_on_all(run_cells(4, train_curve, tree, 3)) == reference({**tree, "layout": {}}, 3)


def masters(results):
    """The gathered weights of every cell's (curve, state)."""
    whole = assembled([state for _, state in results])
    return {tensor.removesuffix("@master"): v for tensor, v in whole.items() if tensor.endswith("@master")}


def state_of(run_cells, tree, steps):
    return run_cells(world_of(tree), train_state, tree, steps, SMALL_BUCKETS)


def test_initial_weights_are_the_same_for_every_layout(run_cells, corpus):  # B28
    model = {"kv_heads": 4}
    expected = masters(state_of(run_cells, job_tree(corpus, model=model), 0))
    assert len(expected) == 4 * 6 + 3
    for layout in ({"tp": 2}, {"tp": 4}, {"pp": 2}, {"tp": 2, "pp": 2}):
        results = state_of(run_cells, job_tree(corpus, model=model, layout=layout), 0)
        found = masters(results)
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            np.testing.assert_array_equal(found[name], value, err_msg=f"{name} at {layout}")
        if layout == {"tp": 4}:
            parts = [
                [v for tensor, shape, _, v in state if tensor.endswith("@master") and len(shape) > 1]
                for _, state in results
            ]
            for one, other in pairwise(parts):
                assert not any(np.array_equal(a, b) for a, b in zip(one, other))
            down = "layers.0.mlp.down.weight"
            shards = [v for _, state in results for tensor, _, _, v in state if tensor == f"{down}@master"]
            assert all(abs(v.std() / expected[down].std() - 1) < 0.1 for v in shards)


def test_layers_and_matrices_start_different(run_cells, corpus):
    weights = masters(state_of(run_cells, job_tree(corpus), 0))
    heads = [tuple(value.reshape(-1)[:8].tolist()) for name, value in weights.items() if value.ndim > 1]
    assert len(set(heads)) == len(heads) == 4 * 4 + 2
    stds = {
        "layers.0.mlp.down.weight": 0.02 / 8**0.5,
        "layers.3.attention.out.weight": 0.02 / 8**0.5,
        "layers.2.attention.qkv.weight": 0.02,
        "embedding.weight": 0.02,
    }
    for name, std in stds.items():
        assert abs(weights[name].std() / std - 1) < 0.05, name
    assert all((value == 1).all() for value in weights.values() if value.ndim == 1)


@pytest.mark.parametrize(
    ("layout", "zero"),
    [({"tp": 2}, 1), ({"tp": 2, "dp": 2}, 0), ({"pp": 2}, 1), ({"dp": 2}, 0), ({"dp": 2}, 1), ({"dp": 2, "pp": 2}, 1)],
    ids=str,
)
def test_norm_and_clip_count_every_parameter_once(run_cells, corpus, layout, zero):  # B32
    options = {"batch": {"micro": 2, "virtual_ranks": 2}, "optim": {"clip": 0.01, "zero": zero, "decay": "constant"}}
    tree = job_tree(corpus, layout=layout, **options)
    results = state_of(run_cells, tree, 1)
    ((expected_curve, expected_state),) = state_of(run_cells, job_tree(corpus, **options), 1)
    curve = the_same_on_all([curve for curve, _ in results])
    state, expected = assembled([state for _, state in results]), assembled([expected_state])
    first_moments = [value.astype(np.float64) for tensor, value in state.items() if tensor.endswith("@exp_avg")]
    clipped = hypot(*(np.linalg.norm(value) for value in first_moments)) / (1 - 0.9)
    assert curve[0][1] > 0.5 and abs(clipped / 0.01 - 1) < TOLERANCE
    if "tp" not in layout:
        assert curve == expected_curve
        for tensor, value in expected.items():
            np.testing.assert_array_equal(state[tensor], value, err_msg=tensor)
    assert deviation(curve, expected_curve) < TOLERANCE
    for tensor, value in expected.items():
        # The first update divides a gradient by itself plus epsilon: rounding of one about as small moves a weight.
        room = 1e-3 * tree["optim"]["lr"] if tensor.endswith("@master") else 0.0
        assert np.abs(state[tensor] - value).max() <= TOLERANCE * np.abs(value).max() + room, tensor
