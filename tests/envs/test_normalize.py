import copy

import numpy as np
import pytest
from gymnasium import spaces

import corral
from corral.core.errors import UserError
from corral.core.types import EnvSpec, StepBatch
from corral.envs.normalize import NormalizedVecEnv, RunningMoments
from corral.envs.vec_env import VecEnv
from corral.testing import TreeEnv
from corral.testing.play import play, random_actions


def test_moments_equal_numpy_on_all_rows_together():
    rng = np.random.default_rng(0)
    parts = [rng.normal(1e6, 3.0, (n, 2, 3)).astype(np.float32) for n in (1, 7, 0, 100, 1)]
    moments = RunningMoments((2, 3))
    for part in parts:
        moments.update(part)
    rows = np.concatenate(parts).astype(np.float64)
    assert moments.count == len(rows)
    np.testing.assert_allclose(moments.mean, rows.mean(0), rtol=1e-12)
    np.testing.assert_allclose(moments.var, rows.var(0), rtol=1e-6)


def test_merged_moments_equal_those_of_one_reader():
    rows = np.random.default_rng(0).normal(size=(50, 3))
    whole, left, right = RunningMoments((3,)), RunningMoments((3,)), RunningMoments((3,))
    whole.update(rows)
    left.update(rows[:20])
    right.update(rows[20:])
    left.merge(right)
    left.merge(RunningMoments((3,)))
    np.testing.assert_allclose(left.mean, whole.mean)
    np.testing.assert_allclose(left.var, whole.var)


def test_moments_survive_a_round_trip():
    moments, other = RunningMoments((3,)), RunningMoments((3,))
    moments.update(np.arange(12.0).reshape(4, 3))
    other.load_state_dict(moments.state_dict())
    for each in (moments, other):
        each.update(np.ones((2, 3)))
    np.testing.assert_array_equal(moments.var, other.var)
    assert moments.count == other.count
    with pytest.raises(UserError, match="shape"):
        RunningMoments((2,)).load_state_dict(moments.state_dict())


class Played(VecEnv):
    """Delivers batches as they were written down."""

    def __init__(self, batches):
        self.spec = EnvSpec(spaces.Box(-1e9, 1e9, (1,), np.float64), spaces.Discrete(2))
        self.num_envs = len(batches[0])
        self._batches = iter(batches)

    def reset(self, seed=0): ...
    def send(self, env_ids, actions): ...
    def close(self): ...
    def recv(self, min_ready=None, *, env_ids=None):
        return next(self._batches)


def batch(obs, reward, ended=(), first=(), faulty=(), final=None):
    n = len(obs)
    flags = {name: np.isin(np.arange(n), rows) for name, rows in (("e", ended), ("f", first), ("x", faulty))}
    final_obs = None if final is None else np.array(final, float).reshape(n, 1)
    return StepBatch(
        np.arange(n), np.array(obs, float).reshape(n, 1), np.array(reward, float), np.array(reward, float),
        flags["e"], flags["x"].copy(), final_obs, flags["f"] | flags["e"] | flags["x"], flags["x"],
        flags["e"].copy(),
    )  # fmt: skip


SCRIPT = [
    batch([1, 2], [0, 0], first=[0, 1]),
    batch([3, 4], [1, 2]),
    batch([5, 6], [3, 4], ended=[1], final=[5, 60]),
    batch([7, 8], [0, 6], faulty=[0], final=[500, 8]),
    batch([9, 10], [5, 8]),
]


def script():
    return Played(copy.deepcopy(SCRIPT))


def test_observation_statistics_count_each_row_once():
    vec = NormalizedVecEnv(script(), reward=False)
    seen = []
    for rows in ([1, 2], [3, 4], [5, 6, 60], [8], [9, 10]):  # the faulty row's are left out
        seen += rows
        result = vec.recv()
        mean, std = np.mean(seen), np.sqrt(np.var(seen) + 1e-8)
        assert result.obs.dtype == np.float32
        moments = vec.statistics.observations["value"]
        np.testing.assert_allclose([moments.mean.item(), moments.std.item()], [mean, std])
        if 60 in rows:
            np.testing.assert_allclose(result.final_obs[:, 0], (np.array([5, 60]) - mean) / std, rtol=1e-6)
            np.testing.assert_allclose(result.obs[:, 0], (np.array([5, 6]) - mean) / std, rtol=1e-6)


def test_reward_scale_is_std_of_discounted_return():
    vec = NormalizedVecEnv(script(), obs=False, gamma=0.5, clip=1e9)
    returns = []
    # By hand: the second one's starts again at its end, the first one's at its fault.
    expected = [[], [1, 2], [3.5, 5], [6], [5, 11]]
    for k, new in enumerate(expected):
        returns += new
        result = vec.recv()
        std = np.sqrt(np.var(returns) + 1e-8) if returns else 1.0
        np.testing.assert_allclose(result.reward, SCRIPT[k].reward / std, rtol=1e-6)
        np.testing.assert_array_equal(result.raw_reward, SCRIPT[k].raw_reward)


def test_values_are_clipped():
    vec = NormalizedVecEnv(script(), clip=0.5)
    for _ in SCRIPT:
        result = vec.recv()
        assert np.abs(result.obs).max() <= 0.5
        assert np.abs(result.reward).max() <= 0.5


def test_only_float_leaves_are_normalized():
    with (
        NormalizedVecEnv(corral.make_vec(TreeEnv, 2, "local")) as vec,
        corral.make_vec(TreeEnv, 2, "local") as plain,
    ):
        before = {leaf.name: leaf for leaf in plain.spec.observation.leaves}
        kinds = set()
        for leaf in vec.spec.observation.leaves:
            if before[leaf.name].dtype.kind == "f":
                assert leaf.space == spaces.Box(-np.inf, np.inf, leaf.shape, np.float32)
            else:
                assert leaf.space == before[leaf.name].space
            kinds.add(before[leaf.name].dtype.kind)
        assert "f" in kinds
        assert len(kinds) > 1
        act, result = random_actions(vec), vec.recv()
        for _ in range(5):
            vec.send(result.env_ids, act(result))
            result = vec.recv()
            for value, leaf in zip(vec.spec.observation.flatten(result.obs), vec.spec.observation.leaves, strict=True):
                assert value.dtype == leaf.dtype


def test_statistics_are_saved_and_frozen_for_evaluation(tmp_path):
    path = tmp_path / "statistics.safetensors"
    with NormalizedVecEnv(corral.make_vec("CartPole-v1", 4, "local")) as vec:
        play(vec, 50)
        vec.statistics.save(path)
        saved = vec.statistics.state_dict()
    with NormalizedVecEnv(corral.make_vec("CartPole-v1", 2, "local", role="eval"), frozen=True) as vec:
        vec.statistics.load(path)
        rows = play(vec, 50)
        for name, array in vec.statistics.state_dict().items():
            np.testing.assert_array_equal(array, saved[name])
        assert {row.raw_reward for row in rows[0]} == {1.0}
        assert len({row.reward for row in rows[0]}) == 1


def test_statistics_of_another_environment_are_refused(tmp_path):
    path = tmp_path / "statistics.safetensors"
    with NormalizedVecEnv(corral.make_vec("CartPole-v1", 1, "local")) as cart:
        cart.statistics.save(path)
    with NormalizedVecEnv(corral.make_vec("Pendulum-v1", 1, "local")) as pendulum:
        with pytest.raises(UserError, match="shape"):
            pendulum.statistics.load(path)
        with pytest.raises(UserError, match="read"):
            pendulum.statistics.load(tmp_path / "nothing")
    with (
        NormalizedVecEnv(corral.make_vec(TreeEnv, 1, "local")) as tree,
        pytest.raises(UserError, match="differ"),
    ):
        tree.statistics.load(path)
