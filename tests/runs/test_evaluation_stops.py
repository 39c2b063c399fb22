"""A signal ends an evaluation at once: its result is dropped, and the run is saved as at any other stop."""

import json
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from corral.core.portable import STOP_SIGNALS
from corral.runs.checkpoints.checkpoint import load_checkpoint
from corral.runs.events import read_events
from corral.runs.sinks.csv import read_metrics

_WORDS = [
    "ppo", "--env", "tests.helpers.slow_eval_env:SlowEval", "--preset", "none", "--steps", "64", "--num-envs", "2",
    "--set", "num_steps=8", "num_minibatches=1", "eval_episodes=2",
]  # fmt: skip
_ASLEEP = pytest.param("reset", marks=pytest.mark.linux("signals to a thread, which wake it", hidden=True))
_END_S = 60  # the environments would go on for an hour


class SlowRun:
    """`corral train` whose evaluation environments become slow at a chosen moment."""

    def __init__(self, path, *settings, **slow):
        self.path, self.mark = path / "run", path / "mark"
        kwargs = json.dumps({"mark": str(self.mark), **slow})
        words = ["train", *_WORDS, *settings, f"eval_env_kwargs={kwargs}", "--run-dir", str(self.path)]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "corral", *words], stderr=subprocess.PIPE, text=True, env=os.environ
        )
        self.children = []

    def wait_until_slow(self):
        until = time.monotonic() + 120
        while not self.mark.exists():
            assert self.process.poll() is None, self.process.stderr.read()
            assert time.monotonic() < until
            time.sleep(0.05)
        self.children = psutil.Process(self.process.pid).children(recursive=True)

    def end(self, number):
        """Send a signal; returns the exit code and what the run wrote to the terminal."""
        self.process.send_signal(number)
        try:
            text = self.process.communicate(timeout=_END_S)[1]
        finally:
            self.process.kill()
        _, alive = psutil.wait_procs(self.children, 20)
        assert not alive
        return self.process.returncode, text

    def events(self):
        return [event["kind"] for event in read_events(self.path / "events.jsonl")]

    def evaluations(self):
        found = read_metrics(self.path).get("eval/return", [])
        return int(sum(value == value for value in found))


_NUMBERS = [signal.SIGINT, *(pytest.param(n, marks=pytest.mark.slow) for n in STOP_SIGNALS if n != signal.SIGINT)]


@pytest.mark.parametrize("number", _NUMBERS)
@pytest.mark.parametrize("slow_in", ["reset", "episode"])
def test_a_signal_ends_an_evaluation_during_training(tmp_path, number, slow_in):
    run = SlowRun(tmp_path, "eval_every=32", slow_in=slow_in)
    run.wait_until_slow()
    code, text = run.end(number)
    assert code == 0, text
    assert "stopping: saving a checkpoint first" in text
    assert run.events()[-1] == "stopped"
    assert run.evaluations() == 0
    assert load_checkpoint(run.path / "checkpoints" / "latest")[1]["step"] == 32


@pytest.mark.parametrize(("slow_from", "evaluations"), [(1, 0), (9, 1)])
def test_a_signal_ends_the_last_evaluation_and_the_report(tmp_path, slow_from, evaluations):
    """Two episodes of each kind begin four and then end; the ninth reset is the report's."""
    run = SlowRun(tmp_path, "eval_every=1000", slow_in="reset", slow_from=slow_from)
    run.wait_until_slow()
    code, text = run.end(signal.SIGTERM)
    assert code == 0, text
    assert run.evaluations() == evaluations
    assert load_checkpoint(run.path / "checkpoints" / "latest")[1]["step"] == 64


@pytest.mark.parametrize("slow_in", ["episode", _ASLEEP])
def test_a_learner_process_passes_a_signal_to_its_evaluation(tmp_path, slow_in):
    run = SlowRun(tmp_path, "eval_every=32", "topology=actor_learner", "actors=1", "backend=local", slow_in=slow_in)
    run.wait_until_slow()
    code, text = run.end(signal.SIGTERM)
    assert code == 0, text
    assert run.evaluations() == 0
    assert run.events()[-1] == "stopped"


@pytest.mark.parametrize("number", [pytest.param(signal.SIGTERM, marks=pytest.mark.slow), signal.SIGKILL])
def test_nothing_is_left_of_an_evaluation_in_the_background(tmp_path, number):
    run = SlowRun(tmp_path, "eval_every=16", "eval_background=true", "backend=process", "workers=1", slow_in="reset")
    run.wait_until_slow()
    code, text = run.end(number)
    assert code == (0 if number == signal.SIGTERM else -number), text
