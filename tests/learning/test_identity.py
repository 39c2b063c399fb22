"""Environments that show the action they want: an algorithm that cannot learn these is wrong."""

import pytest
from helpers.short_runs import ENVS, learn, score

ENV = f"{ENVS}:IdentityEnv"
LENGTH = 32
# Nothing that is done now changes what comes later, so the next reward is all that counts.
SETTINGS = {
    "ppo": {"learning_rate": 5e-3, "num_steps": 32, "num_minibatches": 4, "update_epochs": 6, "ent_coef": 0.0},
    "a2c": {"learning_rate": 5e-3, "num_steps": 8, "optimizer": "adam", "normalize_advantage": True},
    "reinforce": {"learning_rate": 1e-2, "episodes_per_update": 8},
    "impala": {"learning_rate": 5e-3, "num_steps": 8, "batch_size": 8, "optimizer": "adam", "ent_coef": 0.0},
    "appo": {"learning_rate": 5e-3, "num_steps": 32, "batch_size": 8, "num_minibatches": 4, "update_epochs": 6,
        "ent_coef": 0.0},
    "dqn": {"learning_rate": 2e-3, "learning_starts": 200, "target_update_period": 50, "train_frequency": 8,
        "gradient_steps": 2,
            "exploration_fraction": 0.5},
}  # fmt: skip
STEPS = {"discrete": 4000, "multi_discrete": 5000, "box": 10_000, "hybrid": 10_000}
SLOWER = {"ppo": 1, "a2c": 1.5, "reinforce": 2, "impala": 1.5, "appo": 1, "dqn": 1}


# Algorithms with the same kind of policy, on the kinds of action that take longest.
LATER = [("a2c", "hybrid"), ("appo", "hybrid"), ("reinforce", "hybrid"), ("a2c", "box"), ("reinforce", "box")]


@pytest.mark.parametrize(
    ("algo", "kind"),
    [
        pytest.param(algo, kind, marks=pytest.mark.slow if (algo, kind) in LATER else [])
        for kind in STEPS
        for algo in SETTINGS
    ],
)
def test_the_action_that_is_shown_is_learned(algo, kind):
    numbers = kind in ("box", "hybrid")
    if algo == "dqn" and numbers:
        pytest.skip("dqn needs discrete actions")
    settings = SETTINGS[algo] | ({"log_std_init": -1.0} if numbers else {})
    steps = int(SLOWER[algo] * STEPS[kind])
    trainer = learn(algo, ENV, steps, env_kwargs={"kind": kind, "length": LENGTH}, gamma=0.0, **settings)
    assert score(trainer) >= 0.9 * LENGTH
