"""Parts of a run are stopped (SIGSTOP) for good: the others go on within the silence that the run allows."""

import os
import signal
import time

import pytest

pytestmark = pytest.mark.faults
SILENCE_S = 6
_TWO = ("--actors", "2")


@pytest.mark.parametrize(
    ("algo", "options", "words", "victim"),
    [
        ("impala", (), _TWO, "actor 0"),
        ("apex", ("replay_shards=2",), _TWO, "replay 1"),
        ("apex", ("replay_shards=2",), _TWO, "actor 1"),
        ("a3c", (), _TWO, "server 0"),
        ("a3c", (), _TWO, "worker 1"),
        ("gala", (), _TWO, "worker 0"),
        ("dppo", (), _TWO, "worker 1"),
    ],
)
def test_a_frozen_part_holds_nobody_up_for_long(start, algo, options, words, victim):
    run = start(algo, 10**9, f"silence_timeout_s={SILENCE_S}", *options, words=words)
    run.wait_for(lambda: run.steps() > 3_000 and (run.path / "processes.json").exists())
    pid = run.pid_of(victim)
    os.kill(pid, signal.SIGSTOP)
    stopped, longest = time.monotonic(), 0.0
    steps, at = run.steps(), time.monotonic()

    def replaced():
        nonlocal steps, at, longest
        if run.steps() > steps:
            steps, at = run.steps(), time.monotonic()
        longest = max(longest, time.monotonic() - at)
        return run.pid_of(victim) not in (None, pid) and time.monotonic() - stopped > 2 * SILENCE_S

    run.wait_for(replaced)
    assert longest < SILENCE_S + 15  # and the start of its successor, where all have to join again
    run.process.terminate()
    assert run.process.wait(60) == 0
