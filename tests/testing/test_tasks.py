"""Tasks of `corral.testing` that need what they claim to need."""

from __future__ import annotations

import numpy as np
import pytest

from corral.testing.tasks import HybridWalk, MoveOrShoot, StatelessCartPole


def mean_return(env, policy, episodes=400):
    total = 0.0
    for seed in range(episodes):
        obs, _ = env.reset(seed=seed)
        over = False
        while not over:
            obs, reward, terminated, truncated, _ = env.step(policy(obs))
            total, over = total + reward, terminated or truncated
    return total / episodes


def test_move_or_shoot_needs_choice_and_number():
    env = MoveOrShoot()
    env.action_space.seed(0)

    def aim(obs):
        return {"shoot": 1, "by": np.clip(obs[:1] / env.reach, -1, 1)}

    def best(obs):
        near = abs(obs[0]) <= env.reach + env.tolerance
        return aim(obs) if near else {"shoot": 0, "by": np.clip(obs[:1] / env.step_size, -1, 1)}

    assert mean_return(env, best) == pytest.approx(env.best_return, abs=0.02)
    assert mean_return(env, aim) < 0
    assert mean_return(env, lambda obs: {**best(obs), "by": np.zeros(1)}) < 0
    assert mean_return(env, lambda obs: env.action_space.sample()) < -0.5


def test_hybrid_walk_needs_direction_and_distance():
    env = HybridWalk()

    def best(obs):
        return {"sign": int(obs[0] < 0), "far": np.minimum(abs(obs), 1)}

    assert mean_return(env, best) == pytest.approx(env.best_return, abs=0.1)
    assert mean_return(env, lambda obs: {**best(obs), "sign": 1}) < -8
    assert mean_return(env, lambda obs: {**best(obs), "far": np.ones(1)}) < -4
    assert mean_return(env, lambda obs: {**best(obs), "far": np.zeros(1)}) == pytest.approx(-12, abs=0.6)


def test_stateless_cartpole_hides_velocities():
    env, whole = StatelessCartPole(), StatelessCartPole().env
    seen, _ = env.reset(seed=3)
    full, _ = whole.reset(seed=3)
    assert env.observation_space.contains(seen)
    np.testing.assert_array_equal(seen, full[[0, 2]])
