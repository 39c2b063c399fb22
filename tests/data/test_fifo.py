"""Sequences and episodes that are used once: what their contract suite does not say."""

import numpy as np
import pytest
from helpers.fragments import MIXED, VECTOR, Stream, fragment

from corral.core.errors import UserError
from corral.core.types import DataSpec, tree_map
from corral.data.episodes import EpisodeStore
from corral.data.fifo import FifoStore
from corral.testing.contracts.store import drain, saved_and_read


def with_extras(traj, version):
    length, width = traj.shape
    traj.extras = {"logp": np.random.default_rng(0).normal(size=(length, width)).astype(np.float32)}
    traj.version = np.full(width, version)
    return traj


def test_sequences_keep_their_order_extras_and_versions():
    store = FifoStore(VECTOR, DataSpec("sequence", 4, 2, "once", ("logp",)), 3)
    streams = [Stream(VECTOR, seed) for seed in range(3)]
    parts = [with_extras(fragment(streams, [0, 1, 2], 4)[0], version) for version in (5, 6)]
    for traj in parts:
        store.put(traj)
    samples = [sample.batch for sample in drain(store)]
    assert [batch.env_id.tolist() for batch in samples] == [[0, 1], [2, 0], [1, 2]]
    assert [batch.version.tolist() for batch in samples] == [[5, 5], [5, 6], [6, 6]]
    np.testing.assert_array_equal(samples[1].extras["logp"][:, 0], parts[0].extras["logp"][:, 2])
    np.testing.assert_array_equal(samples[1].obs[:, 1], parts[1].obs[:, 0])


def test_old_sequences_are_dropped_behind_new_ones():
    store = FifoStore(VECTOR, DataSpec("sequence", 4, 2, "once", ("logp",)), 3)
    streams = [Stream(VECTOR, seed) for seed in range(3)]
    for versions in ([9, 9, 9], [2, 9, 3]):  # the second fragment is of an actor that restarted
        traj = with_extras(fragment(streams, [0, 1, 2], 4)[0], 0)
        traj.version = np.array(versions)
        store.put(traj)
    store.get()
    assert store.drop_older(2) == 0
    assert store.drop_older(5) == 2
    assert store.metrics()["store/size"] == 2
    batch = store.get().batch
    assert (batch.env_id.tolist(), batch.version.tolist()) == ([2, 1], [9, 9])


def test_sequences_of_another_length_are_refused():
    store = FifoStore(VECTOR, DataSpec("sequence", 4, 2, "once"), 1)
    with pytest.raises(UserError, match="4 steps"):
        store.put(fragment([Stream(VECTOR, 0)], [0], 3)[0])


def episodes_of(rows_by_env):
    """Whole episodes without faults in per-environment lists of rows, as lists of rows."""
    found = []
    for rows in rows_by_env:
        episode = []
        for row in rows:
            episode.append(row)
            if row["terminated"] or row["truncated"]:
                if not any(r["faulty"] for r in episode):
                    found.append(episode)
                episode = []
    return found


@pytest.mark.parametrize("length", [1, 3, 17])
def test_episodes_are_padded_with_final_observation(length):
    store = EpisodeStore(MIXED, DataSpec("episode", 1, 3, "once", ("logp",)), 2)
    streams = [Stream(MIXED, seed, end=0.1, fault=0.02) for seed in range(2)]
    history = [[], []]
    batches = []
    for _ in range(170 // length):
        traj, rows = fragment(streams, [0, 1], length)
        for b in range(2):
            history[b] += [r[b] for r in rows]
        store.put(with_extras(traj, 0))
        batches += [sample.batch for sample in drain(store)]
    expected = {tuple(e[0]["obs"][1]): e for e in episodes_of(history)}
    count = 0
    for batch in batches:
        lengths = []
        for b in range(3):
            episode = expected.pop(tuple(batch.obs["speed"][0, b]))
            n = len(episode)
            lengths.append(n)
            for i, leaf in enumerate(MIXED.observation.flatten(batch.obs)):
                np.testing.assert_array_equal(leaf[:n, b], np.stack([row["obs"][i] for row in episode]))
                np.testing.assert_array_equal(leaf[n:, b], np.repeat(episode[-1]["final"][i][None], len(leaf) - n, 0))
            for i, leaf in enumerate(MIXED.observation.flatten(batch.next_obs())):
                np.testing.assert_array_equal(leaf[:n, b], np.stack([row["next"][i] for row in episode]))
            np.testing.assert_array_equal(batch.reward[:n, b], [row["reward"] for row in episode])
            np.testing.assert_array_equal(batch.faulty[:, b], np.arange(len(batch.faulty)) >= n)
            assert not batch.reward[n:, b].any()
            assert batch.terminated[:, b].sum() == episode[-1]["terminated"]
            assert batch.truncated[:, b].sum() == episode[-1]["truncated"]
            assert batch.done[n - 1, b]
            assert batch.first[[0, n], b].all()
            assert batch.first[:, b].sum() == 2
            count += 1
        assert batch.shape == (max(lengths), 3)
        assert batch.extras["logp"].shape == batch.shape
    assert count > 10
    assert len(expected) < 3  # of the last batch


def test_endless_episode_is_cut_as_truncated(caplog):
    store = EpisodeStore(VECTOR, DataSpec("episode", 1, 1, "once"), 1, max_length=7)
    stream = Stream(VECTOR, 0, end=0.0)
    seen, successors, batches = [], [], []
    with caplog.at_level("WARNING", "corral"):
        for _ in range(9):
            traj = fragment([stream], [0], 5)[0]
            store.put(traj)
            seen.append(traj.obs[:-1])
            successors.append(traj.obs[1:])
            batches += [sample.batch for sample in drain(store)]
            assert sum(piece.shape[0] for piece in store._open[0]) < 7
    assert len(batches) == 45 // 7
    np.testing.assert_array_equal(np.concatenate([b.obs[:-1] for b in batches]), np.concatenate(seen)[:42])
    np.testing.assert_array_equal(np.concatenate([b.next_obs() for b in batches]), np.concatenate(successors)[:42])
    assert all(b.truncated[-1].all() and b.truncated.sum() == 1 and not b.terminated.any() for b in batches)
    assert len([r for r in caplog.records if "did not end within 7 steps" in r.message]) == 1


def test_an_episode_that_was_broken_off_is_left_out():
    store = EpisodeStore(VECTOR, DataSpec("episode", 1, 1, "once"), 1)
    store.put(fragment([Stream(VECTOR, 0, end=0.0)], [0], 5)[0])
    other = Stream(VECTOR, 1, end=1.0)
    middle = fragment([Stream(VECTOR, 2, end=0.0)], [0], 5)[0]
    middle.first[0] = False  # in the middle of an episode of which nobody saw the beginning
    store.put(middle)
    assert not store.ready()
    store.put(fragment([other], [0], 1)[0])
    assert len(drain(store)) == 1
    assert store.metrics()["store/dropped"] == 1


def test_episodes_under_way_survive_a_checkpoint():
    stores = [EpisodeStore(MIXED, DataSpec("episode", 1, 1, "once"), 1) for _ in range(2)]
    stream = Stream(MIXED, 0, end=0.0)
    for _ in range(3):
        stores[0].put(fragment([stream], [0], 5)[0])
    stores[1].load_state_dict(saved_and_read(stores[0].state_dict()))
    stream.end = 1.0
    traj = fragment([stream], [0], 1)[0]
    batches = []
    for store in stores:
        store.put(traj)
        batches.append(store.get().batch)
    assert batches[0].shape == (16, 1)
    tree_map(np.testing.assert_array_equal, batches[0].obs, batches[1].obs)
