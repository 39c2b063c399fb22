"""Sets of environment ids, and what is kept for each of them."""

import numpy as np

from corral.envs.stepping.id_set import IdSets, SetCache


def test_cache_of_sets_is_bounded():
    sets, cache = IdSets(9), SetCache(9)
    for mask in range(1, 2**9):
        chosen = sets.of_mask(mask)
        cache[chosen] = mask
        assert cache[chosen] == mask
        assert len(cache) <= 256


def test_equal_ids_are_one_key_of_the_cache():
    sets, cache = IdSets(4), SetCache(4)
    cache[sets.of(np.array([1, 3]))] = "route"
    assert cache.get(sets.of(np.array([1, 3]))) == "route"
    assert cache.get(sets.of(np.array([3, 1]))) is None
