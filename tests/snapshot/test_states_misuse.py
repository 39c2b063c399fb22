"""States that are asked for too late, too much or of the wrong thing: a sentence each, and nothing is done."""

import gymnasium
import numpy as np
import pytest
from helpers.row_cartpole import RowCartPole
from helpers.row_cartpole import make as make_row_cartpole
from helpers.snapshot_envs import Walk

import corral
from corral.core.errors import UserError


def test_closed_states_are_refused():
    env = Walk()
    env.reset(seed=0)
    snapshots = corral.Snapshots(env)
    here = snapshots.save()
    snapshots.close()
    snapshots.close()
    for call in (snapshots.save, lambda: snapshots.load(here), lambda: snapshots.expand(here, 0)):
        with pytest.raises(UserError, match="have been closed: make new Snapshots"):
            call()
    snapshots.drop(here)
    env.step(0)


@pytest.mark.parametrize("shown", [np.zeros(7), "x", None])
def test_invalid_observation_is_refused_before_search(shown):
    env = gymnasium.make("CartPole-v1")
    env.reset(seed=0)
    with corral.Snapshots(env) as snapshots, pytest.raises(UserError, match=r"shape \(4,\), got|no observation"):
        snapshots.set_obs(shown)


def test_invalid_memory_limit_is_refused():
    with pytest.raises(UserError, match="memory_mb must be above 0"):
        corral.Snapshots("CartPole-v1", memory_mb=float("nan"))


class Pictures(Walk):
    """Remembers a picture of another kind at every step."""

    kind = bytes

    def reset(self, *, seed=None, options=None):
        self._picture = self._draw(0)
        return super().reset(seed=seed, options=options)

    def step(self, action):
        self._picture = self._draw(self._t + 1)
        return super().step(action)

    def _draw(self, number):
        return self.kind([number]) * 100_000


class Tensors(Pictures):
    def _draw(self, number):
        return pytest.importorskip("torch").full((100_000,), number, dtype=pytest.importorskip("torch").uint8)


class ByteArrays(Pictures):
    kind = bytearray


@pytest.mark.parametrize("kind", [Pictures, ByteArrays, Tensors])
def test_state_memory_is_bounded_for_every_keeper(kind):
    with corral.Snapshots(kind, memory_mb=1.0) as snapshots:
        here = snapshots.save()
        assert snapshots.states.nbytes > 100_000
        with pytest.raises(UserError, match="there is no more room"):
            snapshots.expand([here] * 10, [0] * 10)


def test_a_row_whose_episode_has_ended_is_not_stepped_from():
    with corral.Snapshots(lambda: gymnasium.wrappers.TimeLimit(RowCartPole(), 2)) as snapshots:
        one = snapshots.expand(snapshots.save(), 0)
        two = snapshots.expand(one.children, [0])
        assert two.truncated[0]
        with pytest.raises(UserError, match="the end of an episode"):
            snapshots.expand(two.children, [0])
        with pytest.raises(UserError, match="the end of an episode"):
            snapshots.states.rollout(two.children, np.zeros((1, 1), np.int64))
    with corral.Snapshots(make_row_cartpole) as snapshots:
        steps = snapshots.expand(snapshots.save(), 0)
        while not steps.terminated[0]:
            steps = snapshots.expand(steps.children, [0])
        with pytest.raises(UserError, match="the end of an episode"):
            snapshots.expand(steps.children, [0])
