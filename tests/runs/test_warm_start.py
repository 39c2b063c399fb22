"""New runs that start from the weights of another one."""

import json
from pathlib import Path

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces

from corral.cli.main import main
from corral.core.errors import UserError
from corral.runs.checkpoints import checkpoint
from corral.runs.folder import RunFolder
from corral.runs.train import train

SMALL = {
    "env": "CartPole-v1", "steps": 64, "num_envs": 2, "backend": "local", "device": "cpu", "precision": "fp32",
    "preset": "none", "quiet": True, "eval_episodes": 0, "hidden_sizes": (8,),
}  # fmt: skip
NORMALISED = SMALL | {"normalize_obs": True}
STILL = {"learning_rate": 1e-12, "anneal_lr": False}


class Grid(gymnasium.Env):
    observation_space, action_space = spaces.Box(0, 20, (3, 3), np.uint8), spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        return np.zeros((3, 3), np.uint8), {}

    def step(self, action):
        return np.zeros((3, 3), np.uint8), 0.0, False, False, {}


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A run whose network has statistics of observations."""
    path = tmp_path_factory.mktemp("source") / "run"
    train("ppo", run_dir=path, **NORMALISED, num_steps=16, learning_rate=0.1)
    return path


def weights(path):
    return checkpoint.load(RunFolder.open(path), only=checkpoint.POLICY)[0]


def initialised(path):
    events = [json.loads(line) for line in (path / "events.jsonl").read_text().splitlines()]
    return [event["text"] for event in events if event["kind"] == "initialised"]


@pytest.mark.parametrize(
    ("algo", "settings"),
    [
        ("ppo", {"num_steps": 16}),
        ("a2c", {}),
        ("impala", {"topology": "sync", "num_steps": 8, "batch_size": 2}),
        ("impala", {"runtime": "inline", "actors": 2, "num_steps": 8, "batch_size": 2}),
        ("seed_impala", {"actors": 1, "backend": "process", "runtime": "inline", "num_steps": 8, "batch_size": 2}),
        ("dppo", {"runtime": "inline", "actors": 2, "num_steps": 16}),
        ("a3c", {"runtime": "inline", "actors": 2}),
        ("gala", {"runtime": "inline", "actors": 2}),
    ],
)
def test_init_gives_the_weights_in_every_topology(source, tmp_path, algo, settings):
    train(algo, run_dir=tmp_path / "run", init=source, **NORMALISED | STILL | settings)
    found, expected = weights(tmp_path / "run"), weights(source)
    assert found.keys() == expected.keys()
    learned = [name for name in expected if not name.startswith("encoder.norm.")]
    assert all(torch.allclose(found[name], expected[name], atol=1e-6) for name in learned)
    assert found["encoder.norm.count"] > expected["encoder.norm.count"], "its statistics go on"
    assert len(initialised(tmp_path / "run")) == 1


def test_init_is_recorded_as_a_checkpoint(source, tmp_path, monkeypatch):
    monkeypatch.chdir(source.parent)
    train("ppo", run_dir=tmp_path / "run", init="run", **NORMALISED)
    path = str((source / "checkpoints" / "latest").resolve())
    assert RunFolder.open(tmp_path / "run").config["init"] == path
    assert initialised(tmp_path / "run") == [f"weights of {path}: ppo on CartPole-v1 after 64 steps"]


def test_init_from_the_command_line(source, tmp_path):
    words = ["--env", "CartPole-v1", "--steps", "32", "--num-envs", "2", "--run-dir", str(tmp_path / "run"), "--quiet"]
    settings = ["--preset", "none", "--set", "normalize_obs=true", "hidden_sizes=8", "eval_episodes=0"]
    assert main(["train", "ppo", *words, *settings, "--init", str(source / "checkpoints" / "latest")]) == 0
    assert initialised(tmp_path / "run")


def test_a_target_network_starts_from_init_too(tmp_path):
    settings = SMALL | {"learning_starts": 32, "buffer_size": 500}
    train("dqn", run_dir=tmp_path / "a", **settings)
    train("dqn", run_dir=tmp_path / "b", init=tmp_path / "a", **settings | STILL)
    state, _ = checkpoint.load(RunFolder.open(tmp_path / "b"))
    for name, value in weights(tmp_path / "a").items():
        assert torch.allclose(state["trainer"]["learner"]["target"][name], value, atol=1e-6)


@pytest.mark.parametrize(
    ("algo", "changes", "words"),
    [
        ("ppo", {"hidden_sizes": (4,)}, r"has shape \(8, 4\) there and \(4, 4\) here"),
        ("ppo", {"normalize_obs": False}, r"encoder\.norm\.\S+ exists only there"),
        ("ppo", {"env": "Acrobot-v1"}, r"has shape \(4,\) there and \(6,\) here"),
        ("dqn", {}, "exists only"),
    ],
)
def test_init_of_another_network_is_refused(source, tmp_path, algo, changes, words):
    with pytest.raises(UserError, match=rf"The network of .* does not fit this run: .*{words}.*config\.yaml\)\.$"):
        train(algo, run_dir=tmp_path / "run", init=source, **NORMALISED | changes)
    assert not (tmp_path / "run").exists()


def test_init_without_a_run_leaves_no_folder(tmp_path):
    with pytest.raises(UserError, match="There is no run at"):
        train("ppo", run_dir=tmp_path / "run", init=tmp_path / "nothing", **SMALL)
    assert not (tmp_path / "run").exists()


def test_init_works_where_links_are_not_allowed(tmp_path, monkeypatch):
    def refuse(self, target):
        raise OSError("a required privilege is not held by the client")

    monkeypatch.setattr(Path, "symlink_to", refuse)
    train("a2c", run_dir=tmp_path / "a", **SMALL)
    assert (tmp_path / "a" / "checkpoints" / "latest").is_file()
    expected = str(next((tmp_path / "a" / "checkpoints").glob("step_*")).resolve())
    for number, start in enumerate(["a", "a/checkpoints/latest"]):
        train("a2c", run_dir=tmp_path / f"b{number}", init=tmp_path / start, **SMALL)
        assert RunFolder.open(tmp_path / f"b{number}").config["init"] == expected


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"activation": "relu"}, "it has activation=tanh there and relu here"),
        ({"env": "tests.runs.test_warm_start:Grid", "obs_encoding": "raw"}, "obs_encoding=scaled there and raw here"),
    ],
)
def test_init_of_weights_with_another_meaning_is_refused(tmp_path, changes, words):
    first = SMALL | {name: value for name, value in changes.items() if name == "env"}
    train("a2c", run_dir=tmp_path / "a", **first | ({"obs_encoding": "scaled"} if len(changes) > 1 else {}))
    with pytest.raises(UserError, match=rf"does not fit this run: .*{words}\. Use .*config\.yaml\)\.$"):
        train("a2c", run_dir=tmp_path / "b", init=tmp_path / "a", **SMALL | changes)


def test_a_run_is_not_replaced_by_one_that_starts_from_it(source):
    with pytest.raises(UserError, match=r"cannot be replaced by a run that starts from it: choose a different --run-d"):
        train("ppo", run_dir=source, init=source / "checkpoints" / "latest", overwrite=True, **NORMALISED)
    assert weights(source)
