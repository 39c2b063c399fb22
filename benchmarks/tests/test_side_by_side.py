"""`python -m benchmarks training --case side-by-side`: several runs at once."""

import subprocess

import pytest

from benchmarks.common.rounds import Spread
from benchmarks.training import side_by_side
from benchmarks.training.side_by_side import SideBySide, run_together

CARTPOLE = ("ppo", "--env", "CartPole-v1")


def test_runs_at_once_count_their_own_steps(monkeypatch):
    started = []
    real = subprocess.Popen

    def start(*args, **kwargs):
        started.append(real(*args, **kwargs))
        return started[-1]

    monkeypatch.setattr(side_by_side.subprocess, "Popen", start)
    found = run_together([CARTPOLE, CARTPOLE], 1.0)
    assert all(done.steps > 0 and done.seconds > 0 for done in found)
    assert all(process.returncode is not None for process in started)


def test_a_run_that_fails_reports_its_error():
    with pytest.raises(RuntimeError, match="NoSuchEnv"):
        run_together([("ppo", "--env", "NoSuchEnv-v0")], 1.0)


def test_shares_are_relative_to_one_alone():
    alone = {"1 images": [[100.0, 200.0]], "1 MLP": [[1000.0, 1000.0]]}
    pairs = {"2 images": [[50.0, 100.0]] * 2, "2 MLP": [[400.0, 400.0]] * 2}
    result = SideBySide(alone | pairs | {"2 images + 2 MLP": [[25.0, 50.0]] * 2 + [[400.0, 500.0]] * 2})
    assert result.shares("2 images")[-1] == Spread(1.0, 1.0, 1.0)
    *_, mlp, total = result.shares("2 images + 2 MLP")
    assert mlp == Spread(pytest.approx(0.45), 0.4, 0.5)
    assert total == Spread(pytest.approx(1.4), pytest.approx(1.3), pytest.approx(1.5))
    assert result.to_json()["shares"].keys() == {"2 images", "2 MLP", "2 images + 2 MLP"}
