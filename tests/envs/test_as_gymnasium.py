from __future__ import annotations

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import data_equivalence
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from gymnasium.wrappers import vector as wrappers

import corral
from corral.core.seeding import env_seeds
from corral.testing import CountingEnv, FaultyEnv, TreeEnv

OURS = {"raw_reward", "_raw_reward", "game_over", "_game_over", "faulty", "_faulty"}


def sync_cartpoles(num_envs: int) -> SyncVectorEnv:
    make = lambda: gymnasium.make("CartPole-v1")  # noqa: E731
    return SyncVectorEnv([make] * num_envs, autoreset_mode=AutoresetMode.SAME_STEP)


@pytest.mark.parametrize("backend", ["local", "process"])
def test_steps_exactly_like_gymnasiums_own_vector_env(backend):
    num_envs, rng = 3, np.random.default_rng(0)
    ours = corral.make_vec("CartPole-v1", num_envs, backend=backend).as_gymnasium()
    theirs = sync_cartpoles(num_envs)
    try:
        assert ours.metadata["autoreset_mode"] is theirs.metadata["autoreset_mode"]
        assert ours.observation_space == theirs.observation_space
        assert ours.action_space == theirs.action_space
        assert ours.single_observation_space == theirs.single_observation_space
        assert ours.single_action_space == theirs.single_action_space
        a, b = ours.reset(seed=7), theirs.reset(seed=env_seeds(7, "train", num_envs))
        assert data_equivalence(a, b, exact=True)
        ends = 0
        for _ in range(200):
            actions = rng.integers(2, size=num_envs)
            *a, a_info = ours.step(actions)
            *b, b_info = theirs.step(actions)
            assert data_equivalence(tuple(a), tuple(b), exact=True)
            assert set(a_info) - OURS == set(b_info)
            for key in b_info:
                assert data_equivalence(a_info[key], b_info[key], exact=True), key
            ends += int((a[2] | a[3]).sum())
        assert ends > 10
    finally:
        ours.close()
        theirs.close()


def test_final_obs_is_last_observation_of_episode():
    vec = corral.make_vec(lambda: CountingEnv(length=4, end="mixed"), 2, backend="local")
    env = vec.as_gymnasium()
    env.reset(seed=0)
    for t in range(1, 13):
        obs, _, terminated, truncated, infos = env.step(np.zeros(2, np.int64))
        ended = terminated | truncated
        if t % 4:
            assert "final_obs" not in infos
            assert not ended.any()
        else:
            assert ended.all()
            assert infos["_final_obs"].all()
            assert infos["final_obs"].dtype == object
            assert all(final[2] == 4 for final in infos["final_obs"])
            assert (obs[:, 2] == 0).all()
    env.close()


def test_a_discrete_final_observation_is_an_int():
    with corral.make_vec("FrozenLake-v1", 4, backend="local") as vec:
        env = vec.as_gymnasium()
        env.reset(seed=0)
        infos = {}
        while "final_obs" not in infos:
            *_, infos = env.step(env.action_space.sample())
        last = [obs for obs in infos["final_obs"] if obs is not None]
        assert {type(obs) for obs in last} == {int}
        assert all(obs in env.single_observation_space for obs in last)


@pytest.mark.parametrize("backend", ["local", "process"])
def test_nested_spaces_go_through_in_both_directions(backend):
    with corral.make_vec(TreeEnv, 3, backend=backend) as vec:
        env = vec.as_gymnasium()
        obs, _ = env.reset(seed=1)
        assert env.observation_space.contains(obs)
        env.action_space.seed(0)
        for t in range(1, 9):
            actions = env.action_space.sample()
            obs, reward, _, _, infos = env.step(actions)
            assert env.observation_space.contains(obs)
            assert reward.dtype == np.float64
            if t % 4 == 0:
                final = infos["final_obs"][1]
                assert env.single_observation_space.contains(final)
                assert final["echo"]["gear"] == actions["gear"][1]
                assert final["t"] == 4
            else:
                assert data_equivalence(obs["echo"], actions)


def test_faulty_rows_are_marked_and_truncated():
    vec = corral.make_vec([lambda: CountingEnv(5), lambda: FaultyEnv("raise", at=3)], backend="local")
    with vec:
        env = vec.as_gymnasium()
        env.reset(seed=0)
        faulty = []
        for _ in range(20):
            _, reward, terminated, truncated, infos = env.step(np.zeros(2, np.int64))
            faulty.append(infos["faulty"])
            bad = infos["faulty"]
            assert truncated[bad].all()
            assert not terminated[bad].any()
            assert (reward[bad] == 0).all()
            assert infos["_faulty"].all()
        assert np.array(faulty).sum(0).tolist()[0] == 0
        assert np.array(faulty).sum(0).tolist()[1] >= 1


def test_same_seed_repeats_and_no_seed_continues():
    def first_obs(*seeds):
        with corral.make_vec("CartPole-v1", 2, backend="local", seed=3) as vec:
            env = vec.as_gymnasium()
            return [env.reset(seed=seed)[0] for seed in seeds]

    a = first_obs(None, None, 5, None)
    b = first_obs(None, None, 5, None)
    for x, y in zip(a, b, strict=True):
        np.testing.assert_array_equal(x, y)
    assert len({x.tobytes() for x in a}) == 4, "every reset plays new episodes"
    np.testing.assert_array_equal(a[0], first_obs(3)[0])
    np.testing.assert_array_equal(a[2:], first_obs(5, None))


@pytest.mark.parametrize("bad", [[1, 2, 3], [1, -2], -1, "x", 1.5])
def test_a_seed_that_fits_no_environment_is_refused(bad):
    with corral.make_vec("CartPole-v1", 2, backend="local") as vec:
        env = vec.as_gymnasium()
        with pytest.raises(corral.UserError, match="one non-negative integer"):
            env.reset(seed=bad)
        env.reset(seed=1)  # nothing was broken


def test_gymnasiums_vector_wrappers_work_on_top():
    vec = corral.make_vec("CartPole-v1", 3, backend="local")
    plain = vec.as_gymnasium()
    env = wrappers.RecordEpisodeStatistics(plain)
    env = wrappers.NormalizeReward(env)
    env = wrappers.TransformReward(env, lambda reward: 2 * reward)
    env = wrappers.DictInfoToList(env)
    obs, infos = env.reset(seed=0)
    assert infos == [{}, {}, {}]
    episodes = []
    env.action_space.seed(0)
    for _ in range(150):
        obs, _, terminated, truncated, infos = env.step(env.action_space.sample())
        for i in np.flatnonzero(terminated | truncated):
            episodes.append(infos[i]["episode"])
            assert (np.abs(infos[i]["final_obs"][[0, 2]]) > [2.4, 0.2094]).any(), "cart or pole out of bounds"
    assert obs.shape == (3, 4)
    assert len(episodes) > 5
    assert all(e["r"] == e["l"] for e in episodes), "CartPole pays 1 per step"
    env.close()
    assert plain.closed
    with pytest.raises(corral.UserError, match="closed"):
        vec.recv()


def test_observation_wrappers_equal_gymnasium_same_step():
    ours, theirs = corral.make_vec("CartPole-v1", 2, backend="local").as_gymnasium(), sync_cartpoles(2)
    for env in (ours, theirs):
        with pytest.raises(ValueError, match="SAME_STEP"):
            wrappers.NormalizeObservation(env)
        env.close()


def test_action_of_wrong_shape_is_refused():
    with corral.make_vec("CartPole-v1", 3, backend="local") as vec:
        env = vec.as_gymnasium()
        env.reset()
        with pytest.raises(corral.UserError, match=r"shape \(2,\), expected \(3,\)"):
            env.step(np.zeros(2, np.int64))


def test_repr_names_the_environment():
    with corral.make_vec("CartPole-v1", 2, backend="local") as vec:
        assert repr(vec.as_gymnasium()) == "AsGymnasium(CartPole-v1, num_envs=2)"


def test_a_refused_seed_changes_nothing():
    with corral.make_vec("CartPole-v1", 2, "local", seed=5) as vec:
        env = vec.as_gymnasium()
        with pytest.raises(corral.UserError, match="one non-negative integer"):
            env.reset(seed=-1)
        first, _ = env.reset()
    with corral.make_vec("CartPole-v1", 2, "local", seed=5) as vec:
        np.testing.assert_array_equal(first, vec.as_gymnasium().reset()[0])


@pytest.mark.parametrize("mode", ["next_step", "disabled"])
def test_a_mask_of_all_rows_continues_their_random_numbers(mode):
    """As one of some rows does, and as Gymnasium's own; a reset without a mask starts with fresh seeds."""

    def firsts(env, seed):
        found = [env.reset(seed=seed)[0]]
        for _ in range(4):
            *_, terminated, truncated, _ = env.step(np.array([0]))
            while not (terminated | truncated)[0]:
                *_, terminated, truncated, _ = env.step(np.array([0]))
            found.append(env.reset(options={"reset_mask": np.array([True])})[0])
        return np.concatenate(found)

    theirs = SyncVectorEnv([lambda: gymnasium.make("CartPole-v1")], autoreset_mode=AutoresetMode[mode.upper()])
    with corral.make_vec("CartPole-v1", 1, "local") as vec:
        np.testing.assert_array_equal(firsts(vec.as_gymnasium(mode), 7), firsts(theirs, env_seeds(7, "train", 1)))
