"""NaN and Inf, wherever they come from: nothing of them reaches the weights, and the run says where they were."""

import itertools
import json

import numpy as np
import pytest
import torch
from helpers.short_runs import learn

from corral.cli.main import main
from corral.envs.make import make_vec
from corral.runs.train import train

SMALL = {
    "ppo": {"num_steps": 8, "num_minibatches": 1, "update_epochs": 1},
    "a2c": {},
    "reinforce": {"episodes_per_update": 2},
    "impala": {"num_steps": 8, "batch_size": 4},
    "appo": {"num_steps": 8, "batch_size": 4},
    "dqn": {"learning_starts": 32, "train_frequency": 8},
}
QUIET = {"runtime": "inline", "preset": "none", "quiet": True, "num_envs": 4, "backend": "local", "eval_episodes": 0}


def events(path, kind):
    found = [json.loads(line) for line in (path / "events.jsonl").read_text().splitlines()]
    return [event for event in found if event["kind"] == kind]


@pytest.mark.parametrize("algo", SMALL)
@pytest.mark.parametrize("env", ["NanObservation", "NanReward"])
def test_not_finite_steps_never_reach_weights(algo, env):
    if algo == "dqn" and env == "NanObservation":
        pytest.skip("dqn needs discrete actions")
    trainer = learn(algo, f"helpers.nan_envs:{env}", 1500, normalize_reward=True, normalize_obs=True, **SMALL[algo])
    assert trainer.vec.restarts > 10
    assert trainer.learner.version > 5
    assert trainer.learner.skipped == 0
    for name, value in trainer.model.state_dict().items():
        assert torch.isfinite(value).all(), name
    assert trainer.sampler.episodes.faulty > 10


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("algo", SMALL)
def test_not_finite_updates_are_skipped_and_logged(tmp_path, algo):
    """Each environment gives one reward that float32 has no number for."""
    result = train(
        algo, "helpers.nan_envs:HugeReward", 1200, run_dir=tmp_path / "run", env_kwargs={"since": 40, "until": 41},
        **{"buffer_size": 100} if algo == "dqn" else {}, **QUIET, **SMALL[algo],
    )  # fmt: skip
    said = events(tmp_path / "run", "not_finite")
    assert 1 <= len(said) <= 9 or algo == "dqn"  # replay meets them again and again until they are overwritten
    assert all("reward is not finite; the weights are unchanged" in event["text"] for event in said)
    assert result.version > 10
    last = (tmp_path / "run" / "metrics.csv").read_text().splitlines()[-1]
    assert "inf" not in last


@pytest.mark.parametrize(
    ("value", "algo"),
    [
        *itertools.product([1e39, 1e30], ["ppo", "a2c"]),
        (1e39, "impala"),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in [(1e30, "impala"), (1e39, "appo"), (1e30, "appo")]),
    ],
)
def test_ten_in_a_row_end_the_run_with_exit_code_1(tmp_path, capsys, algo, value):
    code = main(
        ["train", algo, "--env", "helpers.nan_envs:HugeReward", "--env-kwargs", f"value={value}", "--preset", "none",
         "--run-dir", str(tmp_path / "run"), "--num-envs", "4", "--steps", "20000", "--quiet",
         "--set", "eval_episodes=0", "backend=local", "runtime=inline", *([] if algo == "a2c" else ["num_steps=8"])]
    )  # fmt: skip
    assert code == 1
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert "10 consecutive updates had a" in last
    assert "not finite" in last
    assert events(tmp_path / "run", "failed")
    assert len(events(tmp_path / "run", "not_finite")) >= 10


@pytest.mark.parametrize(
    ("algo", "kind"), [("ppo", "discrete"), ("a2c", "box"), ("ppo", "hybrid"), ("dqn", "discrete")]
)
def test_a_learning_rate_beyond_all_reason_is_refused(tmp_path, capsys, algo, kind):
    code = main(
        ["train", algo, "--env", "corral.testing.envs:IdentityEnv", "--env-kwargs", f"kind={kind}", "--preset", "none",
         "--run-dir", str(tmp_path / "run"), "--num-envs", "4", "--steps", "20000", "--quiet",
         "--set", "eval_episodes=0", "backend=local", "learning_rate=1e30", "anneal_lr=false"]
    )  # fmt: skip
    said = capsys.readouterr().err
    assert code == 2, said
    assert said.strip() == "corral: learning_rate must be at most 100, got 1e+30."
    assert not (tmp_path / "run").exists()


def test_nan_envs():
    with make_vec("helpers.nan_envs:NanReward", 1, "local") as vec:
        vec.recv()
        faults = 0
        for _ in range(80):
            vec.send(np.array([0]), np.array([0]))
            batch = vec.recv()
            assert np.isfinite(batch.reward).all()
            faults += int(batch.faulty.sum())
        assert faults == 2
