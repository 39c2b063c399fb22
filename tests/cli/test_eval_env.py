"""Evaluations in another environment than that of the run, and with other arguments."""

import json

import pytest

import corral
from corral.cli.main import main
from corral.testing.envs import IdentityEnv

PATH = "corral.testing.envs:IdentityEnv"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    path = tmp_path_factory.mktemp("run") / "run"
    settings = {"num_envs": 2, "preset": "none", "quiet": True, "num_steps": 16, "eval_episodes": 1}
    corral.train("ppo", PATH, 64, run_dir=path, eval_env_kwargs={"length": 9}, **settings)
    return path


@pytest.mark.parametrize("env", [[], ["--env", PATH]])
def test_eval_takes_arguments_of_the_environment(run, capsys, env):
    words = [str(run), "--episodes", "2", "--deterministic", "--json"]
    assert main(["eval", *words, *env, "--env-kwargs", "length=3"]) == 0
    assert json.loads(capsys.readouterr().out)["deterministic"]["lengths"] == [3, 3]


@pytest.mark.parametrize("env", [None, PATH, IdentityEnv])
def test_evaluate_takes_arguments_of_the_environment(run, env):
    assert corral.evaluate(run, 2, env, env_kwargs={"length": 5}).lengths == (5, 5)


def test_arguments_of_evaluations_hold_unless_others_are_given(run):
    assert corral.evaluate(run, 1).lengths == (9,)
    assert corral.evaluate(run, 1, env_kwargs={"kind": "discrete"}).lengths == (9,)


@pytest.mark.parametrize(("terminal", "shown"), [("1", True), ("", False)])
def test_eval_shows_on_a_terminal_how_far_it_is(run, capsys, monkeypatch, terminal, shown):
    monkeypatch.setenv("FORCE_COLOR", terminal)
    monkeypatch.setenv("TERM", "xterm")
    assert main(["eval", str(run), "--episodes", "2", "--sampled", "--json"]) == 0
    out, err = capsys.readouterr()
    assert ("evaluating: 2 of 2 episodes, " in err) is shown
    assert len(json.loads(out)["sampled"]["returns"]) == 2
