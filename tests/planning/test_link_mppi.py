"""MPPI on a C++ simulator: rollouts by one message to each, at the score that the true simulator allows."""

import gymnasium
import numpy as np
import pytest

import corral
from corral.planning.shooting import Mppi
from corral.runs.evaluation.evaluate import evaluate_policy


@pytest.fixture
def pendulums(built):
    with corral.make_vec(
        "tcp://127.0.0.1:0", 20, workers=2, env_kwargs={"sim": f"{built / 'pendulum'} --connect {{url}}", "sims": 2}
    ) as vec:
        yield vec


def test_the_example_is_gymnasiums_pendulum(pendulums):
    gym = gymnasium.make("Pendulum-v1").unwrapped
    gym.reset(seed=0)
    assert pendulums.spec.action_space == gym.action_space
    assert pendulums.spec.observation_space == gym.observation_space
    rng, batch = np.random.default_rng(0), pendulums.recv()
    for t in range(200):
        if t % 20 == 0:  # observations are rounded, and a pendulum that is upside down forgets nothing
            cos, sin, speed = batch.obs[0].astype(np.float64)
            gym.state = np.array([np.arctan2(sin, cos), speed])
        actions = rng.uniform(-2.5, 2.5, (20, 1)).astype(np.float32)
        pendulums.send(batch.env_ids, actions)
        batch = pendulums.recv()
        obs, reward, _, _, _ = gym.step(actions[0])
        np.testing.assert_allclose(batch.next_obs[0], obs, atol=1e-5)
        np.testing.assert_allclose(batch.reward[0], reward, atol=1e-4)
    assert batch.truncated.all()


def test_pendulum_swings_up_in_twenty_episodes_over_the_link(pendulums):
    result = evaluate_policy(pendulums, Mppi(), episodes=20, seed=0)
    assert len(result.returns) == 20
    assert result.mean >= -200
