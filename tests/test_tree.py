"""Our functions on trees do what torch's pytree does."""

from __future__ import annotations

from collections import OrderedDict, namedtuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils import _pytree as pytree

from undrift.tree import tree_flatten, tree_leaves, tree_map, tree_structure, tree_unflatten

Pair = namedtuple("Pair", "first second")
LEAVES = st.integers() | st.none() | st.text(max_size=2) | st.floats(allow_nan=False) | st.just(1j)
TREES = st.recursive(
    LEAVES,
    lambda inner: (
        st.dictionaries(st.text(max_size=2), inner, max_size=3)
        | st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.builds(Pair, inner, inner)
        | st.dictionaries(st.text(max_size=2), inner, max_size=3).map(OrderedDict)
    ),
    max_leaves=12,
)


@given(TREES)
def test_leaves_map_and_back_as_torch_does(tree):
    leaves, structure = tree_flatten(tree)
    assert leaves == tree_leaves(tree) == pytree.tree_leaves(tree)
    assert tree_map(repr, tree) == pytree.tree_map(repr, tree)
    again = tree_unflatten(leaves, structure)
    assert again == tree and pytree.tree_structure(again) == pytree.tree_structure(tree)
    assert hash(structure) == hash(tree_structure(again)) and structure == tree_structure(again)


@given(TREES, TREES)
def test_structures_are_the_same_if_torch_says_so(one, other):
    assert (tree_structure(one) == tree_structure(other)) == (
        pytree.tree_structure(one) == pytree.tree_structure(other)
    )


@pytest.mark.parametrize(
    ("tree", "other"),
    [
        ({"a": 1, "b": 2}, {"b": 20, "a": 10}),
        ({"a": 1}, {"a": {"b": 2}}),
        ([1, (2, 3)], [10, (20, [30])]),
        (Pair(1, {"a": 2}), Pair(10, {"a": 20})),
        (OrderedDict(a=1), OrderedDict(a=2)),
        ([], []),
    ],
)
def test_two_trees(tree, other):
    """The order of keys does not matter, and what stands in the place of a leaf may be a tree."""
    assert tree_map(lambda a, b: (a, b), tree, other) == pytree.tree_map(lambda a, b: (a, b), tree, other)


@pytest.mark.parametrize(
    ("tree", "other"),
    [({"a": 1}, {"b": 1}), ([1, 2], [1]), ([1], (1,)), ({"a": 1}, [1]), ({"a": 1}, {"a": 1, "b": 2}), ((1,), 2)],
)
def test_other_structures_are_refused(tree, other):
    with pytest.raises(ValueError, match=r"mismatch|[Ee]xpected"):
        tree_map(lambda a, b: a, tree, other)


def test_keys_in_another_order_are_another_structure():
    assert tree_structure({"a": 1, "b": 2}) != tree_structure({"b": 2, "a": 1})


@pytest.mark.parametrize("leaves", [[1], [1, 2, 3]])
def test_a_wrong_number_of_leaves_is_refused(leaves):
    with pytest.raises(ValueError, match="leaves are too"):
        tree_unflatten(leaves, tree_structure({"a": [0], "b": 0}))


def test_parameters_are_leaves():
    weight = torch.nn.Parameter(torch.zeros(2))
    assert tree_leaves({"w": [weight]})[0] is weight
