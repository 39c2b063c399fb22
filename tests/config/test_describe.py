"""The settings of an algorithm, as `corral train ALGO --help` lists them."""

import sys

import pytest

from corral.algos.registry import ALGORITHMS
from corral.cli.main import main
from corral.config.describe import describe_settings
from corral.config.experiment import Experiment
from corral.config.overrides import leaves, short_name


def help_of(capsys, monkeypatch, *args):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as end:
        main(["train", *args, "--help"])
    assert end.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("algo", ALGORITHMS)
def test_every_setting_is_listed_with_its_meaning(algo):
    text = describe_settings(algo, "none", 80)
    assert max(map(len, text.splitlines())) <= 80
    names = leaves(Experiment.make(algo, "CartPole-v1"))
    rows = {
        line.split("=")[0].strip(): line for line in text.splitlines() if line.startswith("  ") and "=" in line[:34]
    }
    assert {short_name(name, names) for name in names} - {"algo", "env"} <= rows.keys()
    below = dict(zip(text.splitlines(), text.splitlines()[1:], strict=False))
    assert all(line[32:].strip() or below[line].startswith(" " * 32) for line in rows.values()), "one has no meaning"


def test_help_of_an_algorithm_has_its_own_settings(capsys, monkeypatch):
    ppo, dqn = (help_of(capsys, monkeypatch, algo) for algo in ("ppo", "dqn"))
    assert "clip_coef=0.2*  " in ppo
    assert "Clip range of the probability ratio" in ppo
    assert "clip_coef" not in dqn
    assert "buffer_size=100000*  " in dqn
    for text in (ppo, dqn):
        assert "One of none, lstm or gru." in text
        for title in ("Run:", "Evaluation, checkpoints and log:", "Settings of topologies with actors:"):
            assert f"\n{title}\n" in text


def test_help_with_an_env_shows_its_preset(capsys, monkeypatch):
    text = help_of(capsys, monkeypatch, "--env", "CartPole-v1", "ppo")
    assert "with the values of the preset CartPole-v1" in text
    assert "  clip_coef=0.2:0*" in text
    assert "  preset=CartPole-v1" in text
    assert "  clip_coef=0.2*" in help_of(capsys, monkeypatch, "ppo", "--env=CartPole-v1", "--preset=none")


def test_help_of_train_lists_the_settings_of_ppo(capsys, monkeypatch):
    assert "\nSettings of ppo with their defaults" in help_of(capsys, monkeypatch)


def test_help_of_an_unknown_algorithm_says_so(capsys):
    assert main(["train", "sac", "--help"]) == 2
    assert capsys.readouterr().err.startswith("corral: sac is not in this version; for continuous actions there is ppo")


def test_help_of_a_users_own_algorithm_lists_its_settings(capsys, monkeypatch, tmp_path):
    (tmp_path / "own_algo.py").write_text(
        "from dataclasses import dataclass\nfrom corral.algos.ppo import Ppo\n"
        '@dataclass(frozen=True)\nclass Config:\n    """Mine."""\n    speed: float = 0.5\n    """How fast."""\n'
        "class Mine(Ppo):\n    pass\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    text = help_of(capsys, monkeypatch, "own_algo:Mine")
    assert "\nMine:\n  speed=0.5                     How fast.\n" in text
