from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from corral.algos.registry import ALGORITHMS
from corral.cli.console import number_format, print_table
from corral.cli.list import ListAlgos, ListPresets
from corral.cli.main import main
from corral.cli.options import parse
from corral.cli.resume import Resume
from corral.cli.train import Train, print_result
from corral.config.presets import all_presets
from corral.core.errors import UserError
from corral.runs.train import train as run_train
from corral.runs.training_loop import Result

HERE = Path(__file__).parent
SMALL = ["--preset", "none", "--set", "num_steps=8", "num_minibatches=1", "eval_episodes=1", "--num-envs", "2"]


def corral(*args, cwd):
    return subprocess.run(
        [sys.executable, "-m", "corral", *map(str, args)],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE.parents[1]), *sys.path[1:]])},
    )


def settings_of(run):
    return yaml.safe_load((run / "config.yaml").read_text())


def train(*args):
    return parse(Train, args, "corral train").run()


def test_train_then_resume_from_the_command_line(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["train", "ppo", "--env", "CartPole-v1", "--steps", "6.4e1", "--seed", "3", *SMALL]) == 0
    run = tmp_path / "runs" / "ppo-CartPole-v1-3-1"
    where, score, following = capsys.readouterr().out.splitlines()
    assert where.startswith("Run: runs/ppo-CartPole-v1-3-1, 64 steps in ")
    assert score.startswith("Evaluation: mean return ")
    assert "corral eval runs/ppo-CartPole-v1-3-1" in following
    stored = settings_of(run)
    assert (stored["steps"], stored["seed"], stored["num_envs"], stored["preset"]) == (64, 3, 2, "none")

    done = corral("resume", "runs/ppo-CartPole-v1-3-1", "--steps", "1_28", "--quiet", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "128 steps" in done.stdout
    assert done.stderr == ""
    assert settings_of(run)["steps"] == 128


def test_mistake_is_exit_code_2_without_folder(tmp_path):
    done = corral("train", "ppo", "--env", "CartPole-v1", "--set", "gamm=1", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "corral: No setting 'gamm'; did you mean gamma?\n"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ([], "ALGO"),
        (["pppo", "--env", "CartPole-v1"], "did you mean ppo?"),
        (["ppo"], "ppo needs an environment"),
        (["ppo", "--env", "CartPol-v1"], "Close: CartPole-v1"),
        (["ppo", "--env", "no_such_module:Env"], "cannot be imported"),
        (["ppo", "--env", "CartPole-v1", "--steps", "many"], "steps must be an integer, got 'many'"),
        (["ppo", "--env", "CartPole-v1", "--steps", "1.5"], "steps must be an integer"),
        (["ppo", "--env", "CartPole-v1", "--step", "5"], "did you mean --steps?"),
        (["ppo", "--env", "CartPole-v1", "--envs-per-actor", "5"], "no option --envs-per-actor; set num_envs"),
        (["ppo", "--env", "CartPole-v1", "--set", "lr"], "--set takes key=value, got 'lr'"),
        (
            ["ppo", "--env", "CartPole-v1", "--set", "learning_rate=fast"],
            "algorithm.learning_rate must be a number, got 'fast'",
        ),
        (["ppo", "--env", "CartPole-v1", "--set", "learning_rate=-1"], "learning_rate must be above 0"),
        (["ppo", "--env", "CartPole-v1", "--set", "lr=1"], "it is called learning_rate now"),
        (["ppo", "--env", "CartPole-v1", "--steps", "9", "--set", "steps=5"], "set twice, by --steps and by --set"),
        (["ppo", "--num-envs", "9", "--set", "num-envs=5"], "set twice, by --num-envs and by --set"),
        (["ppo", "--env", "CartPole-v1", "--set", "quiet=true"], "not a setting: use the argument --quiet"),
        (["ppo", "--set", "env_kwargs=3"], "env_kwargs must be a mapping"),
        (["ppo", "--env", "CartPole-v1", "--topology", "impala"], "topology must be sync"),
        (["ppo", "--env", "CartPole-v1", "--runtime", "cloud"], "runtime must be auto, inline, process or ray"),
        (["ppo", "--env", "CartPole-v1", "--actors", "4"], "set num_envs, or topology=actor_learner"),
        (["ppo", "--env", "CartPole-v1", "--preset", "Cartpole"], "did you mean CartPole-v1?"),
        (["ppo", "--env", "CartPole-v1", "--config", "nowhere.yaml"], "Cannot read nowhere.yaml"),
        (["ppo", "--env", "CartPole-v1", "--env-kwargs", "sutton"], "--env-kwargs takes key=value"),
    ],
)
def test_mistake_is_one_line(tmp_path, monkeypatch, args, words):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as caught:
        train(*args)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["nowhere"], "no run at nowhere"),
        (["nowhere", "--steps", "x"], "--steps must be an integer"),
        ([], "DIR"),
    ],
)
def test_unresumable_run_is_one_line(tmp_path, monkeypatch, args, words):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as caught:
        parse(Resume, args, "corral resume").run()
    assert words in str(caught.value)


def test_set_takes_settings_that_have_an_option(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    train(
        "ppo", "--run-dir", "here", "--quiet", "--set", "env=CartPole-v1", "steps=32", "seed=3", "num-envs=2",
        "topology=sync", "preset=none", 'env_kwargs={"sutton_barto_reward": true}', "num_steps=8",
        "num_minibatches=1", "eval_episodes=0",
    )  # fmt: skip
    stored = settings_of(tmp_path / "here")
    assert (stored["env"], stored["steps"], stored["seed"], stored["num_envs"]) == ("CartPole-v1", 32, 3, 2)
    assert stored["env_kwargs"] == {"sutton_barto_reward": True}


def test_options_and_files_reach_the_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("mine.yaml").write_text("gamma: 0.5\nlearning_rate: 5e-3\nsteps: 1000\n")
    train(
        "ppo", "--env", "CartPole-v1", "--config", "mine.yaml", "--steps", "32", "--run-dir", "here", "--quiet",
        "--env-kwargs", "sutton_barto_reward=true", "--set", "learning_rate=1e-4", "hidden_sizes=8,8", *SMALL
    )  # fmt: skip
    stored = settings_of(tmp_path / "here")
    assert (stored["steps"], stored["env_kwargs"]) == (32, {"sutton_barto_reward": True})
    algorithm = stored["algorithm"]
    assert (algorithm["learning_rate"], algorithm["gamma"], algorithm["net"]["hidden_sizes"]) == (1e-4, 0.5, [8, 8])
    assert "Run: here, 32 steps" in capsys.readouterr().out
    with pytest.raises(UserError, match="already holds a run"):
        train("ppo", "--env", "CartPole-v1", "--run-dir", "here")


@pytest.mark.parametrize(
    ("result", "lines"),
    [
        (
            Result(
                Path("a b"), 1000, 2.0, 12.34, 5, best_return=20.0, best_step=900, best_report=18.0, eval_episodes=10
            ),
            ["'a b', 1,000 steps", "12.3 over 10 episodes; best 20.0 after 900 steps, 18.0 in episodes", "2000"],
        ),
        (Result(Path("x"), 10, 2.0, float("nan"), 5), ["x, 10 steps", "Evaluation: none", "resume x --steps 20"]),
        (
            Result(Path("x"), 10, 2.0, 1.0, 5, eval_episodes=1, stopped=True, stop_reason="it is good enough"),
            ["stopped after 10 steps in 2.0 s: it is good enough", "1.00 over 1 episode", "corral resume x"],
        ),
    ],
)
def test_result_names_folder_score_and_next_commands(capsys, result, lines):
    print_result(result)
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == 3
    for words, line in zip(lines, printed, strict=True):
        assert words in line
    assert printed[2].endswith("resume x") == result.stopped


@pytest.mark.parametrize(
    ("steps", "said"),
    [(240, "240 steps, rounded up to 400 by whole rollouts of 50 x 4, seed 0"), (390, "390 steps, seed 0")],
)
def test_steps_rounded_up_by_whole_rollouts_are_said(tmp_path, caplog, steps, said):
    settings = {"preset": "none", "num_envs": 4, "num_steps": 50, "eval_episodes": 0}
    with caplog.at_level(logging.INFO, "corral.runs"):
        run_train("ppo", "CartPole-v1", steps, run_dir=tmp_path / "run", **settings)
    assert any(message.startswith(said) for message in caplog.messages)


def test_a_package_that_sets_up_logging_changes_no_message(tmp_path):
    (tmp_path / "noisy.py").write_text(
        "import logging, gymnasium\n"
        "logging.basicConfig(format='NOISE %(message)s')\n"
        "def make():\n    return gymnasium.make('CartPole-v1')\n"
    )
    args = "train ppo --env noisy:make --preset none --num-envs 2 --steps 32 --set num_steps=16 eval_episodes=0"
    done = corral(*args.split(), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "corral: ppo on noisy:make" in done.stderr
    assert "NOISE" not in done.stderr


def test_small_returns_have_more_decimals(capsys):
    print_result(Result(Path("x"), 10, 2.0, 0.9613, 5, best_return=0.9487, best_step=9, eval_episodes=5))
    assert "mean return 0.961 over 5 episodes; best 0.949 after 9 steps" in capsys.readouterr().out
    assert [number_format(size)(size) for size in (0.0, 0.00342, 7.541, 12.34, -145.27)] == [
        "0.0", "0.00342", "7.54", "12.3", "-145.3",
    ]  # fmt: skip


def test_lists_have_one_line_each_when_piped(capsys):
    ListAlgos().run()
    rows = [line.split("\t") for line in capsys.readouterr().out.splitlines()]
    assert [row[0] for row in rows] == list(ALGORITHMS)
    assert {len(row) for row in rows} == {4}
    ListPresets().run()
    rows = [line.split("\t") for line in capsys.readouterr().out.splitlines()]
    assert [(row[0], row[1]) for row in rows] == list(all_presets())
    assert {row[2] for row in rows} <= {"untested", "verified"}


def test_lists_are_tables_on_a_terminal(capsys, monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    print_table(("name", "note"), [("a", "first"), ("b", "second")])
    lines = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out).splitlines()
    assert [line.split() for line in lines] == [["name", "note"], ["a", "first"], ["b", "second"]]


def test_presets_fit_into_80_columns(capsys, monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "80")
    ListPresets().run()
    lines = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out).splitlines()
    assert max(map(len, lines)) <= 80
    heads = [tuple(line.split()) for line in lines if not line.startswith(" ")]
    assert heads == [(*key, preset.status) for key, preset in all_presets().items()]


def test_listing_loads_no_torch():
    code = "import sys\nfrom corral.cli.list import ListAlgos\nListAlgos().run()\nprint('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=HERE.parents[1])
    assert done.stdout.splitlines()[-1] == "False"


def test_simulators_start_again_from_another_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    program = tmp_path / "sim"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m corral serve CartPole-v1 --connect "$1"\n')
    program.chmod(0o755)
    options = ["--env", "tcp://127.0.0.1:0", "--sim", "./sim {url}", "--sims", "2", "--steps", "32", *SMALL]
    assert main(["train", "ppo", *options]) == 0
    run = tmp_path / "runs" / "ppo-sim-0-1"
    assert settings_of(run)["env_kwargs"]["sim"] == f"{program} {{url}}"
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert main(["eval", str(run), "--episodes", "1"]) == 0


def test_a_class_that_is_no_algorithm_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"helpers.two_groups:Config is not an algorithm: name a subclass of"):
        train("helpers.two_groups:Config", "--env", "CartPole-v1", "--run-dir", str(tmp_path / "run"))
    assert not (tmp_path / "run").exists()


def test_resume_takes_changed_settings(tmp_path, capsys):
    words = ["--env", "CartPole-v1", "--steps", "32", "--run-dir", str(tmp_path / "run"), "--quiet", *SMALL]
    assert main(["train", "ppo", *words]) == 0
    capsys.readouterr()
    assert main(["resume", str(tmp_path / "run"), "--steps", "1k", "--set", "steps=2k"]) == 2
    assert capsys.readouterr().err == "corral: steps is set twice, by --steps and by --set.\n"
    assert main(["resume", str(tmp_path / "run"), "--actors", "2"]) == 2
    assert "has no actors" in capsys.readouterr().err
    assert main(["resume", str(tmp_path / "run"), "--quiet", "--set", "learning_rate=1e-4", "steps=64"]) == 0
    assert settings_of(tmp_path / "run")["algorithm"]["learning_rate"] == 1e-4


@pytest.mark.parametrize("name", ["run_dir", "sim", "sims", "callback", "sink", "overwrite", "config", "set"])
def test_set_of_an_option_that_is_no_setting_names_it(tmp_path, name):
    with pytest.raises(UserError, match=f"{name} is not a setting: use the argument --{name.replace('_', '-')}"):
        train("ppo", "--env", "CartPole-v1", "--set", f"{name}=x")
