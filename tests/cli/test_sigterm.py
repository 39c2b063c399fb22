"""A command that is told to end ends what it has started."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest

import corral
from corral.cli.main import main
from corral.runs.sinks.csv import read_metrics
from corral.testing import CountingEnv

ROOT = Path(__file__).parents[2]


def test_sigterm_of_a_benchmark_ends_the_runs_it_has_started(tmp_path):
    words = ["learning", "--only", "a2c CartPole", "--seeds", "1", "--out", str(tmp_path / "x.md")]
    bench = subprocess.Popen([sys.executable, "-m", "benchmarks", *words], stdout=subprocess.DEVNULL, cwd=ROOT)
    children, until = [], time.monotonic() + 60
    try:
        while not children and time.monotonic() < until:
            time.sleep(0.1)
            children = psutil.Process(bench.pid).children(recursive=True)
        assert children
        bench.send_signal(signal.SIGTERM)
        assert bench.wait(30) == 128 + signal.SIGTERM
        _, alive = psutil.wait_procs(children, 20)
        assert not alive
    finally:
        for process in [*children, psutil.Process(bench.pid)] if bench.poll() is None else children:
            if process.is_running():
                process.kill()


class Stopped(CountingEnv):
    """Once armed, the process gets a signal in every step."""

    armed = False

    def __init__(self, render_mode=None):
        super().__init__()
        self.render_mode = render_mode

    def step(self, action):
        if self.armed:
            signal.raise_signal(signal.SIGTERM)
        return super().step(action)

    def render(self):
        return np.zeros((16, 16, 3), np.uint8)


@pytest.mark.parametrize("words", [["eval"], ["record", "-o", "video.gif"]])
def test_sigterm_within_a_step_is_no_fault_of_the_environment(words, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    settings = {"preset": "none", "quiet": True, "eval_episodes": 0, "backend": "local", "num_envs": 2}
    corral.train("a2c", Stopped, 64, 0, "run", **settings)
    monkeypatch.setattr(Stopped, "armed", True)
    assert main([words[0], "run", *words[1:]]) == 128 + signal.SIGTERM
    assert "raised an exception" not in capfd.readouterr().err
    assert not (tmp_path / "video.gif").exists()


@pytest.mark.skipif(not hasattr(signal, "SIGHUP"), reason="Windows has no SIGHUP")
@pytest.mark.parametrize("ignored", [False, True])
def test_a_closed_terminal_stops_a_run_unless_it_has_nohup(ignored, tmp_path):
    """Without the signal's handler, what was learned since the last checkpoint would be lost."""
    words = ["train", "a2c", "--env", "CartPole-v1", "--run-dir", str(tmp_path / "run"), "--steps", "1000000000"]
    words += ["--set", "num_envs=2", "backend=local", "eval_episodes=0", "log_every=1"]
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN if ignored else signal.SIG_DFL)  # what a child inherits
    try:
        run = subprocess.Popen([sys.executable, "-m", "corral", *words], stderr=subprocess.DEVNULL)
    finally:
        signal.signal(signal.SIGHUP, before)
    try:
        until = time.monotonic() + 60
        while not read_metrics(tmp_path / "run") and time.monotonic() < until:
            time.sleep(0.1)
        run.send_signal(signal.SIGHUP)
        if ignored:
            with pytest.raises(subprocess.TimeoutExpired):
                run.wait(2)
        else:
            assert run.wait(30) == 0
            assert (tmp_path / "run" / "checkpoints" / "latest").exists()
    finally:
        run.kill()
        run.wait(10)
