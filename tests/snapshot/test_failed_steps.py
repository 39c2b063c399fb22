"""Steps that fail inside a planner: each ends its own branch, and the run goes on."""

import logging

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from helpers.row_cartpole import make as make_rows

import corral
from corral.core.errors import EnvFailed
from corral.planning.shooting import Mppi, Shooting, average
from corral.snapshot.array_states import ArrayStates
from corral.snapshot.live_env import WatchedEnv
from corral.snapshot.states import FailedSteps


class Ledge(gymnasium.Env):
    """A step costs 1; action 1 at 3 or further on raises, or gives what is not a number."""

    observation_space, action_space = spaces.Box(-10, 10, (1,), np.float32), spaces.Discrete(2)

    def __init__(self, how="raise", edge=3, limit=12):
        self.how, self.edge, self.limit = how, edge, limit

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.x = self.t = 0
        return self._obs(), {}

    def step(self, action):
        self.t += 1
        if action == 1 and self.x >= self.edge:
            self.x = 1000  # what it leaves behind must not be seen anywhere
            if self.how == "raise":
                raise RuntimeError("fell off")
            return np.array([np.nan], np.float32), -1.0, False, False, {}
        self.x += int(action)
        return self._obs(), -1.0, False, self.t >= self.limit, {}

    def _obs(self):
        return np.array([self.x], np.float32)


class SlopingLedge(Ledge):
    """The same with a number as the action."""

    action_space = spaces.Box(-1, 1, (1,), np.float32)

    def step(self, action):
        return super().step(int(action[0] > 0))


def judge(obs):
    """Further on is better, which leads to the edge."""
    return np.zeros((len(obs), 2)), obs[:, 0]


@pytest.mark.parametrize("how", ["raise", "nan"])
def test_failed_step_is_faulty_at_its_parent(how):
    with corral.Snapshots(lambda: Ledge(how)) as snapshots:
        env = snapshots.env
        for _ in range(3):
            env.step(1)
        here = snapshots.save()
        steps = snapshots.expand([here] * 3, [0, 1, 0])
        np.testing.assert_array_equal(steps.faulty, [False, True, False])
        np.testing.assert_array_equal(steps.truncated, [False, True, False])
        assert not steps.terminated.any()
        np.testing.assert_array_equal(steps.obs[:, 0], [3, 3, 3])
        np.testing.assert_array_equal(steps.reward, [-1, 0, -1])
        after = snapshots.expand(steps.children[[0, 2]], [0, 0])
        np.testing.assert_array_equal(after.obs[:, 0], [3, 3])
        assert after.faulty is None
        with pytest.raises(corral.UserError, match="end of an episode"):
            snapshots.expand(steps.children[1], 0)
        assert env.unwrapped.x == 3


@pytest.mark.parametrize("how", ["raise", "nan"])
def test_a_rollout_ends_where_a_step_of_it_fails(how):
    with corral.Snapshots(lambda: Ledge(how)) as snapshots:
        here = np.array([snapshots.save()] * 2)
        found = snapshots.states.rollout(here, np.array([[1, 1, 1, 1, 0], [1, 1, 0, 0, 0]]))
    np.testing.assert_array_equal(found.faulty, [True, False])
    np.testing.assert_array_equal(found.truncated, [True, False])
    assert np.isfinite(found.obs).all()
    assert np.isfinite(found.reward).all()
    assert found.length[1] == 5
    assert found.length[0] == 3


@pytest.mark.parametrize("root", ["gumbel", "puct"])
@pytest.mark.parametrize("policy", [judge, None])
def test_search_survives_failing_branch(root, policy):
    env = Ledge()
    obs, _ = env.reset(seed=0)
    snapshots = corral.Snapshots(env)
    search = corral.Search(snapshots, policy, sims=60, root_selection=root, rollout_steps=5)
    for _ in range(3):
        obs, *_ = env.step(1)
    search(obs)
    forest = search.planner.search.forest
    assert forest.visits[0, 0] == 61
    failed = forest.child[0, 0, 1]
    assert forest.flags[0, failed]
    assert forest.value[0, failed] == forest.value[0, 0], "nothing is known of it but what was known before"
    search.planner.search.clear(np.arange(1))
    assert len(snapshots.states) == 0


def test_searching_run_survives_failing_steps(tmp_path, caplog):
    result = corral.train(
        "ppo-search", lambda: Ledge(edge=12, limit=40), 600, 1, tmp_path / "x", quiet=True,
        **{"search_fraction": 1.0, "num_simulations": 8, "num_envs": 4, "ppo.num_steps": 16, "eval_episodes": 0,
            "backend": "local"},
    )  # fmt: skip
    assert result.steps >= 600
    said = [record for record in caplog.records if "each ended its branch" in record.getMessage()]
    assert 1 <= len(said) <= 4


def test_planners_do_not_follow_plans_that_failed():
    """Every step costs 1, so that a plan which ends early would look like the best one."""
    with corral.Sampler(lambda: Ledge(edge=0), Shooting(30, 2, seed=1), num_envs=1, backend="local") as sampler:
        assert not next(sampler.rollouts(steps=12)).faulty.any()
    policy = Mppi(horizon=3, samples=30, temperature=0.01, seed=1)
    with corral.Sampler(lambda: SlopingLedge(edge=0), policy, num_envs=1, backend="local") as sampler:
        assert not next(sampler.rollouts(steps=12)).faulty.any()


def test_where_every_plan_fails_all_weigh_the_same():
    noise = np.arange(8.0).reshape(2, 4, 1)
    returns = np.array([[-np.inf] * 4, [0.0, -np.inf, 0.0, -np.inf]])
    np.testing.assert_allclose(average(noise, returns, 1.0)[:, 0], [1.5, 5.0])


def test_env_whose_steps_all_fail_ends_planning():
    with corral.Snapshots(lambda: Ledge(edge=0)) as snapshots:
        here = snapshots.save()
        for _ in range(3):
            snapshots.drop(snapshots.expand([here] * 300, [1] * 300).children)
        with pytest.raises(EnvFailed, match=r"1,200 planning steps .* in a row; run `corral check-env`.*fell off"):
            snapshots.expand([here] * 300, [1] * 300)


def test_failures_are_logged_at_powers_of_ten(caplog):
    failed_steps = FailedSteps("Walk")
    with caplog.at_level(logging.WARNING):
        for _ in range(2500):
            assert failed_steps.note(np.array([True]), "x") is not None
            assert failed_steps.note(np.array([False]), "") is None
    assert failed_steps.count == 2500
    assert len(caplog.records) == 4


def test_rows_that_are_not_finite_are_steps_that_failed():
    env = make_rows()
    env.reset(seed=0)
    spec = corral.make_vec(make_rows, 1, backend="local").spec
    states = ArrayStates(env.unwrapped.rows, spec, [WatchedEnv(env, spec.observation)])
    here = states.save(np.array([0]))
    model, states.model = states.model, _Broken(states.model)
    steps = states.expand(np.repeat(here, 2), np.array([0, 1]), states.new_ids(2))
    np.testing.assert_array_equal(steps.faulty, [False, True])
    np.testing.assert_array_equal(steps.obs[1], states.look(here).obs[0])
    found = states.rollout(np.repeat(here, 2), np.array([[0, 0], [0, 1]]))
    np.testing.assert_array_equal(found.faulty, [False, True])
    assert np.isfinite(found.reward).all()
    assert np.isfinite(found.obs).all()
    states.model = model
    assert states.expand(here, np.array([1]), states.new_ids(1)).faulty is None


class _Broken:
    """Action 1 gives what is not a number."""

    def __init__(self, model):
        self._model, self.width, self.stochastic, self.look = model, model.width, model.stochastic, model.look

    def step(self, rows, actions, seeds):
        reward, terminated, truncated = self._model.step(rows, actions, seeds)
        rows[np.asarray(actions) == 1] = np.nan
        return reward, terminated, truncated
