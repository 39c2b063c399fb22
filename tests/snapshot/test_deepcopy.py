"""Copies of what environments are made of, and the generators that are found in them."""

import collections
import enum
import random
import types

import numpy as np
import pytest

from corral.snapshot.keepers.ale import Words
from corral.snapshot.keepers.deepcopy import Copier
from corral.snapshot.rng import RngState, reseed


class Colour(enum.Enum):
    RED = 1


class Slotted:
    __slots__ = ("a", "b")


class Held:
    def __init__(self):
        self.me, self.table = self, collections.defaultdict(list, {1: [2]})


def there_and_back(value):
    out = Copier({})
    kept = out.copy(value)
    back = Copier({})
    return kept, back.copy(kept), out.rngs, back.rngs


def test_containers_objects_and_arrays_are_copied_and_shared_parts_stay_shared():
    slotted = Slotted()
    slotted.a, slotted.b = [1], Colour.RED
    array, held = np.arange(6.0).reshape(2, 3), Held()
    value = [array, array[1], held, held, slotted, {"x": (1, [2])}, collections.deque([1], 3), {4, 5}, Colour.RED]
    _, made, _, _ = there_and_back(value)
    array[1, 0], held.table[1][0], slotted.a[0] = 99, 99, 99
    assert made[0][1, 0] == 3.0
    made[1][0] = 7.0
    assert made[0][1, 0] == 7.0  # a view, of the copy
    assert made[2] is made[3] is made[2].me
    assert made[2].table == {1: [2]}
    assert made[2].table[5] == []
    assert (made[4].a, made[4].b, made[8]) == ([1], Colour.RED, Colour.RED)
    assert made[5:8] == [{"x": (1, [2])}, collections.deque([1]), {4, 5}]
    assert made[6].maxlen == 3


def test_what_does_not_change_is_not_copied():
    value = (1, "a", np.float32(2), len, np, Colour, None, (3, frozenset()))
    assert Copier({}).copy(value)[0:7] == value[0:7]
    assert Copier({}).copy((1, (2, "x"))) is not None
    constant = (1, (2, "x"))
    assert Copier({}).copy(constant) is constant


def sfc64(seed):
    return np.random.Generator(np.random.SFC64(seed))


@pytest.mark.parametrize("make", [np.random.default_rng, np.random.RandomState, random.Random, sfc64])
def test_generators_anywhere_are_found_go_on_where_they_were_and_can_be_told_otherwise(make):
    generator = make(3)
    generator.random()
    value = {"deep": [types.SimpleNamespace(rng=generator)], "again": generator}
    _, made, dice, alive = there_and_back(value)
    assert len(dice) == len(alive) == 1
    assert isinstance(dice[0], RngState)
    assert made["deep"][0].rng is made["again"] is alive[0]
    assert [made["again"].random() for _ in range(3)] == [generator.random() for _ in range(3)]
    reseed(alive[0], 5, 0)
    first = alive[0].random()
    reseed(alive[0], 5, 0)
    assert alive[0].random() == first
    reseed(alive[0], 6, 0)
    assert alive[0].random() != first


def test_numbers_thrown_anew_are_uniform_over_seeds():
    generator, drawn = np.random.default_rng(0), []
    for seed in range(4000):
        reseed(generator, seed, 0)
        drawn.append(generator.random())
    counts, _ = np.histogram(drawn, 10, (0, 1))
    assert abs(counts - 400).max() < 5 * np.sqrt(400 * 0.9)


def test_what_a_twister_gave_last_and_gives_next_is_read_from_its_words():
    twister, given = np.random.MT19937(5), []
    for _ in range(1400):
        given.append(twister.random_raw() / 2.0**32)
        state = twister.state
        numbers = [*state["state"]["key"].tolist(), state["state"]["pos"]]
        words = Words(b"\x001x" + b" ".join(str(number).encode() for number in numbers))
        assert [words.drawn(back) for back in range(min(10, len(given)))] == given[-1:-11:-1]
        assert words.next() in (0.0, twister.random_raw() / 2.0**32)
        twister.state = state
