"""The ablation of IMPALA's Table 2 in small: half of every batch is replayed, from as far back as the run goes.

An old action that the policy would hardly take any more has a gradient without bound, so it is thrown about by its
own past unless the ratio `pi / mu` takes that weight away. On fresh data there is nothing to correct.
"""

import pytest
from helpers.short_runs import ENVS, learn, score

LENGTH = 32
SETTINGS = {
    "learning_rate": 5e-3, "anneal_lr": True, "optimizer": "adam", "gamma": 0.9, "ent_coef": 0.0,
    "log_std_init": -1.0, "num_steps": 8,
    "env_kwargs": {"kind": "box", "length": LENGTH}, "buffer_size": 5000,
}  # fmt: skip
FRESH = 8  # sequences in every update, whatever comes on top


def reached(vtrace, replayed, seed):
    """Share of the possible return after 12,000 steps; a policy that ignores what it is shown gets about a half."""
    batch_size = round(FRESH / (1 - replayed))
    settings = {"vtrace": vtrace, "replay_fraction": replayed, "batch_size": batch_size}
    return score(learn("impala", f"{ENVS}:IdentityEnv", 12_000, seed, **SETTINGS, **settings)) / LENGTH


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
def test_vtrace_needed_with_replay(seed):
    assert reached(True, 0.5, seed) > 0.85
    assert reached(False, 0.5, seed) < 0.65


def test_on_fresh_data_the_uncorrected_version_learns_as_well():
    assert reached(False, 0.0, seed=0) > 0.85
