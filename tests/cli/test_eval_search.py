"""`corral eval --search-sims` says that it searched, and with how many simulations."""

import json

import pytest

import corral
from corral.cli.main import main


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    path = tmp_path_factory.mktemp("search") / "run"
    corral.train(
        "ppo", "CartPole-v1", 32, 0, path, preset="none", num_envs=2, num_steps=8, num_minibatches=1, eval_episodes=0,
        env_kwargs={"max_episode_steps": 4}, quiet=True, backend="local",
    )  # fmt: skip
    return str(path)


def test_eval_with_a_search_says_so(run, capsys):
    assert main(["eval", run, "--search-sims", "3", "--episodes", "1"]) == 0
    assert "\nSearched with 3 simulations before every action\n" in capsys.readouterr().out
    assert main(["eval", run, "--search-sims", "3", "--episodes", "1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["search_sims"] == 3


def test_eval_without_a_search_does_not_mention_one(run, capsys):
    assert main(["eval", run, "--episodes", "1"]) == 0
    assert "Searched" not in capsys.readouterr().out
    assert main(["eval", run, "--episodes", "1", "--json"]) == 0
    assert "search_sims" not in json.loads(capsys.readouterr().out)


def test_eval_of_alphazero_says_how_much_it_searches(tmp_path, capsys):
    corral.train(
        "alphazero", "corral/TicTacToe-v0", 64, 0, tmp_path / "run", preset="none", num_envs=2, eval_episodes=0,
        num_simulations=5, quiet=True, backend="local",
    )  # fmt: skip
    assert main(["eval", str(tmp_path / "run"), "--episodes", "1", "--deterministic", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["search_sims"] == 5
