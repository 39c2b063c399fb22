"""Environments that build or change parts of themselves at every reset: states are of what is there now."""

import gymnasium
import numpy as np
import pytest
from gymnasium.envs.classic_control import CartPoleEnv

import corral


class AnotherInside(gymnasium.Wrapper):
    """Every episode has an environment of its own."""

    resets = 0

    def reset(self, **kwargs):
        self.resets += 1
        self.env = CartPoleEnv()
        self.env.gravity = 5.0 + self.resets
        return self.env.reset(**kwargs)


class OtherSpaces(gymnasium.Wrapper):
    """Every episode has spaces of its own, and draws from them."""

    def reset(self, **kwargs):
        self.dice = self.noise_space = gymnasium.spaces.Discrete(1000)
        self.noise_space.seed(3)
        return super().reset(**kwargs)

    def step(self, action):
        obs, _, *rest = super().step(action)
        return obs, float(self.noise_space.sample()), *rest


class OtherBody(gymnasium.Wrapper):
    """Every episode has another mass and another gravity."""

    def reset(self, **kwargs):
        found = super().reset(**kwargs)
        model = self.unwrapped.model
        model.body_mass[1:] *= self.np_random.uniform(0.5, 2)
        model.opt.gravity[2] = -self.np_random.uniform(2, 20)
        model.opt.timestep *= 0.95
        return found


def another_inside():
    return AnotherInside(CartPoleEnv())


def other_spaces():
    return OtherSpaces(CartPoleEnv())


def other_body():
    pytest.importorskip("mujoco")
    return OtherBody(gymnasium.make("InvertedDoublePendulum-v5"))


@pytest.mark.parametrize("given", ["instance", "factory"])
@pytest.mark.parametrize("make", [another_inside, other_spaces, other_body])
def test_states_step_with_parts_of_their_episode(make, given):
    states, real = [], []
    env = make()
    env.reset(seed=0)
    with corral.Snapshots(env if given == "instance" else make, rng="replay") as snapshots:
        env = snapshots.env
        env.action_space.seed(1)
        for episode in range(3):
            env.reset(seed=episode)
            for _ in range(3):
                action = env.action_space.sample()
                states.append((snapshots.save(), action))
                obs, reward, *_ = env.step(action)
                real.append([*obs, reward])
        planned = []
        for state, action in states:  # of the episodes before, too
            steps = snapshots.expand(state, action)
            planned.append([*steps.obs[0], steps.reward[0]])
    np.testing.assert_array_equal(np.array(planned), np.array(real))


def test_loaded_state_restores_replaced_mass():
    with corral.Snapshots(other_body, rng="replay") as snapshots:
        env = snapshots.env
        env.reset(seed=0)
        here, action = snapshots.save(), np.full(1, 0.3, np.float32)
        after = env.step(action)[0]
        env.reset(seed=1)
        assert not np.array_equal(env.step(action)[0], after)
        snapshots.load(here)
        np.testing.assert_array_equal(env.step(action)[0], after)
