"""Parts of a run are killed at random moments; it still learns, and leaves nothing behind."""

import json
import os
import random
import signal
import subprocess
import sys
import time

import psutil
import pytest

from corral.runs.events import count_events
from corral.runs.folder import RunFolder
from corral.runs.metrics import read_metrics

SETTINGS = ["checkpoints.every_s=1", "evaluation.episodes=5"]

pytestmark = pytest.mark.faults


class Run:
    """`corral train` in a process of its own, and every process that ever belonged to it."""

    def __init__(self, tmp_path, algo, steps, *options):
        self.path, self.seen = tmp_path / "run", {}
        words = ["train", algo, "--env", "CartPole-v1", "--seed", "1", "--run-dir", str(self.path), "--quiet"]
        words += ["--steps", str(steps)]
        self.log = open(tmp_path / "log", "w+")  # noqa: SIM115 - closed in `finish`
        self.process = subprocess.Popen(
            [sys.executable, "-m", "corral", *words, "--set", *SETTINGS, *options], stdout=self.log, stderr=self.log
        )

    def look(self):
        for child in psutil.Process(self.process.pid).children(recursive=True):
            self.seen[child.pid] = child

    def steps(self):
        try:
            return read_metrics(self.path / "metrics.csv")["env_steps"][-1]
        except (OSError, KeyError, IndexError):
            return 0

    def wait_for(self, condition, timeout_s=120):
        until = time.monotonic() + timeout_s
        while not condition():
            assert self.process.poll() is None, self.text()
            assert time.monotonic() < until, self.text()
            self.look()
            time.sleep(0.05)

    def pid_of(self, name):
        if name == "learner":
            return RunFolder.open(self.path).holder()
        parts = json.loads((self.path / "parts.json").read_text())
        return next(part["pid"] for part in parts if part["name"] == name)

    def kill(self, name):
        pid = self.pid_of(name)
        os.kill(pid, signal.SIGKILL)
        return pid

    def text(self):
        self.log.flush()
        self.log.seek(0)
        return self.log.read()

    def finish(self, timeout_s=240):
        code = self.process.wait(timeout_s)
        until = time.monotonic() + 10
        while (left := [p for p in self.seen.values() if p.is_running()]) and time.monotonic() < until:
            time.sleep(0.1)
        text = self.text()
        self.log.close()
        assert code == 0, text
        assert not left, left


@pytest.fixture
def start(tmp_path):
    runs = []

    def make(algo, *options):
        runs.append(Run(tmp_path, algo, *options))
        return runs[-1]

    yield make
    for run in runs:
        run.process.kill()
        run.process.wait()


@pytest.mark.parametrize(
    ("algo", "options", "victims"),
    [
        ("impala", (120_000,), ("actor 0", "actor 0")),
        ("impala", (120_000,), ("learner", "learner")),
        ("seed_impala", (120_000,), ("inference",)),
        ("apex", (60_000, "replay_shards=2"), ("replay 1",)),
    ],
    ids=["an actor", "the learner", "the inference server", "a replay shard"],
)
def test_a_run_survives_the_death_of(start, algo, options, victims):
    run = start(algo, *options)
    rng = random.Random(os.getpid())
    for killed, name in enumerate(victims, 1):
        target = run.steps() + rng.randint(3_000, 15_000)
        run.wait_for(lambda target=target: run.steps() >= target and (run.path / "parts.json").exists())
        victim = run.kill(name)
        run.wait_for(lambda killed=killed: count_events(run.path / "events.jsonl")["lost"] >= killed)
        run.wait_for(lambda name=name, victim=victim: run.pid_of(name) not in (None, victim))
    run.finish()
    columns = read_metrics(run.path / "metrics.csv")
    assert max(columns["eval/return"][columns["eval/return"] == columns["eval/return"]]) > 300
    assert all(b > a for a, b in zip(columns["env_steps"], columns["env_steps"][1:], strict=False))
