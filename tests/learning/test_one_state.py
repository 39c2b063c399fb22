"""One state, reward 1 for ever, cut by a time limit: its value is 1 / (1 - gamma), whatever the limit.

Whoever takes the limit for an end finds about 3.4 instead of 10.
"""

import numpy as np
import pytest
import torch
from helpers.short_runs import ENVS, learn

ENV = f"{ENVS}:OneStateEnv"
GAMMA = 0.9
SETTINGS = {
    "ppo": {"learning_rate": 1e-2, "num_steps": 8, "num_minibatches": 1, "update_epochs": 4},
    "ppo, clipped values": {"learning_rate": 1e-2, "num_steps": 8, "num_minibatches": 1, "update_epochs": 4,
        "clip_range_vf": 1.0},
    "ppo, lstm": {"learning_rate": 1e-2, "num_steps": 6, "num_minibatches": 1, "update_epochs": 4, "rnn": "lstm",
        "rnn_size": 8},
    "a2c": {"learning_rate": 1e-2, "num_steps": 5},
    "a2c, td": {"learning_rate": 1e-2, "num_steps": 1, "gae_lambda": 0.0},
    "a2c, gru": {"learning_rate": 2e-2, "num_steps": 4, "rnn": "gru", "rnn_size": 8, "optimizer": "adam"},
    "reinforce": {"learning_rate": 1e-2, "episodes_per_update": 8},
    "impala": {"learning_rate": 1e-2, "num_steps": 5, "batch_size": 8},
    "impala, adam, replayed": {"learning_rate": 1e-2, "num_steps": 4, "batch_size": 16, "optimizer": "adam",
        "replay_fraction": 0.5},
    "impala, gru": {"learning_rate": 2e-2, "num_steps": 4, "batch_size": 8, "optimizer": "adam", "rnn": "gru",
        "rnn_size": 8},
    "appo": {"learning_rate": 1e-2, "num_steps": 8, "batch_size": 8, "num_minibatches": 2, "update_epochs": 2},
    "appo, gru": {"learning_rate": 1e-2, "num_steps": 6, "batch_size": 8, "update_epochs": 4, "rnn": "gru",
        "rnn_size": 8},
    "dqn": {"learning_rate": 5e-3, "target_update_period": 20},
    "dqn, n-step": {"learning_rate": 5e-3, "target_update_period": 20, "n_step": 3},
    "dqn, everything": {"learning_rate": 5e-3, "target_update_period": 1, "tau": 0.05, "n_step": 2,
        "prioritized_replay": True, "dueling": True},
}  # fmt: skip


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=pytest.mark.slow if ", gru" in case else []) for case in SETTINGS]
)
def test_the_value_does_not_know_of_the_time_limit(case):
    algo = case.partition(",")[0]
    settings = {"gamma": GAMMA, "hidden_sizes": (16,), "anneal_lr": True} | SETTINGS[case]
    if algo == "dqn":
        settings |= {"learning_starts": 64, "train_frequency": 8, "gradient_steps": 1}
    trainer = learn(algo, ENV, 8000, **settings)
    obs = torch.ones(1, 1)
    with torch.no_grad():
        if algo == "dqn":
            values = trainer.model(obs).numpy().reshape(-1)
        elif trainer.model.core is not None:
            state, values = trainer.model.initial_state(1), []
            for t in range(6):
                _, value, states = trainer.model.unroll(obs[None], state, torch.tensor([[t == 0]]))
                state = states[0]
                values.append(float(value))
        else:
            values = trainer.model(obs)[1].numpy()
    np.testing.assert_allclose(values, 1 / (1 - GAMMA), rtol=0.02)


def test_old_rewards_of_a_replay_are_in_the_units_of_new_ones():
    settings = {
        "learning_rate": 5e-3,
        "target_update_period": 20,
        "learning_starts": 64,
        "train_frequency": 8,
        "anneal_lr": True,
    }
    trainer = learn("dqn", ENV, 6000, gamma=GAMMA, hidden_sizes=(16,), normalize_reward=True, **settings)
    scale = trainer.vec.reward_scale
    assert abs(scale - 1) > 0.05  # else there would be nothing to see
    values = trainer.model(torch.ones(1, 1)).detach().numpy()
    np.testing.assert_allclose(values, scale / (1 - GAMMA), rtol=0.02)
