"""Search as a policy: on environments, snapshots and stand-ins, with whatever judges leaves."""

from itertools import islice

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.envs.classic_control import CartPoleEnv
from helpers.row_cartpole import make

import corral
from corral.acting.policy import bind_envs
from corral.acting.sampler import Sampler
from corral.core.errors import UserError
from corral.envs.suites.games import TicTacToe
from corral.planning.search_policy import draw, sharpened
from corral.planning.shooting import Shooting
from corral.runs.evaluation.evaluate import evaluate_policy


class Corridor(gymnasium.Env):
    """Right leads to 1 at the end, left to nothing at once: a step alone does not tell which is better."""

    observation_space, action_space = spaces.Box(0, 10, (1,), np.float32), spaces.Discrete(2)

    def __init__(self, length=3):
        self.length = length

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.x = 0
        return self._obs(), {}

    def step(self, action):
        self.x += 1
        if action == 0:
            return self._obs(), 0.0, True, False, {}
        return self._obs(), float(self.x == self.length), self.x == self.length, False, {}

    def _obs(self):
        return np.array([self.x], np.float32)


def knows_nothing(obs):
    return np.zeros((len(obs), 2)), np.zeros(len(obs))


def test_search_looks_beyond_a_greedy_horizon():
    env = Corridor()
    obs, _ = env.reset(seed=0)
    search, steps = corral.Search(env, knows_nothing, sims=100), 0
    over = False
    while not over:
        obs, reward, over, _, _ = env.step(search(obs))
        steps += 1
    assert (steps, reward) == (3, 1.0)


@pytest.mark.parametrize("root", ["gumbel", "puct"])
@pytest.mark.parametrize("reuse", [False, True])
def test_search_with_every_root_rule_and_reuse(root, reuse):
    with corral.make_vec(Corridor, 4, "local") as vec:
        search = corral.Search(vec, knows_nothing, sims=80, root_selection=root, reuse_tree=reuse)
        found = evaluate_policy(vec, search, 8, 0)
    assert found.mean == 1.0


def test_an_environment_of_the_user_s_own_is_left_as_it_is():
    env = gymnasium.make("CartPole-v1")
    search = corral.Search(env, sims=30)
    env.reset(seed=3)
    other = gymnasium.make("CartPole-v1")
    other.reset(seed=3)
    for _ in range(20):
        action = search()
        one, two = env.step(action), other.step(action)
        np.testing.assert_array_equal(one[0], two[0])
    assert env.unwrapped.np_random.bit_generator.state == other.unwrapped.np_random.bit_generator.state


def test_search_acts_in_a_sampler():
    for env in ("CartPole-v1", None):
        with Sampler("CartPole-v1", corral.Search(env, sims=4), 3, "local") as sampler:
            assert next(sampler.rollouts(6)).extras["search_value"].shape == (6, 3)
    with corral.make_vec("CartPole-v1", 2, "local") as vec:
        vec.recv()
        search = corral.Search(corral.Snapshots(vec), sims=4)
        action, _, _ = search.act(None, search.initial_state(2), np.ones(2, np.bool_))
        assert action.shape == (2,)


def test_a_policy_to_act_on_with_judges_leaves():
    class Right:
        def initial_state(self, n):
            return None

        def act(self, obs, state, first):
            return np.ones(len(first), np.int64), None, {}

    env = Corridor(9)
    obs, _ = env.reset(seed=0)
    assert corral.Search(env, Right(), sims=4, rollout_steps=20, discount=1.0)(obs) == 1  # it gets to the far end


def length_of(vec, policy):
    """Steps until the first of some poles falls, 80 at most."""
    bind_envs(policy, vec)
    vec.reset(0)
    batch, state = vec.recv(), policy.initial_state(4)
    for t in range(80):
        action, state, _ = policy.act(batch.obs, state, batch.first)
        vec.send(np.arange(4), action)
        batch = vec.recv()
        if batch.terminated.any():
            return t
    return 80


def test_random_play_judges_leaves_where_there_is_nothing_better():
    with corral.make_vec(make, 4, "local") as vec:
        search, shooting = corral.Search(vec, sims=16, rollout_steps=20), Shooting(sims=32, horizon=20)
        searched, shot = (length_of(vec, policy) for policy in (search, shooting))
    assert searched > 60
    assert shot > 60  # random play lasts 22 steps


class Heavy(Corridor):
    """The same, and costly: nobody may step it but the one who acts."""

    steps = 0

    def step(self, action):
        type(self).steps += 1
        return super().step(action)

    def get_key_state(self):
        return {"x": self.x}

    def set_key_state(self, state):
        raise AssertionError("only stand-ins take over states")


class Light(Corridor):
    """Stands in for it."""

    def get_key_state(self):
        return {"x": self.x}

    def set_key_state(self, state):
        self.x = state["x"]


def test_stand_in_is_searched_instead_of_env():
    Heavy.steps = 0
    with corral.make_vec(Heavy, 1, "local") as vec:
        found = evaluate_policy(vec, corral.Search(Light, knows_nothing, sims=80), 2, 0)
    assert found.mean == 1.0
    assert Heavy.steps <= 2 * 3 + 3  # and the episode that begins after the last


def test_transfer_function_sets_up_stand_in():
    with corral.make_vec(Corridor, 1, "local") as vec:
        search = corral.Search(Light, knows_nothing, sims=80, transfer=lambda env: {"x": env.unwrapped.x})
        assert evaluate_policy(vec, search, 2, 0).mean == 1.0


def test_a_stand_in_that_takes_nothing_over_is_refused():
    with corral.make_vec(Heavy, 1, "local") as vec, pytest.raises(UserError, match="set_key_state"):
        evaluate_policy(vec, corral.Search(Corridor, knows_nothing), 1, 0)
    with corral.make_vec(Heavy, 1, "local") as vec, pytest.raises(UserError, match="cannot stand in"):
        evaluate_policy(vec, corral.Search("CartPole-v1", knows_nothing), 1, 0)


def test_a_game_of_the_user_s_own_is_searched_for_two_players():
    env = TicTacToe()
    env.reset(seed=0)
    for move in (0, 3, 1):  # the other has to stop the row
        env.step(move)
    assert corral.Search(env, sims=400)() == 2


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"sims": 0}, "at least 1 simulation"),
        ({"sims": "abc"}, "integer number of simulations"),
        ({"sims": 2.5}, "integer number of simulations"),
        ({"leaves_in_flight": 2.5}, "leaves_in_flight must be an integer"),
        ({"memory_mb": 0}, "memory_mb"),
        ({"discount": 1.5}, "discount"),
        ({"rollout_steps": 0}, "rollout_steps"),
        ({"temperature": -1.0}, "temperature"),
        ({"temperature": np.nan}, "temperature"),
        ({"noise": 2.0}, "noise"),
        ({"c_scale": -0.1}, "c_scale must be a number of at least 0"),
        ({"c_visit": np.inf}, "c_visit"),
        ({"root_selection": "puct", "c_init": np.nan}, "c_init"),
        ({"value_resolution": -1.0}, "value_resolution"),
        ({"root_selection": "puct", "dirichlet_alpha": np.nan}, "dirichlet_alpha"),
        ({"simz": 3}, "no setting 'simz'"),
        ({"leaves_in_flight": 0}, "leaves_in_flight"),
        ({"root_selection": "best"}, "gumbel, puct"),
        ({"policy": 3}, "cannot evaluate states"),
    ],
)
def test_invalid_arguments_are_refused(arguments, sentence):
    env = Corridor()
    env.reset(seed=0)
    with pytest.raises(UserError, match=sentence):
        corral.Search(env, **arguments)


def test_wrong_evaluator_result_is_explained():
    obs, _ = (env := Corridor()).reset(seed=0)
    with pytest.raises(UserError, match="logits"):
        corral.Search(env, lambda obs: obs)(obs)
    with pytest.raises(UserError, match=r"\[1, 2\]"):
        corral.Search(env, lambda obs: (np.zeros((1, 3)), np.zeros(1)))(obs)


def test_search_needs_last_observation_of_running_env():
    env = Corridor()
    obs, _ = env.reset(seed=0)
    search = corral.Search(env, knows_nothing, sims=20)
    with pytest.raises(UserError, match="pass its last observation"):
        search()
    assert search(obs) in (0, 1)


class Clock(gymnasium.Env):
    """Pays the number of the step, and looks the same at all times."""

    observation_space, action_space = spaces.Box(0, 1, (1,), np.float32), spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.t += 1
        return np.zeros(1, np.float32), float(self.t), False, False, {}


def test_called_search_forgets_earlier_trees():
    env = Clock()
    env.reset(seed=0)
    search = corral.Search(env, sims=8, reuse_tree=True, discount=0.0, rollout_steps=1)
    for do in (env.reset, lambda: env.step(0), lambda: env.step(0), env.reset):
        do()
        search()
        forest = search.planner.search.forest
        np.testing.assert_allclose(forest.total[0, 0] / forest.n[0, 0], env.t + 1)


def test_a_game_that_is_over_is_not_searched():
    env = gymnasium.make("corral/TicTacToe-v0")
    env.reset(seed=0)
    search, over = corral.Search(env, sims=5), False
    while not over:
        _, _, over, _, _ = env.step(search())
    for _ in range(3):
        with pytest.raises(UserError, match="no legal action"):
            search()


def test_widening_covers_all_discrete_actions():
    vec = corral.make_vec("corral/TicTacToe-v0", 4, "local", seed=0)
    with Sampler(vec, corral.Search(vec, sims=8, root_selection="puct", progressive_widening=True, seed=1)) as sampler:
        for traj in islice(sampler.rollouts(steps=20), 3):
            assert not traj.faulty.any()


def test_a_search_that_raises_leaves_no_states_behind():
    def raises(obs):
        raise ValueError("no idea")

    env = Corridor()
    snapshots = corral.Snapshots(env)
    search = corral.Search(snapshots, raises, sims=30)
    env.reset(seed=0)
    for _ in range(5):
        with pytest.raises(ValueError, match="no idea"):
            search()
    search.planner.search.clear(np.arange(1))
    assert len(snapshots.states) == 0


@pytest.mark.parametrize("env", ["CartPole-v1", "corral/Connect4-v0"])
def test_rollout_steps_count_as_simulator_steps(env):
    counted = []
    for policy in (None, lambda obs: (np.zeros((len(obs), 7 if obs.ndim == 4 else 2)), np.zeros(len(obs)))):
        search = corral.Search(corral.Snapshots(env), policy, sims=6, rollout_steps=3)
        search()
        counted.append(search.simulator_steps)
    assert counted[1] == 6
    assert counted[0] > 6 * 3


def test_shooting_validates_and_closes():
    for settings in ({"sims": 0}, {"sims": 4.5}, {"horizon": 0}, {"discount": 1.5}, {"discount": float("nan")}):
        with pytest.raises(UserError):
            Shooting(**settings)
    shooting = Shooting(sims=2, horizon=2)
    with pytest.raises(UserError, match=r"pass it to corral\.Sampler"):
        shooting.act(None, np.arange(1), np.zeros(1, np.bool_))
    closed = []

    class Closing(CartPoleEnv):
        def close(self):
            closed.append(self)

    with corral.make_vec(Closing, 1, "local") as vec:
        shooting.bind_envs(vec)
        assert len(closed) == 1  # which tested whether instances share state
        shooting.close()
        assert len(closed) == 2


def test_search_without_envs_is_refused():
    with pytest.raises(UserError, match="no environments"):
        corral.Search("CartPole-v1", sims=3)()


def test_envs_in_other_processes_cannot_be_searched():
    search = corral.Search(None, sims=3)
    with (
        corral.make_vec("CartPole-v1", 2, "process", workers=1) as vec,
        pytest.raises(UserError, match="backend=local"),
    ):
        search.bind_envs(vec)


def test_temperature_sharpens_and_draws_follow_the_policy():
    policy = np.array([[0.5, 0.3, 0.2, 0.0]])
    np.testing.assert_allclose(sharpened(policy, 1.0), policy)
    np.testing.assert_allclose(sharpened(policy, 0.5), policy**2 / (policy**2).sum())
    np.testing.assert_allclose(sharpened(policy, 0.0), [[1, 0, 0, 0]], atol=1e-9)
    drawn = draw(np.repeat(policy, 20_000, 0), np.random.default_rng(0))
    np.testing.assert_allclose(np.bincount(drawn, minlength=4) / 20_000, policy[0], atol=0.02)
