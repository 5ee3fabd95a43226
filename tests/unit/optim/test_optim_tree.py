"""The fixed tree: the same additions in the same order, whatever the number of actors."""

import pytest

from rayformer.optim.tree import Fold, Node, owned_leaves, subtrees


def joined(left, right):
    return f"({left}+{right})"


def fold_of(num_leaves, values):
    fold = Fold(num_leaves, joined)
    for node, value in values:
        fold.push(node, value)
    return fold.parts


def leaves(numbers):
    return [(Node(i, i + 1), str(i)) for i in numbers]


@pytest.mark.parametrize(
    ("num_leaves", "expected"),
    [
        (1, "0"),
        (2, "(0+1)"),
        (3, "((0+1)+2)"),
        (5, "(((0+1)+(2+3))+4)"),
        (6, "(((0+1)+(2+3))+(4+5))"),
        (7, "(((0+1)+(2+3))+((4+5)+6))"),
    ],
)
def test_tree_is_the_drawn_one(num_leaves, expected):
    assert fold_of(num_leaves, leaves(range(num_leaves))) == [(Node(0, num_leaves), expected)]


@pytest.mark.parametrize("num_leaves", range(1, 13))
def test_every_number_of_actors_adds_in_the_order_of_one(num_leaves):
    alone = fold_of(num_leaves, leaves(range(num_leaves)))
    for size in range(1, num_leaves + 1):
        sent = []
        for rank in range(size):
            own = owned_leaves(num_leaves, size, rank)
            parts = fold_of(num_leaves, leaves(own))
            assert [node for node, _ in parts] == list(subtrees(num_leaves, own))
            sent += parts
        assert fold_of(num_leaves, sent) == alone


@pytest.mark.parametrize("num_leaves", [*range(1, 18), 63, 64, 65])
def test_one_actor_that_owns_all_holds_at_most_log2_n_plus_1_values(num_leaves):
    fold, most = Fold(num_leaves, joined), 0
    for node, value in leaves(range(num_leaves)):
        most = max(most, len(fold.parts) + 1)  # what is folded so far, and the value that is being made
        fold.push(node, value)
    assert most <= num_leaves.bit_length()  # floor(log2 n) + 1


@pytest.mark.parametrize(("num_leaves", "size"), [(4, 3), (12, 5), (7, 7), (3, 2)])
def test_leaves_are_dealt_in_order_in_shares_that_differ_by_at_most_one(num_leaves, size):
    shares = [owned_leaves(num_leaves, size, rank) for rank in range(size)]
    assert [leaf for share in shares for leaf in share] == list(range(num_leaves))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_an_actor_without_leaves_has_no_subtree():
    assert subtrees(4, range(2, 2)) == ()


def test_neighbours_that_are_no_siblings_stay_apart():
    assert fold_of(4, leaves([1, 2])) == [(Node(1, 2), "1"), (Node(2, 3), "2")]


def test_nothing_is_added_over_a_leaf_that_is_missing():
    parts = [(Node(0, 1), "0"), (Node(2, 4), "(2+3)")]
    assert fold_of(4, parts) == parts
