"""MPPI: the update by its formula, plans that go on, bounds, noise, values, and what it refuses."""

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces as gs

import corral
from corral.acting.policy import PlanningPolicy
from corral.core.errors import UserError
from corral.core.types import EnvSpec
from corral.nets.actor_critic import ActorCritic
from corral.nets.config import NetConfig
from corral.planning.shooting import Mppi
from corral.runs.evaluation.evaluate import evaluate_policy


class ReplayPoint(gymnasium.Env):
    """A point on a plane, pushed; every step costs how far it is from the goal. It falls off beyond 3."""

    observation_space = gs.Box(-9, 9, (2,), np.float64)
    action_space = gs.Box(np.array([-1.0, -0.5]), np.array([1.0, 0.25]), dtype=np.float64)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.at = self.np_random.uniform(-1, 1, 2)
        return self.at.copy(), {}

    def step(self, action):
        self.at = self.at + action
        return self.at.copy(), -float(np.sum((self.at - 2) ** 2)), bool((np.abs(self.at) > 3).any()), False, {}


def point_model(obs, actions):
    after = obs + actions
    return after, -np.sum((after - 2) ** 2, axis=1), (np.abs(after) > 3).any(axis=1)


@pytest.fixture
def vec():
    with corral.make_vec(ReplayPoint, 3, "local", seed=1) as made:
        yield made


def attached(vec, **settings):
    policy = Mppi(**{"horizon": 5, "samples": 8, "temperature": 0.7, **settings})
    policy.bind_envs(vec)
    return policy


def literal(plan, tried, start, settings):
    """The update as the paper writes it, sample by sample; S is a cost."""
    samples, horizon, _ = tried.shape
    costs = np.zeros(samples)
    for k in range(samples):
        at, going = start.copy(), True
        for t in range(horizon):
            at = at + tried[k, t]
            if going:
                costs[k] -= settings["discount"] ** t * -float(np.sum((at - 2) ** 2))
            going = going and not (np.abs(at) > 3).any()
        if going:
            costs[k] -= settings["discount"] ** horizon * float(at[0])
    weights = np.array([np.exp(-(cost - costs.min()) / settings["temperature"]) for cost in costs])
    weights /= weights.sum()
    new = plan.copy()
    for t in range(horizon):
        for k in range(samples):
            new[t] += weights[k] * (tried[k, t] - plan[t])
    return new


@pytest.mark.parametrize("where", ["states", "model"])
def test_the_update_is_the_papers(vec, where, monkeypatch):
    settings = {"temperature": 0.7, "discount": 0.9}
    tried = []
    draw = Mppi._draw

    def note(self, n, factor):
        tried.append(draw(self, n, factor))
        return tried[-1]

    monkeypatch.setattr(Mppi, "_draw", note)
    model = point_model if where == "model" else None
    policy = attached(vec, model=model, value=lambda obs: obs[:, 0], smoothness=0.5, **settings)
    assert isinstance(policy, PlanningPolicy)
    batch, state = vec.recv(), policy.initial_state(3)
    low, high = ReplayPoint.action_space.low, ReplayPoint.action_space.high
    for _ in range(4):
        plan = np.where(batch.first[:, None, None], (low + high) / 2, state["plan"])
        action, state, _ = policy.act(batch.obs, state, batch.first)
        for row in range(3):
            samples = np.clip(plan[row] + tried[-1][row], low, high)
            new = literal(plan[row], samples, batch.obs[row], settings)
            np.testing.assert_allclose(action[row], new[0], atol=1e-12)
            np.testing.assert_allclose(state["plan"][row], np.concatenate([new[1:], new[-1:]]), atol=1e-12)
        vec.send(batch.env_ids, action)
        batch = vec.recv()
    assert state["env"].tolist() == [0, 1, 2]


def test_plan_restarts_only_with_its_episode(vec):
    policy, again = attached(vec, seed=4), attached(vec, seed=4)
    batch, old = vec.recv(), policy.initial_state(3)
    old["plan"] += 0.2
    first = np.array([True, False, True])
    expected = again.initial_state(3)
    expected["plan"][1] += 0.2
    ours, _, _ = policy.act(batch.obs, old, first)
    theirs, _, _ = again.act(batch.obs, expected, np.zeros(3, np.bool_))
    np.testing.assert_array_equal(ours, theirs)


def test_rows_may_come_in_any_company(vec):
    policy, batch = attached(vec, samples=400, temperature=0.05), vec.recv()
    vec.environment(2).unwrapped.at = np.array([2.9, 2.0])  # beyond the goal, where the others are before it
    state = policy.initial_state(3)
    some = {"env": state["env"][[2]], "plan": state["plan"][[2]]}
    alone, after, _ = policy.act(batch.obs[[2]], some, batch.first[[2]])
    together, _, _ = policy.act(batch.obs, state, batch.first)
    assert after["env"].tolist() == [2]
    for action in (alone[0], together[2]):
        assert action[0] < -0.3
    assert (together[:2, 0] > 0.3).all()


def test_planning_leaves_environments_as_they_were(vec):
    policy, batch = attached(vec), vec.recv()
    before = [vec.environment(i).unwrapped.at.copy() for i in range(3)]
    policy.act(batch.obs, policy.initial_state(3), batch.first)
    for i in range(3):
        np.testing.assert_array_equal(vec.environment(i).unwrapped.at, before[i])


def test_actions_are_within_bounds_of_the_environments_dtype():
    class Boxes(ReplayPoint):
        action_space = gs.Dict({"far": gs.Box(-1, 1, (1, 1), np.float32), "up": gs.Box(0, 0.5, (1,), np.float64)})

        def step(self, action):
            return super().step(np.array([action["far"][0, 0], action["up"][0]], np.float64))

    with corral.make_vec(Boxes, 2, "local") as vec:
        policy, batch = attached(vec, noise=5.0), vec.recv()
        action, _, _ = policy.act(batch.obs, policy.initial_state(2), batch.first)
        assert action["far"].shape == (2, 1, 1)
        assert (action["far"].dtype, action["up"].dtype) == (np.float32, np.float64)
        assert (np.abs(action["far"]) <= 1).all()
        assert ((action["up"] >= 0) & (action["up"] <= 0.5)).all()
        vec.send(batch.env_ids, action)
        vec.recv()


@pytest.mark.parametrize("smoothness", [0.0, 0.8])
def test_noise_has_its_covariance_at_every_step(vec, smoothness):
    covariance = np.array([[0.5, 0.2], [0.2, 0.3]])
    policy = attached(vec, noise=covariance, smoothness=smoothness, horizon=4)
    noise = policy._draw(40_000, policy._bound_box().factor)[:, 0]
    for t in range(4):
        np.testing.assert_allclose(np.cov(noise[:, t].T), covariance, atol=0.02)
    between = np.mean(noise[:, 1, 0] * noise[:, 2, 0]) / 0.5
    assert abs(between - smoothness) < 0.03


def test_value_of_a_trained_policy_is_used(vec):
    model = ActorCritic(
        EnvSpec(gs.Box(-9, 9, (2,), np.float32), ReplayPoint.action_space), NetConfig(hidden_sizes=(8,))
    )
    batch = vec.recv()
    batch.obs = batch.obs.astype(np.float32)

    def by_hand(obs):
        import torch

        with torch.no_grad():
            return model(torch.as_tensor(np.asarray(obs, np.float32)))[1]

    def float_model(obs, actions):
        after, reward, over = point_model(obs, actions)
        return after.astype(np.float32), reward, over

    found = []
    for value in (model, by_hand, None):
        policy = attached(vec, value=value, model=float_model, horizon=1)
        found.append(policy.act(batch.obs, policy.initial_state(3), batch.first)[0])
    np.testing.assert_allclose(found[0], found[1], atol=1e-6)
    assert np.abs(found[0] - found[2]).max() > 1e-4


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"horizon": 0}, "horizon must be an integer of at least 1"),
        ({"samples": 1}, "samples must be an integer of at least 2"),
        ({"temperature": 0.0}, "temperature must be above 0"),
        ({"smoothness": 1.0}, "smoothness"),
        ({"noise": [1.0, 1.0, 1.0]}, "does not fit 2 action dimensions"),
        ({"noise": -1.0}, "above 0"),
        ({"noise": [[1.0, 2.0], [2.0, 1.0]]}, "positive definite"),
        ({"value": 3}, "a function of observations"),
    ],
)
def test_unsupported_envs_are_refused_with_remedy(vec, settings, words):
    with pytest.raises(UserError, match=words):
        attached(vec, **settings)


def test_actions_that_are_not_continuous_are_for_search():
    for space in (gs.Discrete(3), gs.Dict({"a": gs.Box(-1, 1, (1,)), "b": gs.Discrete(2)})):
        env = type("Other", (ReplayPoint,), {"action_space": space})
        with corral.make_vec(env, 1, "local") as vec, pytest.raises(UserError, match=r"use corral\.Search"):
            Mppi().bind_envs(vec)
    with pytest.raises(UserError, match=r"bind_envs\(vec\)"):
        Mppi().initial_state(1)


@pytest.mark.slow
def test_pendulum_swings_up_with_the_true_simulator():
    with corral.make_vec("Pendulum-v1", 4, "local") as vec:
        result = evaluate_policy(vec, Mppi(horizon=15, samples=16), episodes=4, seed=0)
    assert result.mean > -250
    assert result.lengths == (200,) * 4


@pytest.mark.parametrize(
    "settings", [{"discount": 1.1}, {"temperature": float("nan")}, {"horizon": 2.5}, {"samples": 8.0}]
)
def test_invalid_settings_are_refused(settings):
    with pytest.raises(UserError):
        Mppi(**settings)


def test_not_finite_returns_name_their_source(vec):
    def nowhere(obs, actions):
        return obs, np.full(len(obs), np.nan), np.zeros(len(obs), np.bool_)

    def wrong_count(obs):
        return np.zeros(3)

    vec.recv()
    for settings in ({"model": nowhere}, {"value": lambda obs: np.full(len(obs), np.inf)}, {"value": wrong_count}):
        policy = attached(vec, **settings)
        with pytest.raises(UserError, match=r"NaN or infinity|3 values for"):
            policy.act(np.zeros((3, 2)), policy.initial_state(3), np.ones(3, np.bool_))
