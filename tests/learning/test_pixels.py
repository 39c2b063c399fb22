"""Pixels through a whole run: train, checkpoint, break off, resume, load."""

import os
import shutil

import pytest
import torch
from helpers.short_runs import learn, score

from corral.runs.checkpoints.checkpoint import load
from corral.runs.evaluation.evaluate import acting_seed, evaluate_policy, make_eval_vec
from corral.runs.folder import RunFolder
from corral.runs.load import load_policy
from corral.runs.sinks.csv import read_metrics
from corral.runs.train import resume, train

SPOT = "helpers.pixel_envs:FollowTheSpot"
SETTINGS = {
    "ppo": {"num_steps": 16, "num_minibatches": 2, "update_epochs": 2, "learning_rate": 1e-3},
    "dqn": {
        "learning_starts": 64,
        "buffer_size": 2000,
        "train_frequency": 8,
        "learning_rate": 1e-3,
        "target_update_period": 20,
    },
}
COMMON = {"preset": "none", "quiet": True, "num_envs": 4, "backend": "local", "device": "cpu", "torch_threads": 1}
CLOCKS = {
    "checkpoint_every_s": 0, "checkpoint_every": 128, "keep_checkpoints": 9, "log_every_s": 0,
    "log_every": 64, "eval_episodes": 2, "eval_every": 192,
}  # fmt: skip


@pytest.mark.parametrize(("algo", "precision"), [("ppo", "fp32"), ("ppo", "bf16"), ("dqn", "fp32"), ("dqn", "auto")])
def test_pixel_run_resumes_exactly(tmp_path, algo, precision):
    whole, part = tmp_path / "whole", tmp_path / "part"
    train(algo, SPOT, 384, 1, whole, **COMMON, **CLOCKS, **SETTINGS[algo], precision=precision)
    shutil.copytree(whole, part, symlinks=True)
    for name in ("step_000000384", "latest"):  # as it was some time after step 256
        path = part / "checkpoints" / name
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    resume(part, quiet=True)
    states = [load(RunFolder.open(path))[0]["trainer"] for path in (whole, part)]
    for name, value in states[0]["learner"]["model"].items():
        assert torch.equal(value, states[1]["learner"]["model"][name]), name
    assert read_metrics(whole)["eval/return"].tolist()[-1] == read_metrics(part)["eval/return"].tolist()[-1]

    loaded = load_policy(part, "latest")
    loaded.use_training_threads()
    seed = loaded.experiment.seed
    with make_eval_vec(loaded.experiment, 2, seed) as vec:
        policy = loaded.as_policy(seed=acting_seed(seed, deterministic=True))
        assert list(evaluate_policy(vec, policy, 2, seed).returns) == loaded.evaluation["returns"]


def test_saved_replay_has_each_frame_once(tmp_path):
    train("dqn", SPOT, 384, 1, tmp_path / "run", **COMMON, **CLOCKS, **SETTINGS["dqn"])
    size = os.path.getsize(tmp_path / "run" / "checkpoints" / "latest" / "replay.safetensors")
    frames, episodes, frame = 384, 384 / 16, 36 * 36
    assert frames * frame < size < (frames + 6 * episodes) * frame + 100 * frames


def test_a_network_that_sees_learns_where_the_spot_is():
    trainer = learn("dqn", SPOT, 1024, torch_threads=1, precision="fp32", exploration_fraction=0.5, **SETTINGS["dqn"])
    assert score(trainer) > 14  # of 16, and 8 by chance
