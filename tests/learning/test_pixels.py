"""Pixels through a whole run: train, checkpoint, break off, resume, load."""

import os
import shutil

import pytest
import torch
from helpers.short_runs import learn, score

from corral.runs.checkpoint import load
from corral.runs.evaluate import acting_seed, evaluate, make_eval_vec
from corral.runs.folder import RunFolder
from corral.runs.load import load_policy
from corral.runs.sinks.base import read_metrics
from corral.runs.train import resume, train

SPOT = "helpers.pixel_envs:FollowTheSpot"
SETTINGS = {
    "ppo": {"length": 16, "minibatches": 2, "epochs": 2, "lr": 1e-3},
    "dqn": {"learning_starts": 64, "capacity": 2000, "train_every": 8, "lr": 1e-3, "target_every": 20},
}
COMMON = {"preset": "none", "quiet": True, "num_envs": 4, "backend": "local", "device": "cpu", "threads": 1}
CLOCKS = {
    "checkpoints.every_s": 0, "checkpoints.every_steps": 128, "checkpoints.keep": 9, "log.every_s": 0,
    "log.every_steps": 64, "evaluation.episodes": 2, "evaluation.every_steps": 192,
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
        assert list(evaluate(vec, policy, 2, seed).returns) == loaded.evaluation["returns"]


def test_saved_replay_has_each_frame_once(tmp_path):
    train("dqn", SPOT, 384, 1, tmp_path / "run", **COMMON, **CLOCKS, **SETTINGS["dqn"])
    size = os.path.getsize(tmp_path / "run" / "checkpoints" / "latest" / "replay.safetensors")
    frames, episodes, frame = 384, 384 / 16, 36 * 36
    assert frames * frame < size < (frames + 6 * episodes) * frame + 100 * frames


def test_a_network_that_sees_learns_where_the_spot_is():
    trainer = learn("dqn", SPOT, 1024, threads=1, precision="fp32", epsilon_fraction=0.5, **SETTINGS["dqn"])
    assert score(trainer) > 14  # of 16, and 8 by chance
