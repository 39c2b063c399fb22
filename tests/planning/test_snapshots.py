"""`corral.Snapshots`: dice of one's own or of the state, kinds of environments, and what is said of those that fail."""

from functools import partial

import gymnasium
import numpy as np
import pytest
from gymnasium.wrappers import TimeLimit
from helpers.row_cartpole import make as make_row_cartpole
from helpers.snapshot_envs import DeclaredWalk, Entangled, LockedWalk, Racecar, SlotMachine, Walk

import corral
from corral.core.errors import UserError
from corral.envs.suites.games import PettingZoo
from corral.snapshot.states import Level
from corral.testing import FaultyEnv, TreeEnv

DRAWS, CHANCE = 2000, 0.375


@pytest.mark.parametrize("kind", ["own", "inner", "space", "declared", "locked"])
def test_planning_has_own_rng_and_replay_that_of_state(kind):
    with corral.Snapshots(partial(SlotMachine, kind)) as planning:
        root = planning.save()
        rewards = planning.expand([root] * DRAWS, [0] * DRAWS).reward
        assert abs(rewards.mean() - CHANCE) < 4 * np.sqrt(CHANCE * (1 - CHANCE) / DRAWS)
        assert planning.stochastic
    with corral.Snapshots(partial(SlotMachine, kind), rng="replay") as replay:
        real = []
        for _ in range(12):
            root = replay.save()
            known = replay.expand([root] * 3, [0] * 3).reward
            real.append(replay.env.step(0)[1])
            assert (known == real[-1]).all()
        assert 0 < sum(real) < 12
        assert replay.stochastic


def test_deterministic_env_is_recognised():
    with corral.Snapshots("CartPole-v1") as snapshots:
        snapshots.expand([snapshots.save()] * 5, [0, 1, 0, 1, 0])
        assert not snapshots.stochastic


@pytest.mark.parametrize("make", [Walk, Entangled, DeclaredWalk, lambda: TimeLimit(Walk(), 30)])
def test_users_env_is_left_unchanged(make):
    env = make()
    obs, _ = env.reset(seed=1)
    with corral.Snapshots(env, rng="replay") as snapshots:
        assert snapshots.env is env
        assert snapshots.load(snapshots.save()) is None  # it was reset before anybody here could see it
        obs = env.step(1)[0]
        state = snapshots.save()
        after = [env.step(2)[:2] for _ in range(5)]
        np.testing.assert_array_equal(snapshots.load(state), obs)
        for (a, r), (b, s) in zip(after, [env.step(2)[:2] for _ in range(5)], strict=True):
            np.testing.assert_array_equal(a, b)
            assert r == s
    assert "step" not in vars(env)
    assert "reset" not in vars(env)


def test_env_that_cannot_be_copied_or_rebuilt_is_refused():
    with pytest.raises(UserError, match="pass an id, module:Class or a factory"):
        corral.Snapshots(LockedWalk())


def test_states_of_several_environments_of_a_vec_env():
    with corral.make_vec(Walk, 3, "local") as vec, corral.Snapshots(vec, rng="replay") as snapshots:
        first = vec.recv()
        ids = snapshots.save([0, 1, 2])
        steps = snapshots.expand(ids, [0, 1, 2])
        vec.send(first.env_ids, np.array([0, 1, 2]))
        real = vec.recv()
        np.testing.assert_array_equal(real.obs, steps.obs)
        np.testing.assert_array_equal(real.reward, steps.reward)
        np.testing.assert_array_equal(snapshots.load(ids[::-1], [0, 1, 2]), first.obs[::-1])
        vec.send(first.env_ids, np.array([2, 1, 0]))
        np.testing.assert_array_equal(vec.recv().obs, steps.obs[::-1])


def test_envs_with_one_id_share_the_stepping_env():
    with corral.make_vec("CartPole-v1", 3, "local") as vec, corral.Snapshots(vec) as snapshots:
        first = vec.recv()
        steps = snapshots.expand(snapshots.save(first.env_ids), [0, 1, 0])
        vec.send(first.env_ids, np.array([0, 1, 0]))
        np.testing.assert_array_equal(vec.recv().obs, steps.obs)


def test_recorded_actions_restore_uncopyable_env():
    with corral.make_vec(partial(LockedWalk, 7), 2, "local") as vec, corral.Snapshots(vec, rng="replay") as snapshots:
        assert snapshots.level == Level.REPLAY
        batch = vec.recv()
        for k in range(20):
            ids = snapshots.save([0, 1])
            steps = snapshots.expand(ids, [k % 3, 1])
            vec.send(batch.env_ids, np.array([k % 3, 1]))
            batch = vec.recv()
            np.testing.assert_array_equal(batch.next_obs, steps.obs)
            snapshots.drop([*ids, *steps.children])


def test_differently_built_envs_keep_own_factory():
    with corral.make_vec([partial(Walk, 3), partial(Walk, 5)], backend="local") as vec:
        vec.recv()
        with corral.Snapshots(vec) as snapshots:
            ids, over = snapshots.save([0, 1]), []
            for _ in range(3):
                steps = snapshots.expand(ids, [0, 0])
                ids, over = steps.children, steps.terminated
            assert over.tolist() == [True, False]


def test_trees_of_observations_and_actions():
    with corral.Snapshots(TreeEnv, rng="replay") as snapshots:
        root = snapshots.save()
        space = gymnasium.spaces.Dict(TreeEnv().action_space.spaces)
        action = space.sample()
        one = snapshots.expand(root, action)
        np.testing.assert_array_equal(one.obs["echo"]["keys"][0], action["keys"])
        both = snapshots.expand([root, root], [action, space.sample()])
        np.testing.assert_array_equal(both.obs["echo"]["move"][0][0], action["move"][0])


def test_the_end_of_an_episode_is_seen_and_not_gone_on_from():
    with corral.Snapshots(partial(Walk, 2)) as snapshots:
        first = snapshots.expand(snapshots.save(), 0).children
        last = snapshots.expand(first, [0])
        assert last.terminated[0]
        assert snapshots.load(last.children[0])[1] == 2
        with pytest.raises(UserError, match="end of an episode"):
            snapshots.expand(last.children, [0])


@pytest.mark.parametrize("kind", ["raise", "nan"])
def test_failure_in_search_names_env_and_action(kind, caplog):
    with corral.Snapshots(partial(FaultyEnv, kind, 1, 1)) as snapshots:
        assert snapshots.expand(snapshots.save(), 0).faulty.tolist() == [True]
    words = "at action 0: " if kind == "raise" else "not finite"
    assert words in caplog.text.replace("np.int64(0)", "0")


@pytest.mark.parametrize(("kwargs", "words"), [({"rng": "dice"}, "planning, replay"), ({"memory_mb": 0}, "above 0")])
def test_settings_that_make_no_sense_are_sentences(kwargs, words):
    with pytest.raises(UserError, match=words):
        corral.Snapshots("CartPole-v1", **kwargs)


def test_a_window_is_not_opened_for_a_search():
    class Shown(Walk):
        render_mode = None

        def step(self, action):
            assert self.render_mode is None or self is acting
            return super().step(action)

    acting = Shown()
    acting.render_mode = "human"
    with corral.Snapshots(acting) as snapshots:
        acting.reset(seed=0)
        snapshots.expand(snapshots.save(), 1)
        acting.step(1)


def test_hidden_state_falls_back_to_replayed_actions():
    elsewhere = {}

    class Outside(Walk):
        def reset(self, *, seed=None, options=None):
            elsewhere[id(self)] = 0
            return super().reset(seed=seed, options=options)

        def step(self, action):
            elsewhere[id(self)] += 1
            obs, _, terminated, truncated, info = super().step(action)
            return obs, float(elsewhere[id(self)]), terminated, truncated, info

    with corral.Snapshots(Outside, rng="replay") as snapshots:
        assert snapshots.level == Level.REPLAY
        root = snapshots.save()
        assert snapshots.expand([root, root], [0, 1]).reward.tolist() == [1.0, 1.0]


def test_bullet_is_restored_only_if_declared_exact():
    pytest.importorskip("pybullet")
    with corral.Snapshots(Racecar, rng="replay") as snapshots:
        assert snapshots.level == Level.REPLAY
        action = np.array([4.0])
        for _ in range(30):
            snapshots.env.step(action)
        known = snapshots.expand(snapshots.save(), action)
        np.testing.assert_array_equal(known.obs[0], snapshots.env.step(action)[0])


def test_sticky_actions_differ_between_planning_and_game():
    gymnasium.register_envs(pytest.importorskip("ale_py"))
    make = partial(gymnasium.make, "ALE/Breakout-v5", obs_type="ram", repeat_action_probability=0.5)
    with corral.Snapshots(make) as snapshots:
        for k in range(40):
            snapshots.env.step(1 if k < 10 else 2)
        root = snapshots.save()
        steps = snapshots.expand([root] * 300, [3] * 300)
        outcomes = {row.tobytes() for row in steps.obs}
        assert len(outcomes) > 2
        assert max((steps.obs == row).all(1).mean() for row in steps.obs) < 0.6
        assert snapshots.stochastic


GAMES = {"own": "corral/Connect4-v0", "pettingzoo": partial(PettingZoo, game="connect_four_v3")}


@pytest.mark.parametrize("env", ["CartPole-v1", make_row_cartpole, *GAMES.values()])
def test_unknown_state_ids_are_refused_but_for_drop(env):
    with corral.Snapshots(env) as snapshots:
        gone = snapshots.save()
        snapshots.drop([gone, gone, 99_999, -3, 0])
        snapshots.drop(gone)
        kept = [snapshots.save() for _ in range(5)]
        assert len(set(kept)) == 5
        snapshots.drop(kept)
        for ask in (lambda: snapshots.load(kept[0]), lambda: snapshots.expand(99_999, 0)):
            with pytest.raises(UserError, match="dropped or never saved"):
                ask()
        with pytest.raises(UserError, match=r"given|ids returned by"):
            snapshots.expand(snapshots.save(), 0, children=5_000)
        with pytest.raises(UserError, match="environments 0 to 0"):
            snapshots.save([7])
        with pytest.raises(UserError, match="integers"):
            snapshots.load("a")


@pytest.mark.parametrize("env", GAMES.values(), ids=GAMES)
def test_illegal_or_late_move_is_refused(env):
    with corral.Snapshots(env) as snapshots:
        at = snapshots.save()
        for _ in range(6):
            at = int(snapshots.expand(at, 3).children[0])
        with pytest.raises(UserError, match=r"3 is not a legal move.*legal: 0, 1, 2, 4, 5, 6"):
            snapshots.expand(at, 3)
        with pytest.raises(UserError, match="outside Discrete"):
            snapshots.expand(at, 7)
        for move in (0, 1, 0, 1, 0, 1):
            at = int(snapshots.expand(at, move).children[0])
        last = snapshots.expand(at, 0)
        assert last.terminated[0]
        assert not last.legal.any()
        over = int(last.children[0])
        with pytest.raises(UserError, match="the game is over there"):
            snapshots.expand(over, 2)
        with pytest.raises(UserError, match="no step from it is possible"):
            snapshots.states.expand(last.children, np.array([2]), snapshots.states.new_ids(1))
        snapshots.load(over)
        assert not snapshots.env.action_mask().any()
        snapshots.load(at)
        assert snapshots.env.action_mask().any()
