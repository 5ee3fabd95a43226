"""Which blocks a stage holds: balanced ones against all splits there are, drawn ones against their drawing."""

import doctest
from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayformer.errors import ConfigError
from rayformer.shards import share_start
from rayformer.stages import split as module
from rayformer.stages.split import drawn, problems, split_blocks


def test_the_examples_in_the_docstrings_hold():
    result = doctest.testmod(module)
    assert result.attempted and not result.failed


def sizes(stages):
    return [len(stage) for stage in stages]


@pytest.mark.parametrize("num_stages", range(1, 13))
@pytest.mark.parametrize("layer", [1, 0.1])
def test_equal_layers_between_ends_that_cost_nothing_are_dealt_evenly(num_stages, layer):
    for num_layers in range(num_stages, 3 * num_stages + 2):
        edges = [share_start(num_layers, num_stages, rank) for rank in range(num_stages + 1)]
        dealt = [stop - start for start, stop in pairwise(edges)]
        dealt[0] += 1
        dealt[-1] += 1
        assert sizes(split_blocks("auto", costs=[0, *[layer] * num_layers, 0], pp=num_stages)) == dealt


@pytest.mark.parametrize(
    ("costs", "pp", "expected"),
    [
        ([0, 1, 1, 1, 1, 1, 1, 3], 3, [1 + 3, 2, 1 + 1]),  # the output block is worth three layers
        ([2, 1, 1, 1, 1, 1, 1, 0], 3, [1 + 1, 3, 2 + 1]),  # 3 3 2, and not 3 2 3, since earlier stages get more
        ([0, 5, 1, 1, 1, 1, 0], 2, [1 + 1, 4 + 1]),
        ([0, 1, 1, 4, 1, 1, 0], 3, [1 + 2, 1, 2 + 1]),
        ([0, 9, 1, 1, 1, 1, 0], 3, [1 + 1, 2, 2 + 1]),  # the largest stage is given, and the others are balanced too
        ([100, 1, 1, 1, 100], 3, [1 + 1, 1, 1 + 1]),  # never a stage without a layer
    ],
)
def test_a_stage_is_filled_by_what_its_blocks_cost(costs, pp, expected):
    assert sizes(split_blocks("auto", costs=costs, pp=pp)) == expected


def test_chunks_are_further_stages():
    assert sizes(split_blocks("auto", costs=[0, *[1] * 8, 0], pp=2, chunks=2)) == [3, 2, 2, 3]
    assert sizes(split_blocks("Et|(tt|)*2,ttL", costs=[0, *[1] * 7, 0], pp=2, chunks=2)) == [2, 2, 2, 3]


def all_splits(num_layers, num_stages):
    for cuts in combinations(range(2, num_layers + 1), num_stages - 1):
        yield tuple(range(start, stop) for start, stop in pairwise([0, *cuts, num_layers + 2]))


models = st.integers(1, 9).flatmap(
    lambda num_layers: st.tuples(
        st.lists(st.integers(0, 5), min_size=num_layers + 2, max_size=num_layers + 2), st.integers(1, num_layers)
    )
)


@given(models)
def test_no_other_split_is_better_than_the_balanced_one(model):
    costs, num_stages = model

    def rank(stages):
        loads = sorted((sum(costs[i] for i in stage) for stage in stages), reverse=True)
        return loads, [-size for size in sizes(stages)]

    assert split_blocks("auto", costs=costs, pp=num_stages) == min(all_splits(len(costs) - 2, num_stages), key=rank)


@given(models, st.floats(1e-3, 1e3))
def test_every_block_is_in_one_stage_and_in_order_whatever_the_unit(model, unit):
    costs, num_stages = model
    stages = split_blocks("auto", costs=[cost * unit for cost in costs], pp=num_stages)
    assert [block for stage in stages for block in stage] == list(range(len(costs)))
    assert len(stages) == num_stages
    assert all(any(0 < block < len(costs) - 1 for block in stage) for stage in stages)


drawings = st.lists(st.integers(0, 4), min_size=1, max_size=6).filter(lambda held: all(held[1:-1]))


@given(drawings, st.sampled_from(["{}", "t*{}", "(t,)*{}"]))
def test_a_drawing_is_followed_and_every_block_is_in_one_stage(layers, form):
    def layer_text(count):
        return form.format(count) if count and "t" in form else "t" * count

    text = "E" + "|".join(map(layer_text, layers)) + " L"
    stages = split_blocks(text, costs=[1.0] * (sum(layers) + 2), pp=len(layers))
    assert [block for stage in stages for block in stage] == list(range(sum(layers) + 2))
    held = [sum(0 < block <= sum(layers) for block in stage) for stage in stages]
    assert held == layers


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("EttL", ["EttL"]),
        ("Et*3|(tt|)*2,t|L", ["Ettt", "tt", "tt", "t", "L"]),
        ("E|((t*2|)*2t|)*2L", ["E", "tt", "tt", "t", "tt", "tt", "t", "L"]),
        (" E t , t | t * 2\tL".replace("* 2", "*2"), ["Ett", "ttL"]),
        ("E(t(t)*2)*2L", ["EttttttL"]),
    ],
)
def test_repetitions_are_written_out_and_commas_and_spaces_ignored(text, expected):
    assert drawn(text) == expected


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", ["layout.stages='': it draws nothing; write auto, or leave it out"]),
        (" ,", ["layout.stages=' ,': it draws nothing; write auto, or leave it out"]),
        ("Ett|ttl", ["layout.stages=Ett|ttl: 'l' at position 7 means nothing; use E for the embedding, t for a "]),
        ("E2t|ttL", ["layout.stages=E2t|ttL: '2' at position 2 means nothing; "]),
        ("Ett|ttmL", ["layout.stages=Ett|ttmL: m at position 7 is multi-token prediction, which is not built"]),
        ("E(t(t|t)tL", ["the ( at position 2 is not closed; close it with )"]),
        ("Ett|tt)L", ["the ) at position 7 closes nothing; open it with (, or take it away"]),
        ("Ett|t*0L", ["the * at position 6 must be followed by how often, 1 or more; "]),
        ("Ett|t*L", ["the * at position 6 must be followed by how often, 1 or more; "]),
        ("E*tt|ttL", ["the * at position 2 must be followed by how often, 1 or more; "]),
        ("*2tt|ttL", ["the * at position 1 has nothing before it to repeat; "]),
        ("E()*2tt|ttL", ["the * at position 4 has nothing before it to repeat; "]),
        ("Et*2*2|L", ["the * at position 5 has nothing before it to repeat; "]),
        ("Et*999999|L", ["the * at position 3 makes more than 100,000 blocks; use a smaller n"]),
        (f"Et*{'9' * 5000}|L", ["the * at position 3 makes more than 100,000 blocks; use a smaller n"]),
        ("E((t*999)*999)*999|L", ["the * at position 10 makes more than 100,000 blocks; use a smaller n"]),
        ("Ett|tt|L|", ["layout.stages=Ett|tt|L|: stage 4 of 4 is empty; give it a block, or take one | away"]),
        ("Ett||ttL", ["stage 2 of 3 is empty; "]),
        ("ttE|ttL", ["layout.stages=ttE|ttL: E, the embedding, must be there once, before all else; start with E,"]),
        ("Ett|ttLL", ["layout.stages=Ett|ttLL: L, the loss, must be there once, after all else; end with L, and only"]),
        ("Ett|tL", [
            "layout.stages=Ett|tL, model.layers=4: it draws 3 layers, and the model has 4; write t 4 times, or use"
            " model.layers=3",
        ]),
        ("Ettttt|L", ["it draws 5 layers, and the model has 4; write t 4 times, or use model.layers=5"]),
        ("E|t|t|ttL", ["layout.stages=E|t|t|ttL, layout.pp=2: it draws 4 stages, and there are pp = 2; write | 1"]),
        ("t", [
            "start with E",
            "end with L",
            "model.layers=4: it draws 1 layer, and the model has 4; ",
            "layout.pp=2: it draws 1 stage, and there are pp = 2; ",
        ]),
        ("E|L", ["layout.stages=E|L, model.layers=4: it draws 0 layers, and the model has 4; write t 4 times"]),
    ],
)  # fmt: skip
def test_a_drawing_of_another_model_is_refused_with_what_is_wrong_and_a_way_out(text, told):
    found = [str(problem) for problem in problems(text, layers=4, pp=2)]
    assert len(found) == len(told)
    assert [line for line, start in zip(found, told) if start not in line] == []
    with pytest.raises(ConfigError):
        split_blocks(text, costs=[1.0] * 6, pp=2)


def test_virtual_stages_count_and_are_named():
    found = [str(problem) for problem in problems("Ett|t|tL", layers=4, pp=2, chunks=2)]
    assert found == [
        "layout.stages=Ett|t|tL, layout.pp=2, layout.virtual_stages=2: it draws 3 stages, and there are"
        " pp x virtual_stages = 4; write | 3 times"
    ]
    assert problems("E|tt|tt|L", layers=4, pp=2, chunks=2) == problems("auto", layers=4, pp=2, chunks=2) == []
