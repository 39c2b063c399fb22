"""The hot loop: what an environment returns, and what becomes of it."""

import numpy as np
import pytest
from gymnasium import spaces

import corral
from corral.testing import CountingEnv
from corral.testing.contracts.vec_env import T
from corral.testing.play import play


class Reuses(CountingEnv):
    """Returns its reward, and the game's own, in arrays that its reset clears."""

    def __init__(self, shape):
        super().__init__(3)
        self._reward = np.zeros(shape)

    def reset(self, *, seed=None, options=None):
        self._reward[...] = 0
        return super().reset(seed=seed, options=options)

    def step(self, action):
        obs, reward, terminated, truncated, _ = super().step(action)
        self._reward[...] = reward
        return obs, self._reward, terminated, truncated, {"raw_reward": self._reward}


@pytest.mark.parametrize("shape", [(), (1,)])
def test_reward_in_reused_array_is_read_before_reset(shape):
    with corral.make_vec(lambda: Reuses(shape), 2, "local") as vec:
        for rows in play(vec, 9):
            assert [row.reward for row in rows] == [1, 2, 3] * 3
            assert [row.raw_reward for row in rows] == [1, 2, 3] * 3


class BadEnds(CountingEnv):
    """In every third episode, the last step and the reset after it go wrong as told."""

    def __init__(self, last, reset):
        super().__init__(3)
        self._last, self._bad_reset = last, reset

    def reset(self, *, seed=None, options=None):
        obs, info = super().reset(seed=seed, options=options)
        if self._bad_reset and seed is None and self._episode % 3 == 2:
            obs[0] = np.nan
        return obs, info

    def step(self, action):
        obs, reward, terminated, truncated, info = super().step(action)
        if terminated and self._last and self._episode % 3 == 1:
            obs[3] = np.nan
            reward = np.inf
        return obs, reward, terminated, truncated, info


@pytest.mark.parametrize(("last", "reset"), [(True, True), (True, False), (False, True)])
def test_nan_at_episode_end_or_reset_is_a_fault(last, reset):
    with corral.make_vec(lambda: BadEnds(last, reset), 2, "local") as vec:
        rows = play(vec, 60)
        faults = list(vec.faults)
    for r in rows:
        for row in r:
            assert np.isfinite(row.next_obs).all()
            assert np.isfinite(row.following).all()
            assert np.isfinite([row.reward, row.raw_reward]).all()
        assert any(row.faulty for row in r) == last
    seeds = [fault.seed for fault in faults if fault.env_id == 0]
    assert len(seeds) >= 3
    if last:
        assert all((fault.step, fault.episode % 2) == (3, 1) for fault in faults)


def test_no_restarted_environment_plays_the_seed_of_another():
    seeds = []

    class Notes(BadEnds):
        def reset(self, *, seed=None, options=None):
            if seed is not None:
                seeds.append(seed)
            return super().reset(seed=seed, options=options)

    with corral.make_vec(lambda: Notes(False, True), 1, "local") as vec:
        play(vec, 80)
        assert vec.restarts >= 5
    assert len(set(seeds)) == len(seeds) == vec.restarts + 1


class Infos(CountingEnv):
    def __init__(self, info):
        super().__init__(3)
        self._info = info

    def step(self, action):
        return *super().step(action)[:4], self._info


def test_not_finite_raw_reward_is_a_fault():
    with corral.make_vec(lambda: Infos({"raw_reward": np.nan}), 1, "local") as vec:
        assert all(row.faulty and row.raw_reward == 0 for row in play(vec, 4)[0])
    for info in ({"raw_reward": "x"}, {"raw_reward": None}, [1], 5):
        vec = corral.make_vec(lambda info=info: Infos(info), 1, "local")
        with vec, pytest.raises(corral.UserError, match=r"one number|must be a dict"):
            play(vec, 2)


class Narrow(CountingEnv):
    def __init__(self):
        super().__init__()
        self.observation_space = spaces.Box(-128, 127, (1,), np.int8)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(1, np.int64), {}

    def step(self, action):
        super().step(action)
        return np.array([100 * self._t]), 0.0, False, False, {}


def test_integers_that_would_wrap_around_are_refused():
    vec = corral.make_vec(Narrow, 1, "local")
    with vec, pytest.raises(corral.UserError, match="dtype int64"):
        play(vec, 3)

    class Binary(CountingEnv):
        def __init__(self):
            super().__init__()
            self.action_space = spaces.MultiBinary(2)

    with corral.make_vec(Binary, 1, "local") as vec:
        batch = vec.recv()
        with pytest.raises(corral.UserError, match="which int8 cannot hold"):
            vec.send(batch.env_ids, np.array([[256, 257]]))


def test_a_later_reset_that_fails_is_a_fault_not_the_end():
    class Once(CountingEnv):
        resets = 0

        def reset(self, *, seed=None, options=None):
            type(self).resets += 1
            if self.resets == 2:
                raise OSError("connection lost")
            return super().reset(seed=seed, options=options)

    with corral.make_vec(Once, 1, "local") as vec:
        vec.recv()
        vec.reset(3)
        batch = vec.recv()
        assert batch.first.all()
        assert batch.obs[0, T] == 0
        assert vec.restarts == 1


@pytest.mark.parametrize("space", [spaces.Dict({}), spaces.Tuple(())])
def test_empty_spaces_are_refused(space):
    class Empty(CountingEnv):
        def __init__(self):
            super().__init__()
            self.observation_space = space

    with pytest.raises(corral.UserError, match="empty space"):
        corral.make_vec(Empty, 1, "local")


def test_episode_ends_survive_flushed_denormals():
    # Flags share an array with float64 rewards; read as a number, a flag is denormal and would count as 0.
    import torch

    torch.set_flush_denormal(True)
    try:
        with corral.make_vec(CountingEnv, 2, backend="local") as vec:
            batch = vec.recv()
            for _ in range(200):
                vec.send(batch.env_ids, np.zeros(2, np.int64))
                batch = vec.recv()
                if batch.first.any():
                    break
        assert batch.first.all()
        assert batch.final_obs is not None
    finally:
        torch.set_flush_denormal(False)


class Says(CountingEnv):
    """Returns this as reward or flag of its second step."""

    def __init__(self, **said):
        super().__init__()
        self._said = said

    def step(self, action):
        obs, reward, terminated, truncated, info = super().step(action)
        said = {"reward": reward, "terminated": terminated, "truncated": truncated}
        said |= self._said if self._t == 2 else {}
        return obs, said["reward"], said["terminated"], said["truncated"], info


@pytest.mark.parametrize("backend", ["local", "process"])
@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"reward": 10**400}, "the reward must be one number, got 1000"),
        ({"terminated": "False"}, "terminated must be True or False, got 'False'"),
        ({"truncated": "no"}, "truncated must be True or False, got 'no'"),
        ({"terminated": 0.5}, "terminated must be True or False, got 0.5"),
    ],
)
def test_a_reward_or_flag_that_is_none_is_one_sentence(said, words, backend):
    with (
        corral.make_vec(lambda: Says(**said), 1, backend, workers=1) as vec,
        pytest.raises(corral.UserError, match=words) as e,
    ):
        play(vec, 5)
    assert len(str(e.value)) < 300


@pytest.mark.parametrize("flag", [True, np.True_, 1, 1.0, np.array([True]), np.int64(1)])
def test_flags_may_be_numpy_or_numbers(flag):
    with corral.make_vec(lambda: Says(terminated=flag), 1, "local") as vec:
        assert [bool(row.terminated) for row in play(vec, 3)[0]][:3] == [False, True, False]
