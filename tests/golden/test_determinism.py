"""A run is its seed: the same again bit by bit, whatever runs the environments, and another one with another seed."""

import pytest
import torch
from helpers.short_runs import ENVS, learn

SETTINGS = {
    "ppo": {"num_steps": 16, "normalize_obs": True},
    "a2c": {},
    "reinforce": {"episodes_per_update": 4},
    "impala": {"num_steps": 8, "batch_size": 8, "replay_fraction": 0.5, "buffer_size": 20},
    "appo": {"num_steps": 16, "batch_size": 8, "num_minibatches": 2},
    "dqn": {"learning_starts": 100, "prioritized_replay": True, "n_step": 2},
}
STEPS = 600


def weights(algo, env="CartPole-v1", **settings):
    trainer = learn(algo, env, STEPS, **(SETTINGS[algo] | settings))
    assert trainer.learner.version > 5
    return torch.cat([value.double().reshape(-1) for value in trainer.model.state_dict().values()])


@pytest.mark.parametrize("algo", SETTINGS)
def test_the_same_seed_is_the_same_run_and_another_is_not(algo):
    first = weights(algo)
    torch.manual_seed(5)  # a run does not look at the process's own generators
    assert torch.equal(first, weights(algo))
    assert not torch.equal(first, weights(algo, seed=1))


@pytest.mark.parametrize("algo", SETTINGS)
def test_it_does_not_matter_which_processes_run_the_environments(algo):
    local = weights(algo)
    for workers in (1, 2):
        assert torch.equal(local, weights(algo, backend="process", workers=workers)), workers


@pytest.mark.parametrize(
    ("env", "settings"),
    [
        (f"{ENVS}:IdentityEnv", {"env_kwargs": {"kind": "multi_discrete"}}),
        (f"{ENVS}:IdentityEnv", {"env_kwargs": {"kind": "box"}}),
        ("CartPole-v1", {"rnn": "lstm", "rnn_size": 8, "hidden_sizes": (8,)}),
    ],
)
def test_nor_for_other_actions_and_with_a_memory(env, settings):
    assert torch.equal(weights("ppo", env, **settings), weights("ppo", env, backend="process", workers=2, **settings))


@pytest.mark.parametrize(
    ("env", "settings"),
    [(f"{ENVS}:IdentityEnv", {"env_kwargs": {"kind": "hybrid"}}), ("CartPole-v1", {"normalize_reward": True})],
)
def test_the_number_of_workers_does_not_matter_where_the_halves_do(env, settings):
    """Two kinds of draws, and statistics that learn while halves of the environments come in, depend on the halves."""
    runs = [weights("ppo", env, backend="process", workers=workers, **settings) for workers in (1, 2)]
    assert torch.equal(*runs)
