"""Environments that cannot be used, in `corral train` and the commands around it: one sentence, no folder left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import gymnasium
import psutil
import pytest

import corral
from corral.cli.main import main
from corral.core.errors import UserError
from corral.envs.resolve import resolve
from corral.runs.checkpoints import checkpoint
from corral.runs.folder import RunFolder

TESTS = Path(__file__).parents[1]
FAILING = {
    "NoLicence": r"cannot be built: OSError: no licence found (",
    "NoPackage": "No module named 'a_package_that_is_missing' (",
    "NoBox2D": "the package Box2D is missing; pip install 'corral-rl[box2d]'.",
    "BadReset": "cannot be reset: JSONDecodeError: Expecting property name",
    "NoNumber": "has a space without any number",
    "ManyActions": "has 1,000,000 values in its action space Discrete(1000000)",
    "Exits": "cannot be built: SystemExit: 0 (",
}


@pytest.mark.parametrize("backend", ["auto", "local", "process"])
@pytest.mark.parametrize("name", FAILING)
def test_an_env_that_cannot_start_is_one_sentence(name, backend, capfd, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["train", "ppo", "--env", f"helpers.failing_envs:{name}", "--quiet", "--set", f"backend={backend}"]
    assert main(words) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert FAILING[name] in line
    if FAILING[name].endswith("("):
        assert "failing_envs.py:" in line
    if name == "BadReset":  # raised in json, called by the environment
        assert "decoder.py:" in line
        assert "; called at " in line
    assert not (tmp_path / "runs").exists() or not list((tmp_path / "runs").iterdir())


@pytest.mark.parametrize(
    ("env", "words"),
    [
        ("MiniGrid-Empty-8x8-v0", "(pip install minigrid): install that, and use minigrid:MiniGrid-Empty-8x8-v0"),
        ("FetchReach-v4", "use gymnasium_robotics:FetchReach-v4"),
        (
            "highway-v0",
            "it may be in highway_env (pip install highway-env): install that, and use highway_env:highway-v0",
        ),
        (
            "dm_control/cartpole-balance-v0",
            "(pip install 'shimmy[dm-control]'): install that, and use shimmy:dm_control/",
        ),
        ("MinAtar/Breakout-v1", "use minatar.gym:MinAtar/Breakout-v1"),
        (
            "minigrid:MiniGrid-Empty-8x8-v0",
            "needs the module 'minigrid', which cannot be imported; pip install minigrid",
        ),
        (
            "connect_four_v3",
            "--env corral.envs.suites.games:PettingZoo --env-kwargs game=connect_four_v3, for alphazero",
        ),
        (
            "pettingzoo.classic:connect_four_v3",
            "is a module; PettingZoo's two-player games are --env corral.envs.suites",
        ),
        ("Nonsense-v0", "an id that a package registers as module:ID"),
        ("Hopper-v2", "have been moved to the gymnasium-robotics project"),
    ],
)
def test_an_unknown_id_is_told_where_it_may_be(env, words, capfd, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["train", "ppo", "--env", env]) == 2
    assert words in capfd.readouterr().err


@pytest.mark.parametrize("command", ["check-env", "bench"])
def test_suites_are_environments_of_every_command(command, capfd):
    pytest.importorskip("pygame")
    few = ["--steps", "30"] if command == "check-env" else ["--seconds", "0.2", "--num-envs", "1", "--workers", "1"]
    assert main([command, "corral.envs.suites:pixels", "--env-kwargs", "env=CartPole-v1", "size=32", *few]) == 0
    assert main([command, "corral.envs.suites:pixels", "--env-kwargs", "environment=CartPole-v1"]) == 2
    assert "unexpected keyword argument 'environment'" in capfd.readouterr().err


@pytest.mark.parametrize(
    "mistake", [["helpers.failing_envs:NoReward", "num_steps=8"], ["CartPole-v1", "num_steps=1e12"]]
)
def test_a_mistake_in_the_first_steps_leaves_no_folder(mistake, tmp_path, capfd):
    env, setting = mistake
    words = ["--steps", "64", "--run-dir", str(tmp_path / "run"), "--set", "backend=local", setting]
    assert main(["train", "ppo", "--env", env, *words]) == 2
    assert not (tmp_path / "run").exists()


def test_more_processes_than_fit_into_memory_are_refused(tmp_path, capfd):
    folder = ["--run-dir", str(tmp_path / "run")]
    for words in (["impala", "--actors", "99999"], ["ppo", "--set", "backend=process", "workers=99999"]):
        assert main(["train", *words, "--env", "CartPole-v1", "--num-envs", "99999", "--quiet", *folder]) == 2
        assert "GB are free: ask for at most" in capfd.readouterr().err
    assert not (tmp_path / "run").exists()


def stopped(tmp_path, number, started, *settings):
    """Exit code of a run that gets a signal once `started(folder)`; whether its folder is left; and its processes."""
    env = os.environ | {"PYTHONPATH": f"{TESTS.parent}{os.pathsep}{TESTS}"}
    folder = tmp_path / "run"
    words = ["train", "ppo", "--env", "helpers.failing_envs:LongReset", "--run-dir", str(folder), "--quiet"]
    words += ["--steps", "1000000", "--set", "num_envs=2", "num_steps=8", "eval_episodes=0", "log_every=1", *settings]
    run = subprocess.Popen([sys.executable, "-m", "corral", *words], env=env, cwd=tmp_path, stderr=subprocess.PIPE)
    children = []
    try:
        until = time.monotonic() + 60
        while not started(folder) and time.monotonic() < until:
            time.sleep(0.1)
        time.sleep(0.5)
        children = psutil.Process(run.pid).children(recursive=True)
        run.send_signal(number)
        code = run.wait(40)  # a reset takes a minute
        _, alive = psutil.wait_procs(children, 10)
        assert not alive
        return code, folder.exists()
    finally:
        run.stderr.close()
        for process in [*children, run]:
            if psutil.pid_exists(process.pid):
                process.kill()
        run.wait(10)


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
@pytest.mark.parametrize("backend", ["local", "process"])
def test_a_signal_ends_the_wait_for_a_first_reset(number, backend, tmp_path):
    code, left = stopped(tmp_path, number, lambda folder: (folder / "config.yaml").exists(), f"backend={backend}")
    assert code in (130, 128 + number)
    assert not left


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["local", "process"])
def test_a_signal_ends_the_wait_for_a_later_reset(backend, tmp_path):
    kwargs = ["backend=" + backend, 'env_kwargs={"good": 2}']

    def trained(folder):
        rows = folder / "metrics.csv"
        return rows.exists() and len(rows.read_text().splitlines()) > 1

    code, _ = stopped(tmp_path, signal.SIGTERM, trained, *kwargs)
    assert code == 0
    state, meta = checkpoint.load(RunFolder.open(tmp_path / "run"))
    assert meta["step"] > 0, "saved although no environment answers"
    assert state["trainer"]["sampler"] is None


def test_a_package_that_is_installed_is_only_to_be_named(monkeypatch):
    monkeypatch.setattr("corral.envs.resolve.importlib.util.find_spec", lambda name: object())
    with pytest.raises(UserError, match="'highway-v0'; name the package that registers it: highway_env:highway-v0"):
        resolve("highway-v0")


def test_ids_that_register_envs_registers_are_found(monkeypatch):
    def register():
        gymnasium.register("Late/Cart-v0", "gymnasium.envs.classic_control:CartPoleEnv")

    monkeypatch.setitem(sys.modules, "late_ids", SimpleNamespace(register_envs=register))
    try:
        env = resolve("late_ids:Late/Cart-v0").factory()
        assert env.spec.id == "Late/Cart-v0"
    finally:
        gymnasium.registry.pop("Late/Cart-v0", None)


def test_an_assert_without_message_shows_its_condition(tmp_path, monkeypatch):
    (tmp_path / "strict_env.py").write_text("def make(joints=0):\n    assert joints > 2\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UserError, match=r"AssertionError: assert joints > 2 \(.*strict_env.py:2, in make"):
        corral.make_vec("strict_env:make", 1, "local")
