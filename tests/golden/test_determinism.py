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
def test_weights_equal_local_and_process(algo):
    local = weights(algo)
    for workers in (1, 2):
        assert torch.equal(local, weights(algo, backend="process", workers=workers)), workers


LSTM = {"rnn": "lstm", "rnn_size": 8, "hidden_sizes": (8,)}


@pytest.mark.parametrize("kind", ["multi_discrete", "box"])
def test_weights_equal_for_other_actions(kind):
    env, settings = f"{ENVS}:IdentityEnv", {"env_kwargs": {"kind": kind}}
    assert torch.equal(weights("ppo", env, **settings), weights("ppo", env, backend="process", workers=2, **settings))


def test_recurrent_weights_agree_local_and_process():
    """Torch's products of four and of eight rows may differ in the last bit, on some processors."""
    local, process = weights("ppo", **LSTM), weights("ppo", backend="process", workers=2, **LSTM)
    torch.testing.assert_close(local, process, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("env", "settings"),
    [
        (f"{ENVS}:IdentityEnv", {"env_kwargs": {"kind": "hybrid"}}),
        ("CartPole-v1", {"normalize_reward": True}),
        ("CartPole-v1", LSTM),
    ],
)
def test_weights_equal_for_any_number_of_workers(env, settings):
    """Two kinds of draws, statistics that learn while halves of the environments come in, and the last bits of products
    in torch depend on the halves.
    """
    runs = [weights("ppo", env, backend="process", workers=workers, **settings) for workers in (1, 2)]
    assert torch.equal(*runs)
