"""The compiled tree beside cumulative sums in NumPy."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from corral.data.sumtree import SumTree


def naive_sample(weights, uniform):
    mass = (np.arange(len(uniform)) + uniform) / len(uniform) * weights.sum()
    return np.searchsorted(np.cumsum(weights), mass, side="right")


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 700), st.integers(0, 2**32 - 1))
def test_draws_are_those_of_cumulative_sums(size, seed):
    rng = np.random.default_rng(seed)
    tree, weights = SumTree(size), np.zeros(size)
    for _ in range(4):
        slots = rng.integers(0, size, 40)
        values = rng.integers(0, 5, 40).astype(np.float64)  # whole numbers, so that sums are exact
        values[0] = 1
        tree.set(slots, values)
        for slot, value in zip(slots, values, strict=True):
            weights[slot] = value
        assert tree.total == weights.sum()
        np.testing.assert_array_equal(tree.leaves, weights)
        if weights.sum():
            uniform = rng.random(33)
            np.testing.assert_array_equal(tree.sample(uniform), naive_sample(weights, uniform))


@pytest.mark.parametrize("size", [1, 7, 8, 9, 64, 65, 512, 513, 5000])
def test_no_slot_without_weight_is_ever_drawn(size):
    rng = np.random.default_rng(size)
    tree = SumTree(size)
    weights = rng.random(size) ** 8 * (rng.random(size) < 0.3)
    weights[rng.integers(size)] = 1e-9
    tree.set(np.arange(size), weights)
    for edge in (0.0, 0.5, np.nextafter(1.0, 0.0)):
        drawn = tree.sample(np.full(257, edge))
        assert (weights[drawn] > 0).all()
        assert (np.diff(drawn) >= 0).all()


def test_sumtree_does_not_drift():
    rng = np.random.default_rng(0)
    worn, fresh = SumTree(1000), SumTree(1000)
    for _ in range(300):
        worn.set(rng.integers(0, 1000, 50), rng.random(50) * 10.0 ** rng.integers(-8, 8))
    fresh.set(np.arange(1000), worn.leaves.copy())
    np.testing.assert_array_equal(worn._nodes, fresh._nodes)


def test_the_maximum_is_the_largest_weight_ever():
    tree = SumTree(10)
    assert tree.max == 0
    tree.set(np.array([1, 2]), np.array([3.0, 5.0]))
    tree.set(np.array([2]), np.array([1.0]))
    tree.set(np.zeros(0, np.int64), np.zeros(0))
    assert tree.max == 5


def test_the_levels_of_a_large_tree_add_up():
    tree = SumTree(300_001)
    weights = np.random.default_rng(0).random(300_001)
    tree.set(np.arange(300_001), weights)
    assert tree.total == pytest.approx(weights.sum())
    uniform = np.random.default_rng(1).random(4096)
    assert (np.abs(tree.sample(uniform) - naive_sample(weights, uniform)) <= 1).all()
    assert tree.nbytes < 8 * 300_001 * 1.15
