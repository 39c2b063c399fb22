"""Means of learners' states."""

import numpy as np

from corral.learn.weights import mean_state


def test_merged_state_averages_floats_and_keeps_max_counts():
    one = {"w": np.float32([1, 3]), "n": np.array(2.0), "version": 4, "rng": np.uint8([1]), "target": None}
    other = {"w": np.float32([3, 5]), "n": np.array(4.0), "version": 7, "rng": np.uint8([2]), "target": None}
    mean = mean_state([one, other])
    np.testing.assert_array_equal(mean["w"], np.float32([2, 4]))
    assert (float(mean["n"]), mean["n"].shape, mean["version"], mean["target"]) == (3.0, (), 7, None)
    np.testing.assert_array_equal(mean["rng"], [1])


def test_an_optimizer_that_has_not_stepped_yet_does_not_count():
    mean = mean_state([{"optimizer": {}}, {"optimizer": {"m": np.float32([2.0])}}])
    np.testing.assert_array_equal(mean["optimizer"]["m"], [2.0])
