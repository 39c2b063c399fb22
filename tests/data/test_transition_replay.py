"""Replay beside one that stores everything whole: wraps, truncations, stacks, n steps, faults, eviction."""

from dataclasses import replace

import numpy as np
import pytest
from helpers.fragments import MIXED, PIXELS, RGB, VECTOR, NaiveReplay, Stream, assert_rows_equal, fragment
from hypothesis import given, settings
from hypothesis import strategies as st

from corral.core import machine as memory
from corral.core.errors import UserError
from corral.core.types import DataSpec
from corral.data.store import StoreContext
from corral.data.transition_replay import TransitionReplay
from corral.testing.contracts.store import drain


def make(spec, num_envs=2, seed=0, **changes):
    data = DataSpec("transition", 1, 64, "replay", capacity=101, samples_per_insert=50.0, gamma=0.9)
    return TransitionReplay(spec, replace(data, **changes), num_envs, seed)


def play(store, naive, streams, puts, length, pick=None):
    """Feed both, and compare every sample with the naive rows that its keys name."""
    rng = np.random.default_rng(1)
    seen = set()
    for _ in range(puts):
        ids = list(range(len(streams))) if pick is None else pick(rng)
        traj, rows = fragment(streams, ids, length)
        store.put(traj)
        naive.put(rows, ids)
        for sample in drain(store):
            assert_rows_equal(streams[0].spec, sample.batch, [naive.rows[key] for key in sample.keys])
            assert sample.keys.min() >= len(naive.rows) - store._data.capacity
            seen |= set(sample.keys.tolist())
    assert store.metrics()["store/inserted"] == len(naive.rows)
    return seen


@pytest.mark.parametrize("prioritised", [False, True])
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("spec", [VECTOR, PIXELS, MIXED], ids=["vector", "pixels", "mixed"])
def test_samples_equal_those_of_a_replay_that_stores_everything(spec, n, prioritised):
    store = make(spec, 2, length=n, prioritised=prioritised, batch_size=32, samples_per_insert=16.0)
    streams = [Stream(spec, seed, fault=0.04) for seed in (1, 2)]
    seen = play(store, NaiveReplay(n, 0.9, 2), streams, 60, 4)
    assert store.metrics()["store/size"] > 90
    assert len(seen) > 300  # far past the wrap


@settings(max_examples=25, deadline=None)
@given(
    st.integers(24, 61),
    st.integers(1, 5),
    st.integers(1, 3),
    st.integers(1, 4),
    st.sampled_from([0.0, 0.1, 0.5, 1.0]),
    st.sampled_from([0.0, 0.2]),
)
def test_wraps_at_any_size_with_any_ends(capacity, n, num_envs, length, end, fault):
    if 2 * (length + n - 1) * num_envs > capacity:
        return
    store = make(VECTOR, num_envs, capacity=capacity, length=n, samples_per_insert=8.0)
    streams = [Stream(VECTOR, seed, end=end, fault=fault) for seed in range(num_envs)]
    needed, append = [], store._rows.append
    store._rows.append = lambda windows, needs: (needed.extend(needs[:, 0].tolist()), append(windows, needs))
    play(store, NaiveReplay(n, 0.9, num_envs), streams, 40, length)
    alive = sum(need >= store._observations.alive_from[0] for need in needed)
    assert store.metrics()["store/size"] == min(capacity, alive)  # nothing is let go that could be kept
    if not fault:  # faulty rows take room for observations, and give no transition
        assert alive >= min(capacity, len(needed))


@pytest.mark.parametrize("fill", ["first", "zeros"])
def test_frames_of_stacks_are_stored_once(fill):
    store = make(PIXELS, 1, capacity=2000)
    stream = Stream(PIXELS, 3, end=0.01, fill=fill)
    for _ in range(50):
        store.put(fragment([stream], [0], 20)[0])
    frames = store._observations.clocks[1]
    ends = 1000 / store._observations.clocks[0]
    assert ends > 0.9
    assert frames < 1000 * 1.1  # stored whole they would be 8000


def test_images_that_are_not_stacks_are_stored_whole(caplog):
    store = make(RGB, 1, batch_size=32, samples_per_insert=8.0)
    with caplog.at_level("WARNING", "corral"):
        play(store, NaiveReplay(1, 0.9, 1), [Stream(RGB, 3, stacked=False)], 100, 3)
    assert 20 < store.metrics()["store/size"] < 80
    assert len([r for r in caplog.records if "not frame stacks" in r.message]) == 1


def test_environments_may_come_in_any_number_and_order():
    store = make(MIXED, 4, length=3, capacity=201, batch_size=32, samples_per_insert=8.0)
    streams = [Stream(MIXED, seed) for seed in range(4)]

    def pick(rng):
        return rng.permutation(4)[: rng.integers(1, 5)].tolist()

    play(store, NaiveReplay(3, 0.9, 4), streams, 60, 2, pick)


def test_idle_env_survives_overwrite_of_whole_ring():
    store = make(PIXELS, 2, length=3, batch_size=32, samples_per_insert=4.0)
    streams = [Stream(PIXELS, seed) for seed in range(2)]
    for ids, puts in (([0, 1], 5), ([0], 200), ([0, 1], 5), ([1], 200), ([0, 1], 40)):
        for _ in range(puts):
            store.put(fragment(streams, ids, 4)[0])
            for sample in drain(store):
                following = sample.batch.next_obs
                assert sample.batch.obs.any((2, 3)).all()
                assert following.shape == (32, 4, 16, 17)
                # one to three frames further: what is left of the old stack leads the new one
                m = np.array([_moved_on(a, b) for a, b in zip(sample.batch.obs, following, strict=True)])
                assert (m <= 3).all()
                assert (m >= 1).all()
        assert store.metrics()["store/size"] > 80 or store.metrics()["store/inserted"] < 50


def _moved_on(old, new):
    return next((m for m in range(1, 4) if (new[: 4 - m] == old[m:]).all()), 9)


def test_an_episode_that_was_broken_off_is_cut_as_if_truncated():
    store = make(VECTOR, 1, length=3, min_size=4, batch_size=256, samples_per_insert=200.0)
    first, second = Stream(VECTOR, 1, end=0.0), Stream(VECTOR, 2, end=0.0)
    traj, rows = fragment([first], [0], 4)
    store.put(traj)
    assert store.metrics()["store/inserted"] == 2  # two wait for their third step
    later, _ = fragment([second], [0], 3)  # another episode, of which nobody saw the end of the last
    store.put(later)
    assert store.metrics()["store/inserted"] == 5
    for sample in drain(store):
        for key, reward, discount, following in zip(
            sample.keys, sample.batch.reward, sample.batch.discount, sample.batch.next_obs, strict=True
        ):
            if key in (2, 3):
                steps = rows[key:][:3]
                expected = sum(0.9**j * s[0]["reward"] for j, s in enumerate(steps))
                assert reward == pytest.approx(expected, rel=1e-5)
                assert discount == pytest.approx(0.9 ** len(steps))
                np.testing.assert_array_equal(following, traj.obs[-1, 0])


def test_prioritised_drawing_has_the_right_frequencies():
    store = make(VECTOR, 1, prioritised=True, batch_size=8, samples_per_insert=1e9)
    stream = Stream(VECTOR, 1)
    for _ in range(45):
        store.put(fragment([stream], [0], 3)[0])  # past the wrap
    low, high = store._rows.low, store._rows.high
    keys = np.arange(low, high)
    priorities = np.random.default_rng(0).uniform(0, 5, len(keys))
    priorities[::7] = 0
    store.feedback(keys, priorities)
    expected = (priorities + 1e-6) ** 0.6
    expected *= 8 * 6000 / expected.sum()
    counts = np.zeros(len(keys))
    for _ in range(6000):
        np.add.at(counts, store.get().keys - low, 1)
    many = expected > 5
    chi2 = ((counts - expected)[many] ** 2 / expected[many]).sum()
    assert chi2 < many.sum() + 4 * np.sqrt(2 * many.sum())
    assert counts[~many].sum() < 3 * expected[~many].sum() + 10


def test_uniform_drawing_has_the_right_frequencies():
    store = make(VECTOR, 1, batch_size=101, samples_per_insert=1e9)
    stream = Stream(VECTOR, 1)
    for _ in range(45):
        store.put(fragment([stream], [0], 3)[0])
    counts = np.zeros(101)
    for _ in range(500):
        np.add.at(counts, store.get().keys - store._rows.low, 1)
    assert ((counts - 500) ** 2 / 500).sum() < 101 + 4 * np.sqrt(202)


@pytest.mark.parametrize("progress", [0.0, 0.5, 1.0])
@pytest.mark.parametrize(("alpha", "beta", "eps"), [(0.6, 0.4, 1e-6), (1.0, 0.7, 0.1), (0.0, 0.4, 1e-6)])
def test_weights_are_the_formula(progress, alpha, beta, eps):
    names = {"priority_alpha": alpha, "priority_beta": beta, "priority_eps": eps}
    store = make(VECTOR, 1, prioritised=True, samples_per_insert=1e9, **names)
    stream = Stream(VECTOR, 1)
    for _ in range(30):
        store.put(fragment([stream], [0], 3)[0], ctx=StoreContext(progress))
    keys = np.arange(store._rows.low, store._rows.high)
    priorities = np.random.default_rng(0).uniform(0, 5, len(keys))
    store.feedback(keys, priorities)
    sample = store.get()
    p = (priorities + eps) ** alpha
    probability = p[sample.keys - keys[0]] / p.sum()
    weight = (len(keys) * probability) ** -(beta + (1 - beta) * progress)
    np.testing.assert_allclose(sample.batch.weight, weight / weight.max(), rtol=1e-5)
    assert sample.batch.weight.dtype == np.float32


def test_new_transitions_have_max_or_given_priority():
    store = make(VECTOR, 1, prioritised=True, samples_per_insert=1e9)
    stream = Stream(VECTOR, 1, end=0.0)
    store.put(fragment([stream], [0], 3)[0])
    leaves = store._tree.leaves
    np.testing.assert_allclose(leaves[:3], 1.0)
    store.feedback(np.array([0, 1, 2]), np.array([2.0, 7.0, 0.5]))
    store.put(fragment([stream], [0], 2)[0])
    np.testing.assert_allclose(leaves[3:5], (7 + 1e-6) ** 0.6)
    store.put(fragment([stream], [0], 2)[0], priorities=np.array([[3.0], [-4.0]]))
    np.testing.assert_allclose(leaves[5:7], (np.array([3, 4]) + 1e-6) ** 0.6)


def test_given_priorities_survive_n_step_assembly():
    store = make(VECTOR, 1, prioritised=True, length=3)
    stream = Stream(VECTOR, 1, end=0.0)
    for k in range(4):
        store.put(fragment([stream], [0], 2)[0], priorities=np.array([[2.0 * k + 1], [2.0 * k + 2]]))
    np.testing.assert_allclose(store._tree.leaves[:6], (np.arange(1, 7) + 1e-6) ** 0.6)


def test_stale_and_nan_priorities_are_ignored():
    store = make(VECTOR, 1, prioritised=True, samples_per_insert=1e9)
    stream = Stream(VECTOR, 1)
    store.put(fragment([stream], [0], 3)[0])
    old = store.get().keys
    for _ in range(50):
        store.put(fragment([stream], [0], 3)[0])
    before = store._tree.leaves.copy()
    store.feedback(old, np.full(len(old), 99.0))
    store.feedback(store.get().keys, np.full(64, np.nan))
    np.testing.assert_array_equal(store._tree.leaves, before)
    assert store._tree.max == 1.0


def test_evicted_transitions_have_no_weight():
    store = make(RGB, 1, prioritised=True)  # no stacks: evicted long before they are overwritten
    stream = Stream(RGB, 3, stacked=False)
    for _ in range(100):
        store.put(fragment([stream], [0], 3)[0])
        rows = store._rows
        alive = np.zeros(rows.capacity, bool)
        alive[np.arange(rows.low, rows.high) % rows.capacity] = True
        np.testing.assert_array_equal(store._tree.leaves > 0, alive)


@pytest.mark.parametrize("n", [1, 3])
def test_rewards_are_scaled_when_sampled(n):
    stores = [make(VECTOR, 1, length=n, samples_per_insert=1e9) for _ in range(2)]
    stream = Stream(VECTOR, 1)
    for scale in (0.25, 1e6):
        traj = fragment([stream], [0], 40)[0]
        stores[0].put(traj)
        stores[1].put(traj, ctx=StoreContext(reward_scale=scale))
        plain, scaled = (store.get().batch.reward for store in stores)
        np.testing.assert_array_equal(scaled, np.clip(plain * np.float32(scale), -10 * n, 10 * n))


def test_loaded_replay_scales_rewards_before_the_next_put():
    store, loaded = (make(VECTOR, 1, samples_per_insert=1e9) for _ in range(2))
    store.put(fragment([Stream(VECTOR, 1)], [0], 40)[0], ctx=StoreContext(reward_scale=0.25))
    loaded.load_state_dict(store.state_dict())
    np.testing.assert_array_equal(loaded.get().batch.reward, store.get().batch.reward)


def test_samples_are_copies():
    store = make(PIXELS, 1, samples_per_insert=1e9)
    stream = Stream(PIXELS, 1)
    store.put(fragment([stream], [0], 40)[0])
    kept = store.get()
    copies = kept.batch.obs.copy(), kept.batch.reward.copy()
    for _ in range(5):
        store.put(fragment([stream], [0], 40)[0])
        store.get()
    np.testing.assert_array_equal(kept.batch.obs, copies[0])
    np.testing.assert_array_equal(kept.batch.reward, copies[1])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"capacity": 0}, "capacity of at least 1"),
        ({"min_size": 500}, "lower learning_starts"),
        ({"length": 0}, "above 0"),
    ],
)
def test_settings_that_cannot_work_are_refused(changes, words):
    with pytest.raises(UserError, match=words):
        make(VECTOR, 1, **changes)


def test_a_fragment_that_would_overwrite_itself_is_refused():
    store = make(VECTOR, 1)
    with pytest.raises(UserError, match="raise buffer_size to at least 120"):
        store.put(fragment([Stream(VECTOR, 0)], [0], 60)[0])


def test_a_state_of_other_settings_is_refused():
    with pytest.raises(UserError, match="same settings"):
        make(VECTOR, 1).load_state_dict(make(VECTOR, 1, capacity=99).state_dict())


def with_extras(names, steps=8, n=3):
    store, stream = make(VECTOR, 1, length=n, extras=tuple(names)), Stream(VECTOR, 0, end=0.0)
    if steps:
        traj = fragment([stream], [0], steps)[0]
        store.put(replace(traj, extras={name: np.ones(traj.shape, np.float32) for name in names}))
    return store


@pytest.mark.parametrize("steps", [8, 2], ids=["transitions", "waiting steps"])
def test_a_state_without_a_named_extra_is_refused(steps):
    with pytest.raises(UserError, match="lack the extra 'new'"):
        with_extras(["old", "new"], 0).load_state_dict(with_extras(["old"], steps).state_dict())


def test_an_empty_state_fits_any_extras():
    store = with_extras(["new"], 0)
    store.load_state_dict(with_extras([], 0).state_dict())
    assert len(store._rows) == 0


def test_extras_that_are_no_longer_named_are_not_loaded():
    store = with_extras(["kept"], 0)
    store.load_state_dict(with_extras(["kept", "dropped"]).state_dict())
    extras = store.get().batch.extras
    assert extras.keys() == {"kept"}
    assert (extras["kept"] == 1).all()


def test_million_atari_transitions_fit_in_7_5_gb(monkeypatch):
    monkeypatch.setattr(memory, "available_bytes", lambda: 8_000_000_000)
    store = make(_atari(), 8, capacity=1_000_000, length=3, prioritised=True)  # takes no memory before it is filled
    assert store.nbytes <= 7.5e9
    assert store._observations.sizes.min() >= 1_000_000 * 33 / 32


def test_reported_memory_is_that_of_a_full_store():
    import psutil

    spec = _atari()
    frame = np.arange(84 * 84, dtype=np.uint8).reshape(84, 84)
    before = psutil.Process().memory_info().rss
    store = make(spec, 1, capacity=10_000, prioritised=True)
    stream = _Screens(frame)
    for _ in range(110):
        store.put(stream.fragment(spec, 100))
    grown = psutil.Process().memory_info().rss - before
    assert store.metrics()["store/size"] == 10_000
    assert store.nbytes < 10_000 * 84 * 84 * 1.06
    assert grown < store.nbytes * 1.1 + 30e6


def test_capacity_beyond_memory_is_refused_with_remedy():
    with pytest.raises(UserError, match="lower buffer_size to"):
        make(_atari(), 1, capacity=10**9)


def _atari():
    from gymnasium import spaces

    from corral.core.types import EnvSpec

    return EnvSpec(spaces.Box(0, 255, (4, 84, 84), np.uint8), spaces.Discrete(6))


class _Screens:
    """Atari-sized screens of one endless episode, each different, made without drawing random numbers."""

    def __init__(self, frame):
        self.frame, self.t = frame, 0

    def fragment(self, spec, length):
        from corral.core.types import Trajectory

        frames = np.repeat(self.frame[None], length + 4, 0)
        frames[:, 0, :4] = np.arange(self.t, self.t + length + 4, dtype=np.int32).view(np.uint8).reshape(-1, 4)
        obs = np.lib.stride_tricks.sliding_window_view(frames, 4, axis=0).transpose(0, 3, 1, 2)[:, None]
        first = np.zeros((length + 1, 1), bool)
        first[0] = self.t == 0
        self.t += length
        no = np.zeros((length, 1), bool)
        zeros = np.zeros((length, 1))
        return Trajectory(
            obs, zeros.astype(np.int64), zeros.astype(np.float32), zeros, no, no, no, first,
            np.zeros(1, np.int64), np.zeros((0, 2), np.int64), np.zeros((0, 4, 84, 84), np.uint8),
        )  # fmt: skip


def test_a_first_priority_that_is_not_finite_counts_as_unknown():
    store, stream = make(VECTOR, 1, prioritised=True), Stream(VECTOR, 1, end=0.0)
    store.put(fragment([stream], [0], 2)[0], priorities=np.array([[3.0], [np.inf]]))
    np.testing.assert_allclose(store._tree.leaves[:2], [(3 + 1e-6) ** 0.6, 1.0])
