"""Runs that are resumed with changed settings, or with an environment that they cannot build."""

import logging

import gymnasium
import numpy as np
import pytest
from helpers.callback_runs import events

from corral.cli.main import main
from corral.config.experiment import Experiment
from corral.core.errors import UserError
from corral.envs.suites import pixels
from corral.runs.changes import change_settings
from corral.runs.checkpoints import checkpoint
from corral.runs.evaluation.evaluate import evaluate
from corral.runs.folder import RunFolder
from corral.runs.sinks.csv import read_metrics
from corral.runs.train import resume, train

SMALL = {
    "steps": 64, "num_envs": 4, "backend": "local", "device": "cpu", "precision": "fp32", "preset": "none",
    "quiet": True, "eval_episodes": 0, "hidden_sizes": (8,), "log_every_s": 0, "log_every": 1,
}  # fmt: skip
DQN = {"learning_starts": 32, "buffer_size": 500}
INLINE = {"runtime": "inline", "actors": 2}


class Broken(gymnasium.Env):
    def __init__(self):
        raise RuntimeError("no such luck")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Folders of small runs, trained once; not to be changed."""
    root, made = tmp_path_factory.mktemp("runs"), {}
    settings = {"ppo": {"num_steps": 8}, "dqn": DQN, "impala": INLINE | {"num_steps": 8, "batch_size": 4}}

    def get(algo):
        if algo not in made:
            made[algo] = root / algo
            train(algo, "CartPole-v1", run_dir=made[algo], **SMALL | settings[algo])
        return RunFolder.open(made[algo])

    return get


def stored(folder):
    return Experiment.from_dict(folder.config)


def test_changed_setting_is_used_and_recorded(tmp_path):
    train("ppo", "CartPole-v1", run_dir=tmp_path, **SMALL, num_steps=8, anneal_lr=False)
    resume(tmp_path, steps="128", learning_rate="1e-4", quiet=True)
    assert RunFolder.open(tmp_path).config["algorithm"]["learning_rate"] == 1e-4
    rates = read_metrics(tmp_path)["learn/lr"]
    assert (rates[0], rates[-1]) == pytest.approx((2.5e-4, 1e-4))
    (event,) = events(tmp_path, "changed")
    kept = "eval_every: 0 -> 6, eval_max_fraction: None -> 0.2"  # of the shorter run
    assert event["text"] == f"steps: 64 -> 128, learning_rate: 0.00025 -> 0.0001, {kept}"
    assert event["env_steps"] == 64
    resume(tmp_path, learning_rate=1e-4, quiet=True)
    assert len(events(tmp_path, "changed")) == 1, "nothing changed"


@pytest.mark.parametrize(
    ("algo", "given"),
    [
        ("ppo", {"gamma": 0.5, "update_epochs": 2, "num_minibatches": 2, "clip_coef": "0.1:0", "eval_episodes": 2}),
        ("ppo", {"backend": "process", "workers": 2}),
        ("dqn", {"batch_size": 16, "gradient_steps": 2, "exploration_final_eps": 0.01, "target_update_period": 10}),
        ("impala", {"num_steps": 4, "batch_size": 2, "weight_sync": "lag:2", "max_policy_lag": 3, "actors": 4}),
    ],
)
def test_settings_outside_the_layout_may_change(runs, algo, given):
    made = change_settings(stored(runs(algo)), given, runs(algo))
    assert made != stored(runs(algo))


@pytest.mark.parametrize(
    ("algo", "given", "words"),
    [
        ("ppo", {"num_steps": 16}, "num_steps cannot change .* layout"),
        ("ppo", {"gamma": 0.9, "num_envs": 2}, "num_envs cannot change .* layout"),
        ("ppo", {"rnn": "lstm"}, "rnn cannot change .* network"),
        ("ppo", {"seed": 3}, "seed cannot change"),
        ("ppo", {"topology": "actor_learner"}, "topology cannot change"),
        ("ppo", {"env": "Acrobot-v1"}, "env cannot change"),
        ("ppo", {"normalize_reward": True}, "normalize_reward cannot change .* rewards of another scale"),
        ("dqn", {"buffer_size": 600}, "buffer_size cannot change .* layout"),
        ("dqn", {"n_step": 3}, "n_step cannot change .* layout"),
        ("dqn", {"dueling": True}, "dueling cannot change .* layout"),
        ("dqn", {"gamma": 0.9}, "gamma cannot change .* layout"),
        ("impala", {"optimizer": "adam"}, "optimizer cannot change .* state of the other one"),
    ],
)
def test_settings_of_the_layout_are_refused(runs, algo, given, words):
    folder = runs(algo)
    with pytest.raises(UserError, match=rf"{words}.*`corral train {algo} --init {folder.path}`\.$"):
        change_settings(stored(folder), given, folder)


def test_fewer_steps_are_refused(runs):
    with pytest.raises(UserError, match="is set to 64 steps: set at least as many, got 32"):
        resume(runs("ppo").path, steps=32, quiet=True)


def test_unknown_setting_is_refused_on_resume(runs):
    with pytest.raises(UserError, match="No setting 'learning_rat'; did you mean learning_rate"):
        resume(runs("ppo").path, learning_rat=1, quiet=True)


def test_more_updates_per_step_count_from_the_resume_on(tmp_path):
    train("dqn", "CartPole-v1", run_dir=tmp_path, **SMALL | DQN | {"steps": 400}, train_frequency=4)
    before = read_metrics(tmp_path)["learn/version"][-1]
    assert before > 80
    resume(tmp_path, steps=440, gradient_steps=3, quiet=True)
    after = read_metrics(tmp_path)["learn/version"]
    assert 25 <= after[-1] - before <= 35, "not 3 updates for each of the steps before"
    assert np.diff(after).max() <= 4


def test_evaluations_can_end_in_a_resumed_run(tmp_path):
    train("a2c", "CartPole-v1", run_dir=tmp_path, **SMALL | {"eval_episodes": 1})
    result = resume(tmp_path, steps=128, eval_episodes=0, quiet=True)
    assert result.steps >= 128
    assert np.isnan(result.best_report)
    assert events(tmp_path, "finished")[-1]["env_steps"] >= 128


def test_settings_that_cannot_be_built_change_nothing(tmp_path):
    train("a2c", "CartPole-v1", run_dir=tmp_path, **SMALL)
    config = (tmp_path / "config.yaml").read_bytes()
    with pytest.raises(UserError, match="cuda:7"):
        resume(tmp_path, steps=128, quiet=True, device="cuda:7")
    assert (tmp_path / "config.yaml").read_bytes() == config
    assert not events(tmp_path, "changed")
    assert resume(tmp_path, steps=128, quiet=True).steps >= 128


def test_a_failing_learner_process_leaves_the_settings(tmp_path):
    train("impala", "CartPole-v1", run_dir=tmp_path, **SMALL, num_steps=8, actors=1, batch_size=4)
    config = (tmp_path / "config.yaml").read_bytes()
    with pytest.raises(UserError, match="cuda:7"):
        resume(tmp_path, steps=128, quiet=True, device="cuda:7")
    assert (tmp_path / "config.yaml").read_bytes() == config
    assert resume(tmp_path, steps=128, learning_rate=1e-4, quiet=True).steps >= 128
    assert len(events(tmp_path, "changed")) == 1


@pytest.mark.parametrize("settings", [{}, {"topology": "actor_learner", "actors": 1}])
def test_a_run_survives_a_replacement_that_cannot_start(tmp_path, settings):
    train("a2c", "CartPole-v1", run_dir=tmp_path, **SMALL | {"seed": 7})
    with pytest.raises(UserError, match="no such luck"):
        train("a2c", "tests.runs.test_changes:Broken", run_dir=tmp_path, overwrite=True, **SMALL | settings)
    assert RunFolder.open(tmp_path).config["seed"] == 7
    assert resume(tmp_path, steps=128, quiet=True).steps >= 128
    assert train("a2c", "CartPole-v1", run_dir=tmp_path, overwrite=True, **SMALL | {"seed": 8}).steps >= 64
    assert RunFolder.open(tmp_path).config["seed"] == 8
    assert not list(tmp_path.glob(".tmp-*"))


@pytest.mark.parametrize(
    ("word", "argument"), [("quiet=true", "--quiet"), ("run_dir=x", "DIR"), ("sinks=csv", "--sink")]
)
def test_arguments_of_resume_are_not_settings(runs, capfd, word, argument):
    assert main(["resume", str(runs("ppo").path), "--set", word]) == 2
    assert f"is not a setting: use the argument {argument}." in capfd.readouterr().err


def test_more_actors_keep_the_replay_buffer(tmp_path):
    train("apex", "CartPole-v1", run_dir=tmp_path, **SMALL | DQN | INLINE)
    before = checkpoint.load(RunFolder.open(tmp_path))[0]["trainer"]["store"]["rows"]["high"]
    resume(tmp_path, steps=before + 200, actors=4, quiet=True)
    assert {name: RunFolder.open(tmp_path).config[name] for name in ("actors", "num_envs")} == {
        "actors": 4, "num_envs": 4,
    }  # fmt: skip
    assert checkpoint.load(RunFolder.open(tmp_path))[0]["trainer"]["store"]["rows"]["high"] > before > 0
    (event,) = events(tmp_path, "resumed")
    assert event["text"].endswith("environments 0, 1, 2, 3 could not be restored and start new episodes")


@pytest.mark.parametrize("algo", ["impala", "dppo"])
def test_the_number_of_envs_follows_that_of_actors(tmp_path, algo):
    train(algo, "CartPole-v1", run_dir=tmp_path, **SMALL | INLINE, num_steps=8)
    finished = checkpoint.load(RunFolder.open(tmp_path))[0]["trainer"]["episodes"]["finished"]
    resume(tmp_path, steps=192, actors=3, quiet=True)
    config = RunFolder.open(tmp_path).config
    assert (config["actors"], config["num_envs"]) == (3, 6)
    assert checkpoint.load(RunFolder.open(tmp_path))[0]["trainer"]["episodes"]["finished"] >= finished
    assert "num_envs: 4 -> 6" in events(tmp_path, "changed")[0]["text"]


def test_actors_that_cannot_share_the_replay_are_refused(tmp_path):
    train("apex", "CartPole-v1", run_dir=tmp_path, **SMALL | DQN | INLINE)
    with pytest.raises(UserError, match="the layout of the network or of the saved data"):
        resume(tmp_path, actors=3, quiet=True)


def test_resume_of_a_finished_run_says_so(tmp_path, caplog):
    caplog.set_level("INFO", "corral")
    train("a2c", "CartPole-v1", run_dir=tmp_path / "run", **SMALL)
    result = resume(tmp_path / "run")
    assert result.steps >= 64
    words = f"{tmp_path / 'run'} is finished; continue it with `corral resume {tmp_path / 'run'} --steps"
    assert words in caplog.text
    caplog.clear()
    resume(tmp_path / "run", steps=200)
    assert "is finished" not in caplog.text


def test_an_env_of_this_script_warns_and_resumes(tmp_path, caplog):
    def make():
        return gymnasium.make("CartPole-v1")

    train("a2c", make, run_dir=tmp_path, **SMALL | {"quiet": False}, normalize_reward=True)
    assert "only this script can build the environment" in caplog.text
    assert len(events(tmp_path, "not_importable")) == 1
    with pytest.raises(UserError, match=r"cannot be rebuilt: give it as env to corral\.resume"):
        resume(tmp_path, steps=128, quiet=True)
    assert RunFolder.open(tmp_path).config["steps"] == 64, "nothing is written by a resume that is refused"
    assert resume(tmp_path, steps=128, env=make, quiet=True).steps >= 128
    assert evaluate(tmp_path, episodes=1, env=make).returns
    assert len(events(tmp_path, "not_importable")) == 1
    resume(tmp_path, steps=192, env=lambda: make(), quiet=True)
    assert "every environment continues its episode" in events(tmp_path, "resumed")[-1]["text"]
    with pytest.raises(UserError, match="env must be a factory"):
        resume(tmp_path, env="CartPole-v1", quiet=True)


def test_another_env_for_a_run_that_has_one_is_refused(runs):
    with pytest.raises(UserError, match=r"environment is CartPole-v1, which it builds itself: leave env out"):
        resume(runs("ppo").path, env=pixels("CartPole-v1"), quiet=True)


@pytest.mark.parametrize(
    ("algo", "settings"),
    [("ppo", {"num_steps": 8}), pytest.param("impala", {"actors": 1, "num_steps": 8}, marks=pytest.mark.slow)],
)
def test_quiet_prints_nothing_at_all(tmp_path, capfd, monkeypatch, algo, settings):
    monkeypatch.setattr(logging.getLogger(), "handlers", [])  # as in a program that has not set up logging
    made = SMALL | {"eval_episodes": 1, "num_envs": 2, "backend": "auto"} | settings
    train(algo, lambda: gymnasium.make("CartPole-v1"), run_dir=tmp_path / "run", **made)
    assert events(tmp_path / "run", "not_importable")
    assert capfd.readouterr() == ("", "")
