"""Mistakes at the command line: exit code 2, one sentence, no traceback, and nothing left behind."""

import json

import pytest

from corral.cli.main import main
from corral.runs.train import train

CART = ["--env", "CartPole-v1"]
MISTAKES = {
    "algorithm": (["train", "ppoo", *CART], "did you mean ppo?"),
    "environment": (["train", "ppo", "--env", "CartPoel-v1"], "CartPole-v1"),
    "module": (["train", "ppo", "--env", "nowhere:Env"], "nowhere"),
    "key": (["train", "ppo", *CART, "--set", "learning_rat=1"], "No setting 'learning_rat'"),
    "nearly a key": (["train", "ppo", *CART, "--set", "ent_coeff=0.1"], "did you mean ent_coef"),
    "key of another": (["train", "dqn", *CART, "--set", "clip_coef=0.1"], "clip"),
    "type": (["train", "ppo", *CART, "--set", "update_epochs=many"], "update_epochs must be an integer"),
    "choice": (["train", "a2c", *CART, "--set", "optimizer=sgd"], "optimizer must be"),
    "range": (["train", "ppo", *CART, "--set", "gamma=1.01"], "gamma must be at most 1"),
    "negative": (["train", "ppo", *CART, "--steps", "-5"], "steps must be at least 1"),
    "not a number": (["train", "ppo", *CART, "--set", "learning_rate=nan"], "learning_rate must be"),
    "num_minibatches": (["train", "ppo", *CART, "--set", "num_minibatches=0"], "num_minibatches must be at least 1"),
    "numbers for dqn": (["train", "dqn", "--env", "Pendulum-v1", "--preset", "none"], "dqn needs discrete actions"),
    "memory for dqn": (["train", "dqn", *CART, "--set", "rnn=lstm"], "dqn does not support recurrent networks"),
    "memory for reinforce": (["train", "reinforce", *CART, "--set", "rnn=gru"], "does not support recurrent networks"),
    "images": (["train", "ppo", *CART, "--set", "encoder=nature"], "needs images of at least 36 x 36, got Box"),
    "replay": (["train", "dqn", *CART, "--set", "buffer_size=10", "--preset", "none"], "buffer_size"),
    "layers": (
        ["train", "ppo", *CART, "--set", "hidden_sizes=100000,100000000000"],
        "takes 40,000,000 GB: lower hidden_sizes",
    ),
    "device": (["train", "ppo", *CART, "--set", "device=cuda:7"], "device"),
    "run to resume": (["resume", "nowhere"], "no run at nowhere"),
    "command": (["trian", "ppo"], "did you mean `corral train`?"),
}


def assert_one_sentence(capsys, words):
    said = capsys.readouterr()
    assert said.out == ""
    lines = [line for line in said.err.splitlines() if line and ": backend '" not in line]  # what `auto` chose
    assert len(lines) == 1, said.err
    assert lines[0].startswith("corral: ")
    assert words in lines[0]
    assert "Traceback" not in said.err


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistake_is_exit_code_2_one_line_no_folder(tmp_path, monkeypatch, capsys, mistake):
    args, words = MISTAKES[mistake]
    monkeypatch.chdir(tmp_path)
    if args[0] == "train":
        args = [*args, "--run-dir", "here/run"]
    assert main(args) == 2
    assert_one_sentence(capsys, words)
    assert not (tmp_path / "here" / "run").exists()


@pytest.mark.parametrize(
    ("version", "words"), [(99, "newer version"), (0, "another version"), ("x", "another version")]
)
def test_a_run_of_another_format_is_refused_and_left_as_it_is(tmp_path, monkeypatch, capsys, version, words):
    monkeypatch.chdir(tmp_path)
    settings = {"num_envs": 2, "num_steps": 4, "num_minibatches": 1, "eval_episodes": 0, "backend": "local"}
    train("ppo", "CartPole-v1", 8, run_dir="run", preset="none", quiet=True, **settings)
    info = json.loads((tmp_path / "run" / "run.json").read_text()) | {"format": version}
    (tmp_path / "run" / "run.json").write_text(json.dumps(info))
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")}
    capsys.readouterr()
    assert main(["resume", "run"]) == 2
    assert_one_sentence(capsys, words)
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")} == before


@pytest.mark.parametrize(
    ("option", "words"),
    [
        (["--num-envs", "100000000000"], "num_envs must be at most 131,072, got 100,000,000,000."),
        (
            ["--set", "num_steps=100000000000", "backend=local"],
            "Not enough memory: lower num_envs, num_steps or buffer_size.",
        ),
    ],
)
def test_too_little_memory_is_one_line(tmp_path, capsys, option, words):
    settings = [*CART, "--preset", "none", "--run-dir", str(tmp_path / "run")]
    assert main(["train", "ppo", *settings, *option]) == 2
    said = capsys.readouterr().err.strip().splitlines()[-1]
    assert said == f"corral: {words}"
