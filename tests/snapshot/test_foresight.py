"""A planner must not foresee what an environment will draw; where nothing can be done about it, the log says so."""

import threading

import numpy as np
import pytest
from helpers.own_dice import DeclaredGuess, Guess, HonestGuess, ReseededGuess
from helpers.snapshot_envs import Walk

import corral
from corral.snapshot.keepers.choose import find_keeper
from corral.snapshot.keepers.fields import FieldsKeeper
from corral.snapshot.states import warn_once
from corral.testing.checks.checker import check_env


@pytest.fixture(autouse=True)
def _nothing_has_been_said():
    warn_once.cache_clear()


class LockedGuess(Guess):
    """Is brought back by repeating its actions."""

    def __init__(self):
        super().__init__()
        self._lock = threading.Lock()


class Deaf(FieldsKeeper):
    """Takes no other random numbers."""

    def reseed(self, env, seed):
        pass


class OffersDeaf(Walk):
    def state_keeper(self):
        return Deaf()


FORESEEN = [Guess, DeclaredGuess, LockedGuess, OffersDeaf]


def guess_by_search(kind):
    """Mean reward of a few episodes."""
    rewards = []
    for seed in range(4):
        env, over = kind(), False
        obs, _ = env.reset(seed=seed)
        search = corral.Search(env, lambda obs: (np.zeros((len(obs), 5)), np.zeros(len(obs))), sims=16, discount=0.5)
        while not over:
            obs, reward, over, _, _ = env.step(search(obs))
            rewards.append(reward)
        search.close()
    return np.mean(rewards)


@pytest.mark.parametrize("kind", FORESEEN)
def test_foreseen_random_numbers_are_said_once(kind, caplog):
    for _ in range(3):
        with corral.Snapshots(kind) as snapshots:
            foreseen = snapshots.states.foreseen
    assert f"A planner foresees what {kind.__name__} does not show" in foreseen
    assert "reseed(seed)" in foreseen
    assert [record.getMessage() for record in caplog.records if record.levelname == "WARNING"] == [foreseen]


@pytest.mark.parametrize("kind", [HonestGuess, ReseededGuess])
def test_random_numbers_that_are_reseeded_are_not_foreseen(kind, caplog):
    assert guess_by_search(kind) < 0.2 + 4 * np.sqrt(0.2 * 0.8 / 80)
    with corral.Snapshots(kind) as snapshots:
        here = snapshots.save()
        rewards = snapshots.expand([here] * 50, [0] * 50).reward
        assert 0 < rewards.mean() < 1
        assert snapshots.stochastic
    assert not caplog.records


def test_dice_that_cannot_be_reseeded_are_known_to_a_search():
    """What the warning is about: if this fails, it is no longer needed."""
    assert guess_by_search(DeclaredGuess) > 0.9


class NumbersFromNowhere(DeclaredGuess):
    """Its state does not hold the dice, so that every load gives others: nothing is foreseen."""

    def state_dict(self):
        return {"t": self._t}

    def load_state_dict(self, state):
        self._t = state["t"]


class SeedIsShown(DeclaredGuess):
    """Looks different for every seed: nothing can be told, and nothing is said."""

    def _obs(self):
        return np.array([self.np_random_seed % 20], np.float32)


@pytest.mark.parametrize("kind", [Walk, NumbersFromNowhere, SeedIsShown])
def test_nothing_is_said_without_evidence(kind, caplog):
    with corral.Snapshots(kind) as snapshots:
        assert snapshots.states.foreseen == ""
    assert "foresees" not in caplog.text


def test_served_env_says_what_planners_foresee(caplog):
    assert find_keeper(DeclaredGuess).foreseen in caplog.text


@pytest.mark.parametrize(
    ("kind", "status"),
    [(DeclaredGuess, "fail"), (OffersDeaf, "fail"), (Guess, "warn"), (HonestGuess, "pass"), (ReseededGuess, "pass")],
)
def test_check_env_reports_foreseen_random_numbers(kind, status):
    found = {result.name: result for result in check_env(kind, steps=30)}["random numbers"]
    assert found.status == status, found
    assert ("foresees" in found.detail) == (status != "pass")
