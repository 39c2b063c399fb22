"""Code and commands of a run folder run only if this user's own command named them, or if they are trusted."""

import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import corral
from corral.config.trust import code_in, sign
from corral.core.errors import UserError
from corral.runs.folder import RunFolder

SMALL = {"steps": 64, "num_envs": 1, "num_steps": 32, "eval_episodes": 1, "quiet": True}
ENV = """
from pathlib import Path
from corral.testing import CountingEnv

Path(__file__).with_suffix(".ran").touch()

class Mine(CountingEnv):
    pass
"""


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A working directory with a user's environment, and a configuration folder of their own."""
    place = tmp_path / "project"
    place.mkdir()
    (place / "my_trusted_env.py").write_text(ENV)
    monkeypatch.chdir(place)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.delenv("CORRAL_TRUST", raising=False)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p not in ("", str(place))])
    yield place
    sys.modules.pop("my_trusted_env", None)


@pytest.fixture
def run(project):
    corral.train("ppo", env="my_trusted_env:Mine", run_dir="run", **SMALL)
    return project / "run"


def corral_command(*args, cwd, **env):
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p), **env}
    return subprocess.run(
        [sys.executable, "-P", "-m", "corral", *args], cwd=cwd, env=environ, capture_output=True, text=True, timeout=120
    )


def change(run, **settings):
    config = yaml.safe_load((run / "config.yaml").read_text())
    (run / "config.yaml").write_text(yaml.safe_dump({**config, **settings}))


def test_ones_own_run_needs_no_trust(run):
    assert corral.evaluate(run, episodes=1).mean > 0
    assert corral.resume(run, steps=128, quiet=True).steps == 128
    assert corral.resume(run, steps=160, quiet=True).steps >= 160


@pytest.mark.parametrize(
    "settings",
    [
        {"env": "os:system", "env_kwargs": {"command": "touch ran"}},
        {"env": "subprocess:call", "env_kwargs": {"args": ["touch", "ran"]}},
        {"env": "evil:Env"},
        {"env": "evil:Env-v0"},
        {"env": "corral.envs.suites:pixels", "env_kwargs": {"env": "evil:Env"}},
        {"env": "corral.envs.suites.games:PettingZoo", "env_kwargs": {"game": "evil:1x"}},
        {"env": "corral/TicTacToe-v0", "eval_env_kwargs": {"opponent": "evil:player"}},
        {"env": "tcp://127.0.0.1:0", "env_kwargs": {"sim": "touch ran"}},
        {"algo": "evil:Algorithm"},
        {"data_parallel": {"exchange": "evil:Exchange"}, "topology": "data_parallel"},
    ],
    ids=lambda settings: " ".join(map(str, settings.values()))[:40],
)
def test_somebody_elses_run_executes_nothing(settings, project):
    corral.train("ppo", env="CartPole-v1", run_dir="run", **SMALL)
    (project / "evil.py").write_text("open('ran', 'w')")
    change(project / "run", **settings)
    for open_run in (
        lambda: corral.evaluate("run", episodes=1),
        lambda: corral.resume("run", steps=128, quiet=True),
        lambda: corral.record("run", "video.mp4"),
    ):
        with pytest.raises(UserError, match=r"runs code that no command of yours .* --trust once"):
            open_run()
    assert not (project / "ran").exists()
    assert not (project / "video.mp4").exists()


def test_a_copied_proof_does_not_cover_other_arguments(run):
    change(run, env_kwargs={"length": 3})
    with pytest.raises(UserError, match="no command of yours"):
        corral.evaluate(run)


def test_the_same_name_from_another_folder_is_other_code(run, project, monkeypatch):
    other = project.parent / "other"
    other.mkdir()
    (other / "my_trusted_env.py").write_text("raise SystemExit('executed')")
    sys.modules.pop("my_trusted_env")
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p != str(project)])
    monkeypatch.chdir(other)
    with pytest.raises(UserError, match="my_trusted_env:Mine"):
        corral.evaluate(run)


def test_trust_is_remembered(run, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "of another user"))
    with pytest.raises(UserError, match="no command of yours"):
        corral.evaluate(run)
    corral.trust(run)
    assert corral.evaluate(run, episodes=1).mean > 0
    change(run, env_kwargs={"length": 3})
    with pytest.raises(UserError, match="no command of yours"):
        corral.evaluate(run)


def test_a_variable_trusts_the_runs_below_a_folder(run, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "of another user"))
    monkeypatch.setenv("CORRAL_TRUST", os.pathsep.join([str(tmp_path / "elsewhere"), str(tmp_path)]))
    assert corral.resume(run, steps=128, quiet=True).steps == 128
    monkeypatch.setenv("CORRAL_TRUST", str(tmp_path / "elsewhere"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "of a third"))
    with pytest.raises(UserError, match="no command of yours"):
        corral.evaluate(run)


def test_an_environment_given_now_replaces_an_untrusted_one(run, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "of another user"))
    assert corral.load_policy(run).step > 0, "the policy itself is data"
    assert corral.evaluate(run, env="corral.testing:CountingEnv", episodes=1).mean > 0


def test_the_key_is_private_and_a_run_without_one_trains(project, monkeypatch):
    config = {"env": "my_trusted_env:Mine"}
    proof = sign(config)
    key = Path(os.environ["XDG_CONFIG_HOME"]) / "corral" / "key"
    assert stat.S_IMODE(key.stat().st_mode) == 0o600
    assert sign(config) == proof
    assert sign({"env": "CartPole-v1"}) is None
    (project / "file").touch()
    monkeypatch.setenv("XDG_CONFIG_HOME", str(project / "file"))
    assert sign(config) is None
    corral.train("ppo", env="my_trusted_env:Mine", run_dir="run", **SMALL)
    assert json.loads((project / "run" / "run.json").read_text())["proof"] is None


def test_what_needs_no_trust():
    config = {
        "algo": "ppo", "env": "ALE/Pong-v5", "env_kwargs": {"size": 42}, "device": "cuda:0", "init": "C:/runs/x",
        "eval_env_kwargs": {"opponent": "mcts:1000"}, "data_parallel": {"mode": "ssp:3", "exchange": "gossip"},
    }  # fmt: skip
    assert code_in(config) == {}
    assert code_in({"env": "tcp://10.0.0.1:5555", "env_kwargs": {"token_file": "C:/token"}}) == {}
    assert code_in({"env": "corral.testing:CountingEnv"}) == {}
    assert code_in({"net": {"encoder": "my:Encoder"}, "callbacks": ["a.b:C"]}) == {
        "net.encoder": "my:Encoder", "callbacks.0": "a.b:C",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("env", "why"),
    [
        ("os:system", "a function of Python itself"),
        ("subprocess:run", "a function of Python itself"),
        ("builtins:exec", "a function of Python itself"),
        ("collections:OrderedDict", r"a class without reset\(\) and step\(\)"),
        ("corral.testing:check_env", "is a function that returns"),
    ],
)
def test_what_makes_no_environment_is_never_called(env, why):
    with pytest.raises(UserError, match=f"{why}.* name a class of environments, or a function that makes one"):
        corral.make_vec(env, 1, "local")


@pytest.mark.parametrize("command", ["top run --once", "plot run", "doctor", "list algos", "eval run"])
def test_files_of_the_working_directory_are_not_imported(command, project):
    corral.train("ppo", env="CartPole-v1", run_dir="run", **SMALL)
    for name in ("tyro", "rich", "yaml", "torch", "matplotlib", "psutil", "gymnasium"):
        (project / f"{name}.py").write_text("open('ran', 'w')\nraise SystemExit('executed')")
    environ = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    root = str(Path(corral.__file__).parents[1])
    script = f"import sys; sys.path[0] = {root!r}; from corral.cli.main import main; sys.exit(main())"
    done = subprocess.run(
        [sys.executable, "-c", script, *command.split()],
        cwd=project, env=environ, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert not (project / "ran").exists()


def test_python_m_corral_searches_the_working_directory_last(project):
    (project / "tyro.py").write_text("raise SystemExit('executed')")
    environ = {**os.environ, "PYTHONPATH": str(Path(corral.__file__).parents[1])}
    done = subprocess.run(
        [sys.executable, "-m", "corral", "check-env", "my_trusted_env:Mine"],
        cwd=project, env=environ, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


def test_trust_by_an_option(run, tmp_path):
    stranger = {"XDG_CONFIG_HOME": str(tmp_path / "of another user")}
    refused = corral_command("eval", "run", "--episodes", "1", cwd=run.parent, **stranger)
    assert refused.returncode == 2
    assert refused.stderr.count("\n") == 1
    assert "my_trusted_env:Mine" in refused.stderr
    for options in (["--trust"], []):
        done = corral_command("eval", "run", "--episodes", "1", *options, cwd=run.parent, **stranger)
        assert done.returncode == 0, done.stderr


def test_a_resumed_run_is_ones_own(run):
    corral.resume(run, steps=128, quiet=True)
    folder = RunFolder.open(run)
    assert folder.info["proof"] == sign(folder.config)
