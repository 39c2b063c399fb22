"""What came of every step of an episode, and the store that replays it."""

import numpy as np
import pytest

from corral.acting.sampler import Sampler
from corral.core.errors import RunFailed, UserError
from corral.core.types import DataSpec
from corral.data.game_replay import GameReplay
from corral.data.make import make_store
from corral.ops.returns import outcomes
from corral.testing.contracts.store import fragments
from corral.testing.envs import CountingEnv


def literal(reward, to_play, gamma):
    return [
        sum(gamma ** (k - t) * reward[k] * (1 if to_play[k] == to_play[t] else -1) for k in range(t, len(reward)))
        for t in range(len(reward))
    ]


@pytest.mark.parametrize("gamma", [1.0, 0.9])
def test_outcome_is_return_of_the_acting_player(gamma):
    rng = np.random.default_rng(0)
    for length in (1, 2, 9, 40):
        reward, to_play = rng.normal(size=length), rng.integers(2, size=length)
        np.testing.assert_allclose(outcomes(reward, to_play, gamma), literal(reward, to_play, gamma))


def test_the_winner_of_a_game_and_the_loser_see_it_so():
    np.testing.assert_array_equal(
        outcomes(np.array([0, 0, 0, 0, 1.0]), np.array([0, 1, 0, 1, 0]), 1.0), [1, -1, 1, -1, 1]
    )


DATA = DataSpec("episode", 1, 8, "replay", ("mark",), samples_per_insert=2.0, capacity=64, min_size=16)


def played(store, count, length=5, num_envs=3):
    """Fragments of environments that count, with an extra that names each step."""
    spec, made = fragments(CountingEnv, length, count, num_envs)
    for traj in made:
        traj.extras["mark"] = traj.obs[:-1, :, 2].astype(np.int64)
        traj.extras["to_play"] = (traj.obs[:-1, :, 2].astype(np.int64) % 2).astype(np.int8)
    return spec, made


def make(data=DATA, num_envs=3, seed=0):
    spec, _ = fragments(CountingEnv, 1, 1, num_envs)
    return make_store(spec, data, num_envs, seed)


def test_it_is_the_store_of_replayed_episodes():
    assert isinstance(make(), GameReplay)


def test_batch_has_outcomes_of_finished_episodes():
    store = make()
    _, made = played(store, 12)
    for traj in made:
        store.put(traj)
    assert store.ready()
    batch = store.get().batch
    assert len(batch.outcome) == 8
    np.testing.assert_array_equal(batch.extras["mark"], batch.obs[:, 2])
    assert set(batch.extras) == {"mark"}


def test_outcomes_are_those_of_whole_episodes_across_fragments():
    """Each step of a CountingEnv is known by its observation; its episode is put together here once more."""
    spec, made = fragments(CountingEnv, 3, 20, 2)
    store = make_store(spec, DataSpec("episode", 1, 400, "replay", (), samples_per_insert=99.0, capacity=500), 2)
    episodes = {}
    for traj in made:
        traj.extras["to_play"] = (traj.obs[:-1, :, 2].astype(np.int64) % 2).astype(np.int8)
        store.put(traj)
        for t in range(traj.shape[0]):
            for b in range(2):
                key = traj.obs[t, b, 0], traj.obs[t, b, 1]
                steps = episodes.setdefault(key, [])
                steps.append((traj.obs[t, b, 2], traj.reward[t, b], traj.done[t, b]))
    expected = {}
    for key, steps in episodes.items():
        if steps[-1][2] and steps[0][0] == 0:
            found = literal([s[1] for s in steps], [int(s[0]) % 2 for s in steps], 1.0)
            expected |= {(*key, step[0]): value for step, value in zip(steps, found, strict=True)}
    batch = store.get().batch
    seen = {tuple(obs[:3]) for obs in batch.obs.tolist()}
    assert seen <= set(expected)
    for obs, outcome in zip(batch.obs.tolist(), batch.outcome.tolist(), strict=True):
        assert outcome == pytest.approx(expected[tuple(obs[:3])])


def test_batches_follow_inserted_steps():
    store = make()
    _, made = played(store, 30)
    drawn = 0
    for traj in made:
        store.put(traj)
        while store.ready():
            store.get()
            drawn += 8
        assert drawn <= max(0.0, 2.0 * (store.limiter.inserted - 16))
    assert drawn > 0
    assert store.metrics()["store/size"] == 64


def test_empty_game_replay_is_not_ready():
    with pytest.raises(RunFailed, match="ready"):
        make().get()


def test_game_replay_continues_from_its_state():
    store, again = make(seed=3), make(seed=4)
    _, made = played(store, 24)
    for traj in made[:12]:
        store.put(traj)
    again.load_state_dict(store.state_dict())
    for traj in made[12:]:
        for each in (store, again):
            each.put(traj)
        while store.ready():
            one, other = store.get().batch, again.get().batch
            np.testing.assert_array_equal(one.obs, other.obs)
            np.testing.assert_array_equal(one.outcome, other.outcome)


def test_another_capacity_is_refused():
    store = make()
    _, made = played(store, 24)
    for traj in made:
        store.put(traj)
    small = make(DataSpec("episode", 1, 8, "replay", ("mark",), capacity=32, min_size=16))
    with pytest.raises(UserError, match="same settings"):
        small.load_state_dict(store.state_dict())


def test_a_sampler_s_extras_arrive(tmp_path):
    class Marks:
        def initial_state(self, n):
            return None

        def act(self, obs, state, first):
            return np.zeros(len(first), np.int64), None, {"mark": obs[:, 2].astype(np.int64)}

    with Sampler(CountingEnv, Marks(), 3, "local") as sampler:
        store = make()
        rollouts = sampler.rollouts(5)
        while not store.ready():
            store.put(next(rollouts))
        batch = store.get().batch
    np.testing.assert_array_equal(batch.extras["mark"], batch.obs[:, 2])
