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
    "ppo": {"lr": 1e-2, "length": 8, "minibatches": 1, "epochs": 4},
    "ppo, clipped values": {"lr": 1e-2, "length": 8, "minibatches": 1, "epochs": 4, "clip_value": 1.0},
    "ppo, lstm": {"lr": 1e-2, "length": 6, "minibatches": 1, "epochs": 4, "core": "lstm", "core_size": 8},
    "a2c": {"lr": 1e-2, "length": 5},
    "a2c, td": {"lr": 1e-2, "length": 1, "lam": 0.0},
    "a2c, gru": {"lr": 2e-2, "length": 4, "core": "gru", "core_size": 8, "optimizer": "adam"},
    "reinforce": {"lr": 1e-2, "algorithm.episodes": 8},
    "impala": {"lr": 1e-2, "length": 5, "batch_size": 8},
    "impala, adam, replayed": {"lr": 1e-2, "length": 4, "batch_size": 16, "optimizer": "adam", "replayed": 0.5},
    "impala, gru": {"lr": 2e-2, "length": 4, "batch_size": 8, "optimizer": "adam", "core": "gru", "core_size": 8},
    "appo": {"lr": 1e-2, "length": 8, "batch_size": 8, "minibatches": 2, "epochs": 2},
    "appo, gru": {"lr": 1e-2, "length": 6, "batch_size": 8, "epochs": 4, "core": "gru", "core_size": 8},
    "dqn": {"lr": 5e-3, "target_every": 20},
    "dqn, n-step": {"lr": 5e-3, "target_every": 20, "n_step": 3},
    "dqn, everything": {"lr": 5e-3, "target_every": 1, "tau": 0.05, "n_step": 2, "prioritised": True, "dueling": True},
}  # fmt: skip


@pytest.mark.parametrize("case", SETTINGS)
def test_the_value_does_not_know_of_the_time_limit(case):
    algo = case.partition(",")[0]
    settings = {"gamma": GAMMA, "hidden": (16,), "anneal_lr": True} | SETTINGS[case]
    if algo == "dqn":
        settings |= {"learning_starts": 64, "train_every": 8, "updates": 1}
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
    settings = {"lr": 5e-3, "target_every": 20, "learning_starts": 64, "train_every": 8, "anneal_lr": True}
    trainer = learn("dqn", ENV, 6000, gamma=GAMMA, hidden=(16,), normalize_reward=True, **settings)
    scale = trainer.vec.reward_scale
    assert abs(scale - 1) > 0.05  # else there would be nothing to see
    values = trainer.model(torch.ones(1, 1)).detach().numpy()
    np.testing.assert_allclose(values, scale / (1 - GAMMA), rtol=0.02)
