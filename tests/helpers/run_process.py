"""`corral train` as a whole, whose parts a test may kill."""

import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import psutil

from corral.runs.folder import RunFolder
from corral.runs.sinks.csv import read_metrics

SETTINGS = ["checkpoint_every_s=1", "eval_episodes=5"]


class Run:
    """`corral train` in a process of its own, and every process that ever belonged to it."""

    def __init__(self, tmp_path, algo, steps, *options, words=(), **env):
        self.path, self.seen = tmp_path / "run", {}
        words = ["train", algo, "--env", "CartPole-v1", "--seed", "1", "--run-dir", str(self.path), "--quiet", *words]
        words += ["--steps", str(steps)]
        self.log = open(tmp_path / "log", "w+")  # noqa: SIM115 - closed in `finish`
        self.process = subprocess.Popen(
            [sys.executable, "-m", "corral", *words, "--set", *SETTINGS, *options],
            stdout=self.log, stderr=self.log, env=os.environ | env,
        )  # fmt: skip

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
        parts = json.loads((self.path / "processes.json").read_text())
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
        columns = read_metrics(self.path / "metrics.csv")
        assert all(b > a for a, b in zip(columns["env_steps"], columns["env_steps"][1:], strict=False))
        return np.nanmax(columns["eval/return"])
