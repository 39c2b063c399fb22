"""Environments that show the action they want: an algorithm that cannot learn these is wrong."""

import pytest
from short_runs import ENVS, learn, score

ENV = f"{ENVS}:IdentityEnv"
# Nothing that is done now changes what comes later, so the next reward is all that counts.
SETTINGS = {
    "ppo": {"gamma": 0.0, "lr": 5e-3, "length": 32, "minibatches": 4, "epochs": 10, "entropy": 0.0},
    "a2c": {"gamma": 0.0, "lr": 5e-3, "length": 8, "optimizer": "adam", "normalize_advantage": True},
    "reinforce": {"gamma": 0.0, "lr": 1e-2, "algorithm.episodes": 1},
    "dqn": {"gamma": 0.0, "lr": 2e-3, "learning_starts": 200, "target_every": 50, "train_every": 8, "updates": 2,
            "epsilon_fraction": 0.5},
}  # fmt: skip
STEPS = {"discrete": 4000, "multi_discrete": 5000, "box": 12_000, "hybrid": 12_000}


@pytest.mark.parametrize("algo", SETTINGS)
@pytest.mark.parametrize("kind", STEPS)
def test_the_action_that_is_shown_is_learned(algo, kind):
    if algo == "dqn" and kind in ("box", "hybrid"):
        pytest.skip("dqn needs discrete actions")
    numbers = kind in ("box", "hybrid")
    extra = {"log_std": -1.0} if numbers and algo != "dqn" else {}
    trainer = learn(algo, ENV, STEPS[kind], env_kwargs={"kind": kind}, **SETTINGS[algo], **extra)
    assert score(trainer) >= 90
