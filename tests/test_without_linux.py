"""Everything that must work where Linux's and POSIX's own modules, functions and files are missing."""

import os
import subprocess
import sys

from helpers.portable import portable_env

TRAIN = """
import importlib, pkgutil, sys
import corral

for module in pkgutil.walk_packages(corral.__path__, "corral."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)

from corral.runtimes import child
for hidden in ("memfd_create", "killpg", "fork", "sched_getaffinity", "pread"):
    assert not hasattr(child.os, hidden), hidden
assert not hasattr(child.socket, "AF_UNIX")

small = dict(quiet=True, eval_episodes=1)
folder = sys.argv[1]
corral.train("ppo", "CartPole-v1", 400, 0, folder + "/ppo", backend="process", num_envs=2, num_steps=64, **small)
corral.train("dqn", "CartPole-v1", 400, 0, folder + "/dqn", learning_starts=100, **small)
corral.train("impala", "CartPole-v1", 400, 0, folder + "/impala", runtime="process", actors=1, **small)
corral.resume(folder + "/ppo", steps=600, quiet=True)
print("done")
"""

LOCK = """
import sys
from corral.runs.folder import RunFolder
from corral.snapshot.store.files import FileStates
folder = RunFolder.open(sys.argv[1] + "/run") if len(sys.argv) > 2 else RunFolder.create(sys.argv[1] + "/run", {})
print(folder.holder())
with folder.lock():
    store = FileStates(sys.argv[1] + "/states")
    print("locked", flush=True)
    sys.stdin.read()
"""


def run(code, tmp_path, *words, **options):
    memory = tmp_path / "memory"
    memory.mkdir(exist_ok=True)
    command = [sys.executable, "-c", code, str(tmp_path), *words]
    return subprocess.run(command, env=portable_env(memory, hidden=True), capture_output=True, text=True, **options)


def test_ppo_dqn_and_impala_train_and_leave_nothing(tmp_path):
    done = run(TRAIN, tmp_path, timeout=280)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "done"
    assert not os.listdir(tmp_path / "memory")  # processes: see helpers/leftovers.py
    for algo in ("ppo", "dqn", "impala"):
        latest = tmp_path / algo / "checkpoints" / "latest"
        assert not latest.is_symlink()
        assert (latest.parent / latest.read_text()).is_dir()


def test_locks_exclude_other_processes_and_end_with_theirs(tmp_path):
    command = [sys.executable, "-c", LOCK, str(tmp_path)]
    env = portable_env(tmp_path, hidden=True)
    with subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout.readline() == "None\n"
        assert first.stdout.readline() == "locked\n"
        other = run(LOCK, tmp_path, "again", input="")
        assert other.stdout == f"{first.pid}\n"
        assert f"Process {first.pid} is training" in other.stderr
        first.kill()
    again = run(LOCK, tmp_path, "again", input="")
    assert again.stdout == "None\nlocked\n", again.stderr
