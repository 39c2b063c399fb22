"""Environments that show the action they want: an algorithm that cannot learn these is wrong."""

import pytest
from helpers.short_runs import ENVS, learn, score

ENV = f"{ENVS}:IdentityEnv"
LENGTH = 32
# Nothing that is done now changes what comes later, so the next reward is all that counts.
SETTINGS = {
    "ppo": {"lr": 5e-3, "length": 32, "minibatches": 4, "epochs": 6, "entropy": 0.0},
    "a2c": {"lr": 5e-3, "length": 8, "optimizer": "adam", "normalize_advantage": True},
    "reinforce": {"lr": 1e-2, "algorithm.episodes": 8},
    "impala": {"lr": 5e-3, "length": 8, "batch_size": 8, "optimizer": "adam", "entropy": 0.0},
    "appo": {"lr": 5e-3, "length": 32, "batch_size": 8, "minibatches": 4, "epochs": 6, "entropy": 0.0},
    "dqn": {"lr": 2e-3, "learning_starts": 200, "target_every": 50, "train_every": 8, "updates": 2,
            "epsilon_fraction": 0.5},
}  # fmt: skip
STEPS = {"discrete": 4000, "multi_discrete": 5000, "box": 10_000, "hybrid": 10_000}
SLOWER = {"ppo": 1, "a2c": 1.5, "reinforce": 2, "impala": 1.5, "appo": 1, "dqn": 1}


@pytest.mark.parametrize("algo", SETTINGS)
@pytest.mark.parametrize("kind", STEPS)
def test_the_action_that_is_shown_is_learned(algo, kind):
    numbers = kind in ("box", "hybrid")
    if algo == "dqn" and numbers:
        pytest.skip("dqn needs discrete actions")
    settings = SETTINGS[algo] | ({"log_std": -1.0} if numbers else {})
    steps = int(SLOWER[algo] * STEPS[kind])
    trainer = learn(algo, ENV, steps, env_kwargs={"kind": kind, "length": LENGTH}, gamma=0.0, **settings)
    assert score(trainer) >= 0.9 * LENGTH
