"""New sequences mixed with earlier ones: the contract of stores, and what is this one's own."""

from collections import Counter
from functools import partial

import numpy as np
import pytest
from helpers.fragments import MIXED, VECTOR, Stream, fragment

from corral.core.errors import RunFailed, UserError
from corral.core.types import DataSpec, Trajectory, slice_envs
from corral.data.fifo import FifoStore
from corral.data.make import make_store
from corral.data.mixed import MixedStore
from corral.data.sequence_ring import SequenceRing
from corral.testing.contracts.store import (
    NUM_ENVS,
    FifoContract,
    Step,
    assert_same,
    drain,
    fragments,
    saved_and_read,
    steps_of,
)
from corral.testing.envs import CountingEnv


class MixedContract(FifoContract):
    """What is used once, of the new sequences of each batch."""

    @property
    def new(self):
        return self.data.batch_size - round(self.data.replayed * self.data.batch_size)

    def test_nothing_is_lost_or_duplicated(self):
        spec, parts = fragments(partial(CountingEnv, 4, "mixed"), self.fragment_length, 16)
        store = self.make(spec, self.data, NUM_ENVS)
        out = Counter[Step]()
        for traj in parts:
            store.put(traj)
            for sample in drain(store):
                assert sample.batch.shape[1] == self.data.batch_size
                replayed = slice_envs(sample.batch, np.arange(self.new, self.data.batch_size))
                out += steps_of(slice_envs(sample.batch, np.arange(self.new)))
                assert not set(steps_of(replayed)) - set(out)  # only what was new before
        expected = sum((steps_of(traj) for traj in parts), Counter[Step]())
        assert max(out.values()) == 1
        assert not out - expected
        counts = store.metrics()
        assert counts["store/inserted"] == counts["store/sampled"] + counts["store/size"]
        assert counts["store/size"] < self.new
        drawn = self.data.batch_size - self.new
        assert (
            counts["store/replayed"] / drawn
            == counts["store/sampled"] / self.new
            == counts["store/sampled"] // self.new
        )
        assert len(expected) - len(out) <= self.data.batch_size * self.data.length

    def check_steps(self, sample, happened):
        steps = steps_of(sample.batch)
        assert not set(steps) - set(happened)
        return len(steps)


class TestHalfAndHalf(MixedContract):
    data = DataSpec("sequence", 5, 4, "once", capacity=50, replayed=0.5)
    fragment_length = 5


class TestThatForgets(MixedContract):
    data = DataSpec("sequence", 3, 7, "once", capacity=5, replayed=0.4)
    fragment_length = 3


class TestMostlyReplayed(MixedContract):
    data = DataSpec("sequence", 6, 5, "once", capacity=9, replayed=0.8)
    fragment_length = 6


def recorded(streams, length, version):
    """A fragment with extras and a version of its own."""
    traj = fragment(streams, list(range(len(streams))), length)[0]
    rng = np.random.default_rng(version)
    traj.extras = {
        "logp": rng.normal(size=traj.shape).astype(np.float32),
        "state": rng.normal(size=(*traj.shape, 2)).astype(np.float32),
    }
    traj.version = np.full(traj.shape[1], version)
    return traj


def column(traj, b):
    return vars(slice_envs(traj, np.array([b])))


def test_replayed_sequence_keeps_ends_and_extras():
    data = DataSpec("sequence", 8, 6, "once", ("logp", "state"), capacity=7, replayed=0.5)
    store = MixedStore(MIXED, data, 3, seed=1)
    streams = [Stream(MIXED, seed, end=0.2, fault=0.05) for seed in range(3)]
    seen, met = {}, Counter()
    for version in range(40):
        traj = recorded(streams, 8, version)
        for b in range(3):
            seen[version, b] = column(traj, b)
        store.put(traj)
        batch = store.get().batch
        assert isinstance(batch, Trajectory)
        assert batch.shape == (8, 6)
        assert batch.version[:3].tolist() == [version] * 3
        for b in range(6):
            key = int(batch.version[b]), int(batch.env_id[b])
            assert_same(column(batch, b), seen[key])
            met[key] += b >= 3
    assert sum(met.values()) == 120
    assert any(len(s["final_at"]) > 1 for s in seen.values())


def test_kept_sequences_are_drawn_uniformly():
    """60 kept of 400: each is drawn 1/60 of the time."""
    ring = SequenceRing(VECTOR, 60)
    streams = [Stream(VECTOR, seed) for seed in range(20)]
    for version in range(20):
        ring.add(recorded(streams, 2, version))
    assert len(ring) == 60
    kept = ring.take(np.arange(60))
    assert sorted(zip(kept.version.tolist(), kept.env_id.tolist(), strict=True)) == [
        (v, e) for v in (17, 18, 19) for e in range(20)
    ]
    store = MixedStore(VECTOR, DataSpec("sequence", 2, 40, "once", capacity=60, replayed=0.5), 20, seed=3)
    ages = Counter()
    for version in range(600):
        store.put(recorded(streams, 2, version))
        batch = store.get().batch
        if version >= 3:
            ages.update((version - batch.version[20:]).tolist())
    assert set(ages) == {0, 1, 2}  # the batch's own are kept as well
    expected = sum(ages.values()) / 3
    assert sum((n - expected) ** 2 / expected for n in ages.values()) < 13.8  # 0.1 % of 2 degrees of freedom


def test_a_fragment_wider_than_the_ring_leaves_its_last_columns():
    ring = SequenceRing(VECTOR, 3)
    ring.add(recorded([Stream(VECTOR, seed) for seed in range(8)], 2, 0))
    assert sorted(ring.take(np.arange(3)).env_id.tolist()) == [5, 6, 7]


def test_a_draw_is_a_copy():
    ring = SequenceRing(VECTOR, 3)
    ring.add(recorded([Stream(VECTOR, 0)], 4, 0))
    first = ring.take(np.array([0]))
    first.obs[:] = 99
    first.reward[:] = 99
    assert not (ring.take(np.array([0])).obs == 99).any()


def test_a_ring_of_another_size_is_not_loaded():
    store = MixedStore(VECTOR, DataSpec("sequence", 2, 4, "once", capacity=4, replayed=0.5), 2)
    streams = [Stream(VECTOR, seed) for seed in range(2)]
    for version in range(5):
        store.put(recorded(streams, 2, version))
        store.get()
    state = saved_and_read(store.state_dict())
    for capacity in (3, 6):
        other = MixedStore(VECTOR, DataSpec("sequence", 2, 4, "once", capacity=capacity, replayed=0.5), 2)
        with pytest.raises(UserError, match="buffer_size"):
            other.load_state_dict(state)


@pytest.mark.parametrize(("batch_size", "replayed"), [(1, 0.5), (4, 0.05), (4, 0.95)])
def test_a_batch_without_one_of_each_kind_is_refused(batch_size, replayed):
    with pytest.raises(UserError, match="raise batch_size"):
        make_store(VECTOR, DataSpec("sequence", 2, batch_size, "once", capacity=9, replayed=replayed), 2)


def test_ring_beyond_memory_is_refused_with_remedy():
    ring = SequenceRing(VECTOR, 10**12)
    with pytest.raises(UserError, match="lower buffer_size to"):
        ring.add(recorded([Stream(VECTOR, 0)], 4, 0))


def test_only_a_share_above_nothing_is_mixed():
    assert type(make_store(VECTOR, DataSpec("sequence", 2, 4, "once"), 2)) is FifoStore
    store = make_store(VECTOR, DataSpec("sequence", 2, 4, "once", capacity=9, replayed=0.5), 2)
    assert isinstance(store, MixedStore)
    with pytest.raises(RunFailed, match="ready"):
        store.get()
