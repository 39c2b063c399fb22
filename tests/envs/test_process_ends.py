"""What ends with worker processes, with their parent, and with the threads and forks of both."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path

import numpy as np
import psutil
import pytest
from helpers.orphans import busy_program, gone
from helpers.portable import forced  # noqa: F401

import corral
from corral.testing import CountingEnv, SlowEnv
from corral.testing.play import play

SCRIPT = """
import sys, time
import gymnasium, numpy as np
import corral

class Mine(gymnasium.Env):  # defined in the script, and no `if __name__ == "__main__"` anywhere
    observation_space = gymnasium.spaces.Box(-1, 1, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)
    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(2, np.float32), {}
    def step(self, action):
        if action == 1:
            while True: time.sleep(1)
        return np.zeros(2, np.float32), 0.0, False, False, {}

gymnasium.register("Mine-v0", entry_point=Mine)
for env in (Mine, "Mine-v0"):
    vec = corral.make_vec(env, 4, "process", workers=2)
    batch = vec.recv()
    print(*vec.worker_pids, flush=True)
vec.send(batch.env_ids, np.ones(4, int))
sys.stdin.readline()
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    child = subprocess.Popen([sys.executable, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    yield child
    child.kill()
    child.wait()
    child.stdin.close()
    child.stdout.close()


def test_script_without_main_guard_and_its_kill(script):
    pids = [int(p) for _ in range(2) for p in script.stdout.readline().split()]
    assert len(pids) == 4
    assert all(psutil.pid_exists(p) for p in pids[2:])
    time.sleep(0.3)  # let the environments hang in their step
    os.kill(script.pid, signal.SIGKILL)
    script.wait()
    assert gone(pids)


def test_workers_end_with_a_script_that_forgets_to_close(script):
    pids = [int(p) for _ in range(2) for p in script.stdout.readline().split()]
    script.stdin.write("\n")
    script.stdin.flush()
    assert script.wait(20) == 0
    assert gone(pids)


class Launcher(CountingEnv):
    """Starts a process of its own, as an environment around a simulator does."""

    def __init__(self):
        super().__init__()
        self._child = subprocess.Popen(["sleep", "1000"])

    def reset(self, *, seed=None, options=None):
        obs, info = super().reset(seed=seed, options=options)
        obs[1] = self._child.pid
        return obs, info


@pytest.mark.linux("process groups", hidden=True)
def test_processes_of_an_env_die_with_its_worker():
    with corral.make_vec(Launcher, 1, "process") as vec:
        batch = vec.recv()
        first = int(batch.obs[0, 1])
        os.kill(vec.worker_pids[0], signal.SIGKILL)
        vec.send(batch.env_ids, np.zeros(1, np.int64))
        batch = vec.recv()
        assert batch.faulty.all()
        assert gone([first])
        second = int(batch.obs[0, 1])
        assert psutil.pid_exists(second)
    assert gone([second])


@pytest.mark.parametrize("start", ["make()", "t = threading.Thread(target=make); t.start(); t.join()"])
@pytest.mark.parametrize("how", ["time.sleep(1000)", "while True: pass", "ctypes.PyDLL(None).sleep(1000)"])
def test_sigkill_of_parent_leaves_no_process(how, start, tmp_path):
    path = tmp_path / "script.py"
    path.write_text(busy_program(how, start=start))
    with subprocess.Popen([sys.executable, path], stdout=subprocess.PIPE, text=True) as child:
        pids = [int(p) for p in child.stdout.readline().split()]
        time.sleep(0.3)  # let the environment get into its step, there holding the interpreter lock in C
        child.kill()
    assert len(pids) == 3
    assert gone(pids)


def test_vec_env_outlives_the_thread_that_made_it():
    made = []
    thread = threading.Thread(target=lambda: made.append(corral.make_vec(CountingEnv, 2, "process", workers=2)))
    thread.start()
    thread.join()
    time.sleep(0.2)
    with made[0] as vec:
        assert len(play(vec, 10)) == 2
        assert vec.restarts == 0


def test_a_fork_that_ends_leaves_the_workers_alone():
    with corral.make_vec(CountingEnv, 2, "process", workers=2) as vec:
        batch = vec.recv()
        if (pid := os.fork()) == 0:
            vec.close()
            os._exit(0)
        os.waitpid(pid, 0)
        vec.send(batch.env_ids, np.zeros(2, np.int64))
        assert not vec.recv().faulty.any()


def test_the_death_of_a_worker_that_forked_is_noticed(tmp_path):
    forks = tmp_path / "pids"

    class Forks(CountingEnv):
        def step(self, action):
            if (pid := os.fork()) == 0:
                time.sleep(30)
                os._exit(0)
            os.setpgid(pid, pid)  # out of the group that the parent kills
            with forks.open("a") as file:
                file.write(f"{pid} ")
            return super().step(action)

    with corral.make_vec(Forks, 1, "process") as vec:
        batch = vec.recv()
        vec.send(batch.env_ids, np.zeros(1, np.int64))
        batch = vec.recv()
        os.kill(vec.worker_pids[0], signal.SIGKILL)
        vec.send(batch.env_ids, np.zeros(1, np.int64))
        assert vec.recv().faulty.all()
        assert [fault.kind for fault in vec.faults] == ["killed"]
    for pid in forks.read_text().split():
        os.kill(int(pid), signal.SIGKILL)


def test_an_interrupted_recv_closes_instead_of_hanging_later():
    with corral.make_vec(partial(SlowEnv, 2.0, 2.0), 1, "process") as vec:
        batch = vec.recv()
        vec.send(batch.env_ids, np.zeros(1, np.int64))
        threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
        handler = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            with pytest.raises(KeyboardInterrupt):
                vec.recv()
        finally:
            signal.signal(signal.SIGINT, handler)
        with pytest.raises(corral.UserError, match="closed"):
            vec.recv()


def test_a_failed_start_leaves_no_process_behind():
    before = {p.pid for p in psutil.Process().children(recursive=True)}

    def broken():
        raise OSError("licence server not reachable")

    with pytest.raises(corral.EnvFailed, match="licence server not reachable"):
        corral.make_vec([CountingEnv, broken, CountingEnv], backend="process", workers=3)
    assert {p.pid for p in psutil.Process().children(recursive=True)} <= before


class Daemon(CountingEnv):
    """Starts a process in a session of its own, as a launcher of simulators does, which nobody ends."""

    def __init__(self):
        super().__init__()
        self._child = subprocess.Popen(["sleep", "1000"], start_new_session=True, stdin=subprocess.DEVNULL)

    def reset(self, *, seed=None, options=None):
        obs, info = super().reset(seed=seed, options=options)
        obs[1] = self._child.pid
        return obs, info


@pytest.mark.linux("processes found by their environment", hidden=True)
@pytest.mark.parametrize("portable", [False, True])
def test_processes_in_own_sessions_end_with_the_worker(portable, request):
    if portable:
        request.getfixturevalue("forced")
    with corral.make_vec(Daemon, 1, "process") as vec:
        first = int(vec.recv().obs[0, 1])
        os.kill(vec.worker_pids[0], signal.SIGKILL)
        vec.send(np.zeros(1, int), np.zeros(1, np.int64))
        second = int(vec.recv().obs[0, 1])
        assert gone([first])
        assert psutil.pid_exists(second)
    assert gone([second]), "a clean end"


@pytest.mark.linux("processes found by their environment", hidden=True)
@pytest.mark.parametrize("portable", ["0", "1"])
@pytest.mark.parametrize("algo", ["ppo", "impala"])
def test_processes_in_own_sessions_end_with_a_killed_run(algo, portable, tmp_path):
    """The trainer, or the process that has the environments, gets SIGKILL."""
    words = ["train", algo, "--env", f"{Path(__file__).stem}:Daemon", "--steps", "100000000"]
    words += ["--run-dir", str(tmp_path / "run")]
    words += ["--quiet", "--set", "num_envs=1", "eval_episodes=0"] + (["backend=process"] if algo == "ppo" else [])
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    env = os.environ | {"PYTHONPATH": path, "CORRAL_PORTABLE": portable}
    with subprocess.Popen([sys.executable, "-m", "corral", *words], env=env, stderr=subprocess.DEVNULL) as run:
        until, found = time.monotonic() + 60, []
        while time.monotonic() < until and not (tmp_path / "run" / "metrics.csv").exists():
            time.sleep(0.1)
        time.sleep(0.3)
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.cmdline() == ["sleep", "1000"] and process.environ().get("PYTHONPATH") == path:
                    found.append(process.pid)
        run.kill()
    assert found
    assert gone(found)
