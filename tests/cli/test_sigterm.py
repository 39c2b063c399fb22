"""A command that is told to end ends what it has started."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

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
