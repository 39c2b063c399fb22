"""Simulators that are started by the learner: watched, recycled without a loss, and never left behind."""

import os
import shlex
import signal
import subprocess
import sys
import time

import numpy as np
import psutil
import pytest

import corral
from corral.core.errors import EnvFailed, UserError

SERVE = f"{shlex.quote(sys.executable)} -m corral.cli.main serve {{env}} --connect {{{{url}}}}"


@pytest.fixture(autouse=True)
def _importable(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))


def make(env, num_envs, sims, **options):
    kwargs = {"sim": SERVE.format(env=env), "sims": sims, **options}
    return corral.make_vec("tcp://127.0.0.1:0", num_envs, env_kwargs=kwargs)


def simulators():
    return [p for p in psutil.Process().children(recursive=True) if "corral.cli.main" in _command(p)]


def _command(process):
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def step(vec, batch):
    vec.send(batch.env_ids, np.zeros(len(batch), np.int64))
    return vec.recv()


def test_simulators_are_started_and_end_with_the_learner():
    with make("corral.testing:CountingEnv", 4, 2) as vec:
        batch = vec.recv()
        assert len(simulators()) == 2
        assert sorted(s.used_slots for s in vec.fleet.sessions.values()) == [2, 2]
        step(vec, batch)
    assert simulators() == []


def test_a_killed_simulator_is_started_again():
    with make("corral.testing:CountingEnv", 2, 2) as vec:
        batch = vec.recv()
        before = {p.pid for p in simulators()}
        os.kill(min(before), signal.SIGKILL)
        until, faults = time.monotonic() + 30, 0
        while (len(vec.fleet.sessions) < 2 or not faults) and time.monotonic() < until:
            batch = step(vec, batch)
            faults += int(batch.faulty.sum())
        assert faults == 1
        assert len({p.pid for p in simulators()} - before) == 1
    assert simulators() == []


def test_recycling_cuts_no_episode():
    with make("corral.testing:CountingEnv", 2, 1, recycle_episodes=20) as vec:
        batch, first, seen = vec.recv(), {p.pid for p in simulators()}, set()
        until = time.monotonic() + 60
        while len(seen - first) < 2 and time.monotonic() < until:
            batch = step(vec, batch)
            assert not batch.faulty.any()
            np.testing.assert_array_equal(batch.next_obs[:, 2], batch.reward)
            np.testing.assert_array_equal(batch.terminated, batch.reward == 5)
            seen |= {p.pid for p in simulators()}
        assert len(seen - first) >= 2
        assert vec.restarts == 0
    assert simulators() == []


@pytest.mark.slow
def test_a_leaking_simulator_is_recycled_under_its_limit():
    with make("helpers.leaky_env:Leaky", 2, 1, recycle_mb=300) as vec:
        batch, most, seen = vec.recv(), 0, set()
        until = time.monotonic() + 60
        while len(seen) < 3 and time.monotonic() < until:
            for _ in range(20):
                batch = step(vec, batch)
                time.sleep(0.005)  # so that the next one is up before this one is far too fat
            for p in simulators():
                seen.add(p.pid)
                most = max(most, _rss(p))
        assert len(seen) >= 3
        assert most < 700e6
        assert vec.restarts == 0
    assert simulators() == []


def _rss(process):
    try:
        return process.memory_info().rss
    except psutil.Error:
        return 0


def test_nothing_is_left_when_the_learner_is_killed():
    options = {"sim": SERVE.format(env="corral.testing:CountingEnv"), "sims": 2}
    code = f"""
import corral, time
vec = corral.make_vec("tcp://127.0.0.1:0", 2, env_kwargs={options!r})
vec.recv()
print("up", flush=True)
time.sleep(60)
"""
    learner = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert learner.stdout.readline().strip() == "up"
    sims = [p for p in psutil.Process(learner.pid).children(recursive=True) if "corral.cli.main" in _command(p)]
    assert len(sims) == 2
    learner.kill()
    learner.wait()
    learner.stdout.close()
    _, alive = psutil.wait_procs(sims, 5)
    assert alive == []


HELPER = """
import os, subprocess, sys
note, *command = sys.argv[1:]
code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(120)"
helper = subprocess.Popen([sys.executable, "-c", code], start_new_session=True, stdout=subprocess.DEVNULL)
with open(note, "a") as file:
    file.write(f"{helper.pid}\\n")
os.execv(command[0], command)
"""


@pytest.mark.linux("marks of processes in /proc")
@pytest.mark.parametrize("end", ["closed", "killed"])
def test_grandchildren_in_own_session_end_with_simulator(tmp_path, end):
    (tmp_path / "sim.py").write_text(HELPER)
    note, serve = tmp_path / "helpers", SERVE.format(env="corral.testing:CountingEnv")
    sim = f"{shlex.quote(sys.executable)} {tmp_path}/sim.py {note} {serve}"
    code = f"""
import corral
with corral.make_vec("tcp://127.0.0.1:0", 2, env_kwargs={{"sim": {sim!r}}}) as vec:
    vec.recv()
    print("up", flush=True)
    input()
"""
    learner = subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert learner.stdout.readline().strip() == "up"
    (helper,) = (psutil.Process(int(pid)) for pid in note.read_text().split())
    try:
        if end == "killed":
            learner.kill()
        learner.communicate("go on\n", 30)
        assert psutil.wait_procs([helper], 10)[1] == []
    finally:
        if helper.is_running():
            helper.kill()


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("./no_such_simulator --connect {url}", "cannot be started"),
        ("sleep 1", "no {url}"),
        ("", "empty"),
        ("x 'unclosed {url}", "cannot be read as a command"),
    ],
)
def test_invalid_command_is_refused(command, words):
    with pytest.raises(UserError, match=words.replace("{", r"\{")):
        corral.make_vec("tcp://127.0.0.1:0", 1, env_kwargs={"sim": command})
    assert simulators() == []


def test_simulator_that_exits_at_once_is_given_up():
    with pytest.raises(EnvFailed, match="exit code 3"):
        corral.make_vec("tcp://127.0.0.1:0", 1, env_kwargs={"sim": "sh -c 'exit 3' {url}"})


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        ({"sims": 0, "sim": "x {url}"}, "at least 1"),
        ({"sims": "two"}, "must be of type int"),
        ({"recycle_mb": -1}, "at least 0"),
        ({"tokenfile": "x"}, "not an option"),
        ({"token_file": "/no/such/file"}, "cannot be read"),
    ],
)
def test_invalid_options_are_refused(kwargs, words):
    with pytest.raises(UserError, match=words):
        corral.make_vec("tcp://127.0.0.1:0", 1, env_kwargs=kwargs)
