from __future__ import annotations

import importlib.util
import io
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

import corral
from corral.cli.doctor import EXTRAS, Machine, advice, measure_speedup, measure_wake_up
from corral.cli.main import COMMANDS, main
from corral.cli.options import parse_env_kwargs
from corral.core.errors import UserError

ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-m", "corral.cli.main"]


def run_process(*args):
    return subprocess.run([*COMMAND, *args], capture_output=True, text=True, timeout=120, cwd=ROOT / "tests")


@pytest.fixture
def run(capfd, monkeypatch):
    """Run a command in this process, which saves the time to import; the result is that of `subprocess.run`."""

    def go(*args):
        try:
            code = main(list(args))
        except SystemExit as end:
            code = end.code or 0
        said = capfd.readouterr()
        return SimpleNamespace(returncode=code, stdout=said.out, stderr=said.err)

    monkeypatch.chdir(ROOT / "tests")
    return go


def assert_one_sentence(done, *words):
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1, done.stderr
    assert done.stderr.startswith("corral: ")
    for word in words:
        assert word in done.stderr


def test_help_lists_the_commands_without_loading_anything_heavy():
    code = "import sys; from corral.cli.main import main; main(['--help']); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    *text, modules = done.stdout.splitlines()
    for command in ("bench", "check-env", "doctor", "list envs"):
        assert any(line.strip().startswith(command) for line in text)
    assert not {"torch", "numpy", "gymnasium", "rich", "tyro"} & set(modules.split())


@pytest.mark.parametrize("words", COMMANDS)
def test_every_command_has_help_with_its_options(run, words):
    pytest.importorskip(COMMANDS[words][0].partition(":")[0])
    done = run(*words.split(), "--help")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"usage: corral {words}")
    for unreadable in ("INT", "FLOAT", "STR", "PATH", "{None}", "default: None", "default: )", "default: '')", ".0)"):
        assert unreadable not in done.stdout


def test_version():
    done = run_process("--version")
    assert (done.returncode, done.stdout) == (0, f"corral {corral.__version__}\n")


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["chek-env", "CartPole-v1"], ["No command 'chek-env'", "`corral check-env`"]),
        (["list"], ["`corral list` needs a subcommand: algos, envs, presets"]),
        (["list", "env"], ["No command 'list env'", "`corral list envs`"]),
        (["frobnicate"], ["`corral --help`"]),
        (["check-env"], ["ENV", "`corral check-env --help`"]),
        (["check-env", "CartPole-v1", "--step", "3"], ["has no option --step; did you mean --steps?"]),
        (["check-env", "CartPole-v1", "--steps", "many"], ["--steps", "'many'"]),
        (["check-env", "CartPole-v1", "Pong"], ["got an unexpected argument 'Pong'"]),
        (["check-env", "CartPol-v1"], ["No environment 'CartPol-v1'", "CartPole-v1"]),
        (["check-env", "no_such_module:Env"], ["no_such_module", "cannot be imported"]),
        (["check-env", "helpers.faulty_envs:Goood"], ["close: Good"]),
        (["check-env", "helpers.faulty_envs:Good", "--env-kwargs", "speed=3"], ["keyword argument 'speed'"]),
        (["check-env", "helpers.faulty_envs:Good", "--env-kwargs", "speed"], ["key=value", "'speed'"]),
        (["check-env", "helpers.faulty_envs:Good", "--steps", "0"], ["at least 1"]),
        (["check-env", "helpers.faulty_envs:Good", "--timeout-s", "0"], ["must be positive"]),
        (["list", "envs", "--filter", "cartpoll-v1"], ["No environment id contains", "CartPole-v1"]),
        (["list", "envs", "--filtr", "x"], ["did you mean --filter?"]),
        (["doctor", "--fast"], ["has no option --fast"]),
        (["join", "grpc://h:1"], ["No command 'join'", "corral serve ENV --connect URL"]),
        (["train", "ppo", "CartPole-v1"], ["got an unexpected argument 'CartPole-v1'; write --env CartPole-v1."]),
        (["train", "ppo", "--lr", "1e-3"], ["has no option --lr; write --set learning_rate=..."]),
        (["train", "ppo", "--learning-rate", "1"], ["has no option --learning-rate; write --set learning_rate=..."]),
        (["train", "ppo", "--total-timesteps", "9"], ["has no option --total-timesteps; did you mean --steps?"]),
        (["train", "ppo", "--device", "cpu"], ["has no option --device; write --set device=..."]),
        (["train", "ppo", "--batch-size", "9"], ["has no option --batch-size; a minibatch has", "set num_minibatches"]),
        (["train", "dqn", "--batch-size", "9"], ["has no option --batch-size; write --set batch_size=..."]),
        (["train", "ppo", "--num-workers", "2"], ["has no option --num-workers; set workers,", "actors"]),
        (["train", "ppo", "--log-dir", "x"], ["has no option --log-dir; did you mean --run-dir?"]),
        (["train", "ppo", "--callbacks", "x"], ["has no option --callbacks; did you mean --callback?"]),
        (["resume", "x", "--lr", "1"], ["`corral resume` has no option --lr; write --set learning_rate=..."]),
        (["eval", "x", "--episodes", "1.5k3"], ["--episodes", "an integer is needed, got '1.5k3'"]),
        (["eval", "x", "--seed", "1k"], ["There is no run at x"]),
        (["train", "sac", "--env", "Pendulum-v1"], ["sac is not in this version; for continuous actions there is ppo"]),
        (["train", "C51", "--env", "CartPole-v1"], ["C51 is not in this version; for discrete actions there is dqn"]),
        (["train", "ppo", "--n-envs", "8"], ["has no option --n-envs; did you mean --num-envs?"]),
    ],
)
def test_command_line_mistake_is_exit_code_2(run, args, words):
    assert_one_sentence(run(*args), *words)


@pytest.mark.parametrize("encoding", ["utf-8", "cp1252"])  # the latter in a pipe on Windows
@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["train"], "Missing from corral train: ALGO (Algorithm"),
        (["train", "--seed"], "Missing value for argument '--seed'. Expected 1 values; see `corral train --help`."),
        (["check-env", "X", "--steps", "many"], "Error parsing --steps: an integer is needed, got 'many'; see"),
    ],
)
def test_a_mistake_is_one_sentence_in_any_encoding(monkeypatch, capfd, encoding, args, words):
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding))
    assert main(args) == 2
    said = capfd.readouterr().err
    assert said.startswith(f"corral: {words}")
    assert "--- " not in said


def test_serve_of_a_broken_env_is_exit_code_1():
    done = run_process("serve", "helpers.faulty_envs:NoStart", "--bind", "tcp://127.0.0.1:0")
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    (said,) = [line for line in done.stderr.splitlines() if "listening" not in line]
    assert "no licence" in said
    assert "corral check-env helpers.faulty_envs:NoStart" in said


def test_check_env_of_a_good_environment():
    done = run_process("check-env", "CartPole-v1", "--steps", "50")
    assert done.returncode == 0
    assert done.stderr == ""
    lines = done.stdout.splitlines()
    assert lines[-1] == "CartPole-v1 passes all 17 checks."
    assert all(line.startswith("pass  ") for line in lines[:-2])
    assert not any(line.endswith(" ") for line in lines)


def test_check_env_of_the_users_own_file_with_arguments(run):
    done = run(
        "check-env",
        "helpers.faulty_envs:Good",
        "--env-kwargs",
        "length=4",
        "--env-kwargs",
        "start=x",
        "--steps",
        "20",
    )
    assert done.returncode == 0, done.stderr
    assert "after 4 steps" in done.stdout


def test_check_env_of_a_bad_environment_is_exit_code_1(run):
    done = run("check-env", "helpers.faulty_envs:NotFinite", "--steps", "50")
    assert done.returncode == 1
    assert "fail  observations    at step 4" in done.stdout
    assert done.stderr == ""
    assert "fails 3 of 17 checks." in done.stdout


def test_check_env_stops_where_going_on_makes_no_sense(run):
    done = run("check-env", "helpers.faulty_envs:OldStep")
    assert done.returncode == 1
    assert (
        done.stdout.splitlines()[-1] == "helpers.faulty_envs:OldStep fails; the remaining checks need this one to pass."
    )


def test_check_env_shows_where_an_env_hangs():
    done = run_process("check-env", "helpers.faulty_envs:Hanging", "--timeout-s", "1")
    assert done.returncode == 1
    assert done.stderr.startswith("corral: the environment has not answered for 1 s; it hangs here:")
    assert "faulty_envs.py" in done.stderr


def test_ctrl_c_is_exit_code_130_without_a_traceback():
    process = subprocess.Popen(
        [*COMMAND, "check-env", "helpers.faulty_envs:Hanging"], cwd=ROOT / "tests", text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )  # fmt: skip
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if "reset" in line:
                break
        time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130
    assert errors == "corral: interrupted\n"


def test_list_envs_in_a_pipe_is_one_id_per_line(run):
    done = run("list", "envs")
    assert done.returncode == 0
    ids = done.stdout.splitlines()
    assert "CartPole-v1" in ids
    assert len(ids) == len(set(ids)) > 20
    assert not any(" " in i for i in ids)
    assert not any(i.startswith("GymV") for i in ids), "ids that only raise are no environments"


def test_list_envs_filters_by_text(run):
    in_jax = ["phys2d/CartPole-v0", "phys2d/CartPole-v1"] if importlib.util.find_spec("jax") else []
    found = run("list", "envs", "--filter", "cartpole").stdout.splitlines()
    assert found == ["CartPole-v0", "CartPole-v1", *in_jax]


@pytest.mark.skipif(importlib.util.find_spec("Box2D") is not None, reason="Box2D is installed")
def test_list_envs_offers_nothing_that_is_not_installed(run):
    assert "LunarLander" not in run("list", "envs").stdout
    done = run("list", "envs", "--filter", "lunarlander")
    assert done.returncode == 2
    assert done.stderr.endswith("needs the package Box2D, which is missing; pip install 'corral-rl[box2d]'.\n")


def test_list_envs_on_a_terminal_groups_by_package():
    text = in_a_terminal("list", "envs")
    assert "Classic control (6)" in text
    for group in ("Box2D", "MuJoCo"):
        assert group in text
    assert "module:Class" in text


def test_list_envs_into_a_closed_pipe_is_quiet():
    process = subprocess.Popen([*COMMAND, "list", "envs"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    process.stdout.close()
    assert process.wait(60) == 0
    assert process.stderr is not None
    assert process.stderr.read() == ""
    process.stderr.close()


def test_doctor_reports_and_exits_0():
    done = run_process("doctor")
    assert done.returncode == 0, done.stderr
    for word in (
        "cores",
        "memory",
        "torch",
        "gymnasium",
        "process wake-up",
        "two processes",
        "What will be slow",
    ):
        assert word in done.stdout
    for extra in EXTRAS:
        assert f"\n  {extra}" in done.stdout


def test_doctor_knows_every_extra_that_users_install():
    tomllib = pytest.importorskip("tomllib")
    data = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert set(EXTRAS) == set(data["project"]["optional-dependencies"]) - {"dev", "test", "all"}


def test_doctor_advises_about_a_bad_machine_only():
    good = Machine(8, 8, None, 0.1, 64 << 30, 60 << 30, 32 << 30, True, 6e-6, 1.97)
    assert advice(good, 1) == []
    bad = Machine(2, 16, 1.5, 3.0, 4 << 30, 1 << 30, 64 << 20, True, 90e-6, 1.2)
    text = " ".join(advice(bad, 8))
    for words in ("2 of 16 cores", "1.5 cores' worth", "workers=1", "3.0 cores busy",
                  "1.2 times", "takes 90 us", "at least 180 us", "set_num_threads(1)",
                  "more threads than the 2", "1.0 GB", "/dev/shm holds 0.06 GB"):  # fmt: skip
        assert words in text
    alone = Machine(1, 1, None, 0.0, None, None, None, False, 0.0, 1.0)
    assert [sentence.partition(":")[0] for sentence in advice(alone, 1)] == [
        "One core",
        "This system has no memfd",
    ]


def test_measurements_are_plausible_and_leave_the_affinity_alone():
    before = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None
    assert 0 < measure_wake_up() < 1
    assert 0 < measure_speedup() < 10
    if before is not None:
        assert os.sched_getaffinity(0) == before


def test_env_kwargs_are_python_literals_or_text():
    given = [["a=1", "b=0.5", "c=true", "d=None", "e=rgb_array"], ["f=[1, 2]", "g='1'", "h=a=b", "i="]]
    assert parse_env_kwargs(given) == {
        "a": 1, "b": 0.5, "c": True, "d": None, "e": "rgb_array", "f": [1, 2], "g": "1", "h": "a=b", "i": "",
    }  # fmt: skip
    for bad in (["a"], ["=1"], ["a b=1"], ["a=1", "a=2"], ["a.=1"], ["a=1", "a.b=2"], ["a.b=1", "a=2"], ["a={'x': ]"]):
        with pytest.raises(UserError):
            parse_env_kwargs([bad])


def test_nested_env_kwargs_are_json_or_dotted():
    given = [['a={"b": [1, 2], "c": true, "d": null}', "e.f=1", "e.g.h=x", "i=[1, 2]", "j='[not a list'"]]
    assert parse_env_kwargs(given) == {
        "a": {"b": [1, 2], "c": True, "d": None}, "e": {"f": 1, "g": {"h": "x"}}, "i": [1, 2], "j": "[not a list",
    }  # fmt: skip
    with pytest.raises(UserError, match="neither JSON nor a Python literal: write"):
        parse_env_kwargs([['a={"b": tru}']])


def in_a_terminal(*args):
    """What the command prints on a terminal of 100 columns."""
    pty = pytest.importorskip("pty")
    ours, theirs = pty.openpty()
    with os.fdopen(ours, "rb") as screen:
        process = subprocess.Popen(
            [*COMMAND, *args], stdout=theirs, stderr=subprocess.PIPE, env={**os.environ, "COLUMNS": "100"}
        )
        os.close(theirs)
        seen = b""
        try:
            while chunk := os.read(screen.fileno(), 65536):
                seen += chunk
        except OSError:  # Linux says so when the other side has closed the terminal
            pass
        _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (0, b"")
    return seen.decode()
