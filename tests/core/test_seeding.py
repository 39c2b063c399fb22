"""The tree of seeds."""

import corral
from corral.core import seeding
from corral.testing import CountingEnv
from corral.testing.contracts.vec_env import ID


def test_no_two_environments_and_no_two_runs_share_a_seed():
    runs = [seeding.env_seeds(run, "train", 512) for run in range(8)]
    everything = [seed for run in runs for seed in run]
    assert len(set(everything)) == len(everything)


def test_roles_workers_and_episodes_have_branches_of_their_own():
    seeds = {
        seeding.env_seed(0, "train", 0, 0),
        seeding.env_seed(0, "train", 0, 1),
        seeding.env_seed(0, "eval", 0, 0),
        seeding.env_seed(0, "train", 1, 0),
        seeding.worker_seed(0, "train", 0),
        seeding.worker_seed(0, "train", 1),
    }
    assert len(seeds) == 6


def test_seeds_fit_native_environments():
    assert all(0 <= seed < 2**31 for seed in seeding.env_seeds(123, "train", 1000))


def test_evaluation_never_sees_training_episodes():
    ids = []
    for role in ("train", "eval"):
        with corral.make_vec(CountingEnv, 8, "local", role=role) as vec:
            ids.append(set(vec.recv().obs[:, ID]))
    assert not ids[0] & ids[1]
