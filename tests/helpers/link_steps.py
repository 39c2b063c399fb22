"""Steps environments over the link."""

import numpy as np

LIFE = 3


def steps(vec, count, actions=3):
    """Step everybody so many times; all batches."""
    rng, batch, batches = np.random.default_rng(0), vec.recv(), []
    for _ in range(count):
        vec.send(batch.env_ids, rng.integers(actions, size=len(batch)))
        batch = vec.recv()
        batches.append(batch)
    return batches


def lives(batches, env_id):
    """Which steps of its life an environment has delivered, and where a fault was."""
    return [None if b.faulty[env_id] else int(b.next_obs[env_id, LIFE]) for b in batches]


def steps_on(vec, batch, count, actions=3):
    batches = []
    for _ in range(count):
        vec.send(batch.env_ids, np.zeros(len(batch), np.int64))
        batch = vec.recv()
        batches.append(batch)
    return batches
