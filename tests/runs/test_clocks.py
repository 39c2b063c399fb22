"""When checkpoints are due."""

import itertools
import os
from types import SimpleNamespace

import corral
from corral.runs.callbacks import clocks
from corral.runs.callbacks.clocks import Checkpoints
from corral.testing import CountingEnv


class Saves:
    """A run whose saves take the given seconds of a clock."""

    def __init__(self, monkeypatch, *seconds):
        self.now, self._seconds, self.steps, self.saved = 0.0, list(seconds), 0, []
        self.config = SimpleNamespace(steps=10**9, eval_background=False)
        monkeypatch.setattr(clocks, "time", SimpleNamespace(monotonic=lambda: self.now))

    def save(self, best):
        self.saved.append(self.now)
        self.now += self._seconds.pop(0) if self._seconds else 0.01


def trained(run, checkpoints, seconds):
    checkpoints.on_start(run)
    until = run.now + seconds
    while run.now < until:
        run.now += 0.5
        run.steps += 1
        checkpoints.on_update(run, {})
    return run.saved


def config(every_s):
    return SimpleNamespace(checkpoint_every=0, checkpoint_every_s=every_s)


def test_a_first_save_that_waits_for_the_start_stretches_nothing(monkeypatch):
    run = Saves(monkeypatch, 30.0)
    saved = trained(run, Checkpoints(config(5.0), save_first=True), 20)
    assert saved[:2] == [0.0, 35.0]
    assert max(b - a for a, b in itertools.pairwise(saved[1:])) < 6


def test_one_slow_save_stretches_nothing_but_slow_saves_do(monkeypatch):
    run = Saves(monkeypatch, 0.01, 30.0, 0.01, *[1.0] * 20)
    saved = trained(run, Checkpoints(config(5.0), save_first=False), 200)
    gaps = [b - a for a, b in itertools.pairwise(saved)]
    assert max(gaps[:3]) <= 36
    assert gaps[-1] >= 20, "at most 5 % of the time"


class Wanders(CountingEnv):
    """Changes the working directory, as some simulators do to find their files."""

    def reset(self, *, seed=None, options=None):
        os.chdir("/")
        return super().reset(seed=seed, options=options)


def test_an_env_that_changes_the_directory_keeps_the_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    settings = {"backend": "local", "num_envs": 1, "num_steps": 32, "eval_episodes": 1, "checkpoint_every_s": 0.01}
    result = corral.train("ppo", env=Wanders, steps=256, run_dir="run", quiet=True, **settings)
    assert result.run_dir == tmp_path / "run"
    assert {"checkpoints", "config.yaml", "metrics.csv"} <= set(os.listdir(tmp_path / "run"))
    assert corral.load_policy(result.run_dir, "latest").step == 256
