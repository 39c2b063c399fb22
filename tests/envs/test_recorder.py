"""Environments and samplers that go on in another process as if nothing had happened, and those that cannot."""

import copy
import itertools
import json
import os
import random
import signal
from dataclasses import fields
from functools import partial

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import SyncVectorEnv
from gymnasium.wrappers import TimeLimit

import corral
from corral.envs.normalize import NormalizedVecEnv
from corral.envs.stepping import recorder as restore
from corral.envs.wrappers import ClipReward, EpisodicLife, NoopReset
from corral.testing import CountingEnv, FaultyEnv, LivesEnv, TreeEnv

STEPS, PARTS = 13, 3


class WindyEnv(gymnasium.Env):
    """A walk that `np_random` pushes about, of an unforeseeable length."""

    observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float64)
    action_space = spaces.Box(-1, 1, (2,), np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._at = self.np_random.normal(size=2)
        return self._at.copy(), {}

    def step(self, action):
        self._at += action + self.np_random.normal(size=2)
        return self._at.copy(), float(self._at.sum()), bool(self.np_random.random() < 0.1), False, {}


class UnseededEnv(WindyEnv):
    """Draws from a generator that no seed reaches."""

    def draw(self):
        return random.random()

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._at[0] += self.draw()
        return self._at.copy(), {}

    def step(self, action):
        _, *rest = super().step(action)
        self._at[0] += self.draw()
        return self._at.copy(), *rest


class ClockEnv(UnseededEnv):
    """Draws from the machine."""

    def draw(self):
        return int.from_bytes(os.urandom(4), "little") / 2**32


class OwnGeneratorEnv(UnseededEnv):
    """Draws from a generator of its own, which no seed reaches, but which can be read."""

    def __init__(self):
        self._own = np.random.default_rng()

    def draw(self):
        return self._own.random()


class DeclaringEnv(ClockEnv):
    """Cannot be replayed, and says its state."""

    def state_dict(self):
        return {"at": self._at.copy(), "generator": dict(self.np_random.bit_generator.state)}

    def load_state_dict(self, state):
        self._at = state["at"].copy()
        self.np_random.bit_generator.state = state["generator"]

    def draw(self):
        return 0.0 if self._at[1] < 0 else 1.0


class OddlyDeclaringEnv(DeclaringEnv):
    def state_dict(self):
        return {"rng": self.np_random}


class TrapEnv(CountingEnv):
    """Kills its process in the step after `path` has come into being."""

    def __init__(self, path):
        super().__init__()
        self._path = path

    def step(self, action):
        if self._path.exists():
            os.kill(os.getpid(), signal.SIGKILL)
        return super().step(action)


def lives(length=4):
    return ClipReward(EpisodicLife(LivesEnv(length)))


def noops():
    return NoopReset(LivesEnv(20), 10)


def limited(cls):
    return TimeLimit(cls(), 17)


class Draws:
    """Draws actions from the space, and remembers what it drew last, in two pieces."""

    def __init__(self, spec, seed=0):
        self._layout = spec.action
        self._space = copy.deepcopy(spec.action_space)
        self._space.seed(seed)
        import torch  # not above: workers import this file

        self._tensor = torch.as_tensor

    def initial_state(self, n):
        return {"count": np.zeros(n, np.int64), "more": (self._tensor(np.zeros((n, 2), np.float32)),)}

    def act(self, obs, state, first):
        rows = [self._layout.flatten(self._space.sample()) for _ in first]
        action = self._layout.unflatten([np.stack(leaf) for leaf in zip(*rows, strict=True)])
        count = np.where(first, 0, state["count"]) + 1
        more = self._tensor(state["more"][0]) + 0.1
        return action, {"count": count, "more": (more,)}, {"count": count, "more": more}


def through_a_file(state):
    """What a checkpoint does: arrays are kept, everything else becomes JSON."""
    arrays = []

    def put(node):
        if isinstance(node, dict):
            return {key: put(value) for key, value in node.items()}
        if isinstance(node, np.ndarray):
            arrays.append(node.copy())
            return {"$": len(arrays) - 1}
        return node

    text = json.dumps(put(state))
    return json.loads(text, object_hook=lambda node: arrays[node["$"]] if "$" in node else node)


def sample(sampler, count=PARTS):
    rollouts = sampler.rollouts(STEPS)
    return [next(rollouts) for _ in range(count)]


def make(env, backend="local", num_envs=5, **kwargs):
    vec = corral.make_vec(env, num_envs, backend, 2 if backend == "process" else None, seed=3, **kwargs)
    vec.record_episodes()
    return vec


def straight(make_vec, parts=2 * PARTS):
    with make_vec() as vec:
        sampler = corral.Sampler(vec, Draws(vec.spec))
        return sample(sampler, parts), sampler.episodes.state_dict()


def with_a_break(make_vec, breaks=1):
    """The same, but saved, closed and loaded after each `PARTS` trajectories; and who was restarted."""
    trajs, state, policy, restarted = [], None, None, []
    for _ in range(breaks + 1):
        with make_vec() as vec:
            policy = policy or Draws(vec.spec)
            sampler = corral.Sampler(vec, policy)
            if state is not None:
                restarted += sampler.load_state_dict(state)
            trajs += sample(sampler)
            state = through_a_file(sampler.state_dict())
    return trajs, sampler.episodes.state_dict(), restarted


def same(a, b):
    if isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            same(a[key], b[key])
    elif isinstance(a, (list, tuple)):
        for x, y in zip(a, b, strict=True):
            same(x, y)
    else:
        np.testing.assert_array_equal(a, b)


def same_trajectories(a, b):
    assert len(a) == len(b)
    for x, y in zip(a, b, strict=True):
        for field in fields(x):
            same(getattr(x, field.name), getattr(y, field.name))


ENVS = {
    "CartPole-v1": "CartPole-v1",
    "Pendulum-v1": "Pendulum-v1",
    "FrozenLake-v1": "FrozenLake-v1",
    "np_random": WindyEnv,
    "counting": partial(CountingEnv, 5, "mixed"),
    "tree": TreeEnv,
    "lives": lives,
    "no-ops": noops,
    "time limit": partial(limited, WindyEnv),
    "declared": DeclaringEnv,
    "declared inside a time limit": partial(limited, DeclaringEnv),
}


@pytest.mark.parametrize("backend", ["local", "process"])
@pytest.mark.parametrize("env", ENVS.values(), ids=ENVS)
def test_a_run_with_a_break_is_the_same_run_bit_by_bit(env, backend):
    expected, episodes = straight(partial(make, env, backend))
    trajs, resumed_episodes, restarted = with_a_break(partial(make, env, backend))
    assert restarted == []
    same_trajectories(trajs, expected)
    same(resumed_episodes, episodes)


@pytest.mark.parametrize("backend", ["local", "process"])
def test_unseeded_generator_continues(backend):
    with make(OwnGeneratorEnv, backend) as vec:
        sampler = corral.Sampler(vec, Draws(vec.spec))
        sample(sampler)
        state, policy = sampler.state_dict(), Draws(vec.spec, seed=1)
        sampler._policy = policy
        expected = sample(sampler)
    with make(OwnGeneratorEnv, backend) as vec:
        sampler = corral.Sampler(vec, Draws(vec.spec, seed=1))
        assert sampler.load_state_dict(through_a_file(state)) == []
        same_trajectories(sample(sampler), expected)


def test_a_run_with_several_breaks_is_the_same_run():
    expected, episodes = straight(partial(make, "CartPole-v1"), 4 * PARTS)
    trajs, resumed_episodes, restarted = with_a_break(partial(make, "CartPole-v1"), breaks=3)
    assert restarted == []
    same_trajectories(trajs, expected)
    same(resumed_episodes, episodes)


@pytest.mark.parametrize("env", ["CartPole-v1", "Pendulum-v1", WindyEnv, TreeEnv])
def test_long_after_the_seed_the_current_game_alone_is_repeated(env, monkeypatch):
    monkeypatch.setattr(restore, "_SINCE_SEED_STEPS", 0)
    expected, episodes = straight(partial(make, env))
    trajs, resumed_episodes, restarted = with_a_break(partial(make, env), breaks=1)
    assert restarted == []
    same_trajectories(trajs, expected)
    same(resumed_episodes, episodes)


def test_the_lives_of_one_game_are_repeated_together(monkeypatch):
    monkeypatch.setattr(restore, "_SINCE_SEED_STEPS", 0)
    long_game = partial(lives, 20)  # of which no second one begins while we look
    expected, _ = straight(partial(make, long_game))
    trajs, _, restarted = with_a_break(partial(make, long_game))
    assert restarted == []
    assert trajs[PARTS - 1].obs[-1, 0, 2] > 20
    same_trajectories(trajs, expected)


def test_state_kept_between_episodes_is_detected(monkeypatch):
    monkeypatch.setattr(restore, "_SINCE_SEED_STEPS", 0)
    *_, restarted = with_a_break(partial(make, partial(CountingEnv, 5)))
    assert restarted == [0, 1, 2, 3, 4]


def test_a_game_that_is_too_long_is_not_kept(monkeypatch):
    monkeypatch.setattr(restore, "_GAME_STEPS", 20)
    with make("Pendulum-v1") as vec:
        sampler = corral.Sampler(vec, Draws(vec.spec))
        sample(sampler)
        assert sampler.state_dict()["vec"]["envs"] == {}
    assert with_a_break(partial(make, "Pendulum-v1"))[2] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("env", "backend"),
    [
        (UnseededEnv, "local"),  # a worker's generators are seeded, so that one could repeat it
        (ClockEnv, "local"),
        (ClockEnv, "process"),
        (OddlyDeclaringEnv, "process"),
    ],
)
def test_unrestorable_env_starts_new_episode(env, backend):
    factories = [CountingEnvOfTwo, env, CountingEnvOfTwo]
    trajs, episodes, restarted = with_a_break(partial(make, factories, backend))
    assert restarted == [1]
    after = trajs[PARTS]
    assert after.first[0].tolist() == [trajs[PARTS - 1].first[-1, 0], True, trajs[PARTS - 1].first[-1, 2]]
    assert (after.obs[0, 1] != trajs[PARTS - 1].obs[-1, 1]).any()
    np.testing.assert_array_equal(after.obs[0, [0, 2]], trajs[PARTS - 1].obs[-1, [0, 2]])
    ended = [np.concatenate([t.done[:, b] for t in trajs]).nonzero()[0] for b in range(3)]
    assert episodes["finished"] == sum(map(len, ended))
    cut = PARTS * STEPS
    lengths = [int(length) for env_id, length in zip(*_columns(episodes), strict=True) if env_id == 1]
    starts = sorted({0, cut, *(ended[1] + 1)})
    assert lengths == [b - a for a, b in itertools.pairwise(starts) if b - 1 in ended[1]]


class CountingEnvOfTwo(WindyEnv):
    """Has WindyEnv's spaces, and counts."""

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._at = np.zeros(2)
        return self._at.copy(), {}

    def step(self, action):
        self._at += 1
        return self._at.copy(), 1.0, bool(self._at[0] >= 7), False, {}


def _columns(episodes):
    return episodes["recent"]["env_id"].tolist(), episodes["recent"]["length"].tolist()


@pytest.mark.parametrize("backend", ["local", "process"])
def test_saving_changes_nothing(backend):
    expected, _ = straight(partial(make, "FrozenLake-v1", backend))
    with make("FrozenLake-v1", backend) as vec:
        sampler = corral.Sampler(vec, Draws(vec.spec))
        rollouts = sampler.rollouts(STEPS)
        trajs = []
        for _ in range(2 * PARTS):
            trajs.append(next(rollouts))
            sampler.state_dict()
    same_trajectories(trajs, expected)


def test_a_state_may_be_taken_before_the_first_trajectory():
    expected, _ = straight(partial(make, "CartPole-v1"), PARTS)
    with make("CartPole-v1") as vec:
        state = corral.Sampler(vec, Draws(vec.spec)).state_dict()
    with make("CartPole-v1") as vec:
        sampler = corral.Sampler(vec, Draws(vec.spec))
        assert sampler.load_state_dict(state) == []
        same_trajectories(sample(sampler), expected)


@pytest.mark.parametrize("backend", ["local", "process"])
def test_normalised_envs_keep_their_statistics(backend):
    def make_normalised():
        return NormalizedVecEnv(make("Pendulum-v1", backend))

    expected, _ = straight(make_normalised)
    trajs, _, restarted = with_a_break(make_normalised)
    assert restarted == []
    same_trajectories(trajs, expected)


def test_global_generators_of_workers_continue(tmp_path):
    def finals(parts):
        state = None
        for steps in parts:
            with make(GlobalEnv, "process", 2) as vec:
                batch = vec.recv() if state is None else None
                if state is not None:
                    assert vec.load_state_dict(through_a_file(state)) == []
                for _ in range(steps):
                    vec.send(np.arange(2), np.zeros(2, np.int64))
                    batch = vec.recv()
                state = vec.state_dict()
        return batch.raw_reward

    np.testing.assert_array_equal(finals([4, 4]), finals([8]))


class GlobalEnv(CountingEnv):
    """Draws from its process's generators what no observation shows."""

    def __init__(self):
        super().__init__(0)

    def step(self, action):
        obs, _, *rest = super().step(action)
        return obs, random.random() + np.random.random(), *rest


@pytest.mark.parametrize("backend", ["local", "process"])
def test_restarted_envs_and_fault_counts_are_restored(backend):
    envs = [partial(FaultyEnv, "raise"), CountingEnv]
    expected, episodes = straight(partial(make, envs, backend))
    trajs, resumed_episodes, restarted = with_a_break(partial(make, envs, backend))
    assert restarted == []
    same_trajectories(trajs, expected)
    same(resumed_episodes, episodes)
    with make(envs, backend) as vec:
        sampler = corral.Sampler(vec, Draws(vec.spec))
        sample(sampler)
        count, state = vec.restarts, sampler.state_dict()
    with make(envs, backend) as vec:
        corral.Sampler(vec, Draws(vec.spec)).load_state_dict(state)
        assert vec.restarts == count > 0


def test_a_worker_that_dies_while_loading_starts_new_episodes(tmp_path):
    path = tmp_path / "trap"
    envs = [CountingEnv, partial(TrapEnv, path)]
    with make(envs, "process") as vec:
        sampler = corral.Sampler(vec, Draws(vec.spec))
        sample(sampler)
        state = sampler.state_dict()
    path.touch()
    with make(envs, "process") as vec:
        sampler = corral.Sampler(vec, Draws(vec.spec))
        assert sampler.load_state_dict(state) == [1]
        path.unlink()
        (traj,) = sample(sampler, 1)
        assert traj.first[0, 1]
        assert not traj.faulty.any()
        assert vec.restarts == 1


def test_dead_worker_is_left_out_when_saving():
    with make(CountingEnv, "process", 4) as vec:
        sampler = corral.Sampler(vec, Draws(vec.spec))
        sample(sampler)
        os.kill(vec.worker_pids[1], signal.SIGKILL)
        state = sampler.state_dict()
        assert set(state["vec"]["envs"]) == {"0", "2"}
        (traj,) = sample(sampler, 1)  # and the run goes on as usual
        assert traj.faulty.any(axis=0).tolist() == [False, True, False, True]
    with make(CountingEnv, "process", 4) as vec:
        assert corral.Sampler(vec, Draws(vec.spec)).load_state_dict(state) == [1, 3]


def test_a_vector_environment_restarts_everything_with_new_seeds():
    def make_vector():
        return corral.make_vec(SyncVectorEnv([partial(gymnasium.make, "CartPole-v1")] * 3))

    trajs, _, restarted = with_a_break(make_vector, breaks=2)
    assert restarted == [0, 1, 2] * 2
    starts = [trajs[k * PARTS].obs[0].tobytes() for k in range(3)]
    assert len(set(starts)) == 3


def test_nothing_is_recorded_unless_asked_for():
    with corral.make_vec("CartPole-v1", 3, "local") as vec:
        sampler = corral.Sampler(vec, Draws(vec.spec))
        sample(sampler)
        state = sampler.state_dict()
    assert state["vec"]["envs"] == {}
    with make("CartPole-v1", num_envs=3) as vec:
        assert corral.Sampler(vec, Draws(vec.spec)).load_state_dict(state) == [0, 1, 2]


def test_misuse_is_refused():
    with make("CartPole-v1", num_envs=3) as vec:
        with pytest.raises(corral.UserError, match="idle"):
            vec.state_dict()
        state = corral.Sampler(vec, Draws(vec.spec)).state_dict()
        with pytest.raises(corral.UserError, match="just been made"):
            vec.load_state_dict(state["vec"])
        vec.send(np.arange(3), np.zeros(3, np.int64))
        with pytest.raises(corral.UserError, match="recv"):
            vec.state_dict()
    for env, num_envs, words in [
        ("CartPole-v1", 4, "num_envs"),
        ("Acrobot-v1", 3, "observation"),
        ("CartPole-v0", 3, "env"),
    ]:
        with (
            make(env, num_envs=num_envs) as vec,
            pytest.raises(corral.UserError, match=f"differ in .*{words}"),
        ):
            corral.Sampler(vec, Draws(vec.spec)).load_state_dict({**state, "policy": corral_policy_state(vec)})
    with make("CartPole-v1", num_envs=3) as vec, pytest.raises(corral.UserError, match="another memory"):
        corral.Sampler(vec, lambda obs: np.zeros(len(obs), np.int64)).load_state_dict(state)
    with make("CartPole-v1", num_envs=3) as vec:
        sampler = corral.Sampler(vec, Draws(vec.spec))
        sample(sampler)
        with pytest.raises(corral.UserError, match="not sampled yet"):
            sampler.load_state_dict(state)


def corral_policy_state(vec):
    return {"0": np.zeros(vec.num_envs, np.int64), "1": np.zeros((vec.num_envs, 2), np.float32)}
