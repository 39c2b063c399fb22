"""Planning must not disturb the environment that acts: instances that share state of the process are refused."""

import logging
import threading

import gymnasium
import numpy as np
import pytest
from helpers.shared_state_envs import (
    ClassDict,
    DeclaredClassDict,
    DefaultClient,
    LateGlobal,
    LockedClassDict,
    OwnState,
    PartlyDeclared,
    ReadsWhatResetsWrite,
)
from helpers.snapshot_envs import DeclaredWalk, LockedWalk, Pole, Walk

import corral
from corral.core.errors import UserError
from corral.snapshot.keeper import StateKeeper
from corral.snapshot.keepers.choose import find_keeper
from corral.snapshot.keepers.trial import SharedState
from corral.snapshot.rng import read_global_generators, same_state
from corral.testing.checks.checker import check_env

SHARES = "share state of this process .* keep all state in the instance"


class Offered(StateKeeper):
    """Believes that the fields are everything."""

    level = 2

    def save(self, env, find_start=None):
        return env._x, env._t

    def load(self, env, kept):
        env._x, env._t = kept

    def reseed(self, env, seed):
        pass

    def rng_state(self, env):
        return None

    def nbytes(self, kept):
        return 100


class OffersKeeper(ReadsWhatResetsWrite):
    def state_keeper(self):
        return Offered()


REFUSED = [ClassDict, DeclaredClassDict, PartlyDeclared, LockedClassDict, ReadsWhatResetsWrite, OffersKeeper]


@pytest.mark.parametrize("kind", REFUSED)
def test_instances_that_share_state_are_refused(kind):
    with pytest.raises(SharedState, match=SHARES) as caught:
        corral.Snapshots(kind)
    assert "\n" not in str(caught.value)
    with corral.make_vec(kind, 2, "local") as vec, pytest.raises(SharedState, match=SHARES):
        vec.states()


@pytest.mark.parametrize("kind", [ClassDict, DeclaredClassDict, ReadsWhatResetsWrite])
def test_search_in_users_env_that_shares_state_is_refused(kind):
    env = kind()
    env.reset(seed=0)
    with pytest.raises(SharedState, match=SHARES):
        corral.Search(env)
    with corral.make_vec(Walk, 1, "local") as vec, pytest.raises(SharedState, match=SHARES):
        corral.Search(DeclaredClassDict, transfer=lambda env: {}).bind_envs(vec)  # as a stand-in


def test_global_first_used_late_is_refused():
    with pytest.raises(UserError, match="keep no state outside the instance"):
        corral.Snapshots(LateGlobal)


def test_default_client_of_bullet_is_refused():
    pytest.importorskip("pybullet")
    with pytest.raises(SharedState, match="BulletClient"):
        corral.Snapshots(DefaultClient)
    corral.Snapshots(Pole).close()  # which has one of its own


@pytest.mark.parametrize("kind", [ClassDict, DeclaredClassDict, LateGlobal])
def test_served_env_that_shares_state_offers_no_states(kind, caplog):
    with caplog.at_level(logging.INFO, "corral"):
        assert find_keeper(kind) is None
    assert f"States of {kind.__name__} are not offered to planners" in caplog.text


def test_check_env_fails_where_instances_share_state():
    found = {result.name: result for result in check_env(DeclaredClassDict, steps=20)}["planning"]
    assert found.status == "fail"
    assert "share state of this process" in found.detail


class Short(Walk):
    def __init__(self):
        super().__init__(length=2)


class Counted(OwnState):
    """Knows how many there are, which changes no step."""

    instances = 0

    def __init__(self):
        super().__init__()
        type(self).instances += 1
        self.number = self.instances


class Masked(OwnState):
    """Raises at an action that its info excludes."""

    def reset(self, *, seed=None, options=None):
        return super().reset(seed=seed)[0], {"action_mask": np.array([1, 0, 1], np.int8)}

    def step(self, action):
        assert action != 1
        return *super().step(action)[:4], {"action_mask": np.array([1, 0, 1], np.int8)}


class ReplayedShort(LockedWalk):
    def __init__(self):
        super().__init__(length=2)


GOOD = [OwnState, Walk, DeclaredWalk, LockedWalk, Short, ReplayedShort, Counted, Masked]


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("kind", GOOD)
def test_instances_with_own_state_are_accepted(kind, wrapped, caplog):
    def make():
        if not wrapped:
            return kind()
        env = gymnasium.wrappers.TimeLimit(kind(), 9)
        return gymnasium.wrappers.FrameStackObservation(gymnasium.wrappers.NormalizeObservation(env), 2)

    before = read_global_generators()
    with corral.Snapshots(make) as snapshots:
        snapshots.drop(snapshots.save())
    assert same_state(read_global_generators(), before)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_env_that_can_be_built_twice_only_is_not_refused(caplog):
    built = []

    def make():
        if len(built) == 2:
            raise RuntimeError("no license left")
        built.append(Walk())
        return built[-1]

    with corral.Snapshots(make) as snapshots:
        snapshots.save()
    assert "no license left" in caplog.text


def test_untestable_isolation_is_said_in_the_log(caplog):
    class Noisy(Walk):
        """Another number at every step, from nowhere."""

        def __init__(self):
            super().__init__()
            self._lock = threading.Lock()

        def state_dict(self):
            return {}

        def load_state_dict(self, state):
            pass

        def step(self, action):
            return np.array([float(id(object())), len(STEPS)]), float(STEPS.append(0) is None), False, False, {}

    with corral.Snapshots(Noisy):
        assert "cannot be tested whether planning disturbs the environment that acts" in caplog.text


STEPS = []
