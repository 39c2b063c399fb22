"""Every socket at which a command listens: its address, who may connect, and by what proof. docs/security.md has the
table that these tests are.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).parents[1]
TRAIN = "train {} --env CartPole-v1 --steps 1000000000 --quiet --set eval_episodes=0 {}"
SIM = f"{sys.executable} -m corral serve CartPole-v1 --connect {{url}}"


@dataclass(frozen=True)
class Row:
    """A line of the table; `command` must listen at `places` loopback addresses at least, 0: at none."""

    command: str
    places: int
    listens: str
    proof: str


LOCAL, GIVEN = "127.0.0.1; on Ray the node's address", "token; without one only 127.0.0.1 is allowed"
ROWS = [
    Row("`corral train`, `resume`, `eval`, `record` (topology `sync`, any backend)", 0, "-", "-"),
    Row("`actor_learner`, `central_inference` on processes", 0, "-", "-"),
    Row("`data_parallel`, all-reduce; `learners=N`", 1, LOCAL, "none (torch's store and gloo)"),
    Row("`data_parallel`, parameter servers", 1, LOCAL, "secret of the run"),
    Row("`data_parallel`, gossip", 1, LOCAL, "secret of the run"),
    Row("`--sim COMMAND`", 1, "as `--env` says", "a number that only its own simulators know, or the token"),
    Row("`--env tcp://...`, where simulators connect", 1, "as `--env` says", GIVEN),
    Row("`corral serve ENV --bind`, `corral state-server`", 1, "as `--bind` says", GIVEN),
]
COMMANDS = [
    (ROWS[0], TRAIN.format("ppo", "backend=process workers=2")),
    (ROWS[1], TRAIN.format("impala", "actors=2")),
    (ROWS[2], TRAIN.format("dppo", "actors=2")),
    (ROWS[2], TRAIN.format("impala", "actors=2 learners=2")),
    (ROWS[3], TRAIN.format("a3c", "actors=2")),
    (ROWS[4], TRAIN.format("gala", "actors=2")),
    (ROWS[5], "train ppo --env tcp://127.0.0.1:0 --num-envs 2 --steps 1000000000 --quiet --sim"),
    (ROWS[6], "train ppo --env tcp://127.0.0.1:0 --num-envs 2 --steps 1000000000 --quiet"),
    (ROWS[7], "serve CartPole-v1 --bind tcp://127.0.0.1:0"),
    (ROWS[7], "state-server --bind tcp://127.0.0.1:0"),
]
FAST = (0, 2, 3, 6)


def listening(pid):
    """Local addresses of the listening sockets of a process and its descendants."""
    found = set()
    with contextlib.suppress(psutil.NoSuchProcess):
        parent = psutil.Process(pid)
        for process in (parent, *parent.children(recursive=True)):
            with contextlib.suppress(psutil.Error):
                found |= {
                    (c.laddr.ip, c.laddr.port)
                    for c in process.net_connections("inet")
                    if c.status == psutil.CONN_LISTEN or (c.type == 2 and not c.raddr)
                }
    return found


@pytest.mark.linux("a list of other processes' sockets")
@pytest.mark.parametrize(
    ("row", "command"),
    [pytest.param(*each, marks=[] if k in FAST else [pytest.mark.slow]) for k, each in enumerate(COMMANDS)],
    ids=[command[:60] for _, command in COMMANDS],
)
def test_every_command_listens_only_where_the_table_says(row, command, tmp_path):
    words = command.split() + ([SIM] if command.endswith("--sim") else [])
    words += ["--run-dir", str(tmp_path / "run")] if words[0] == "train" else []
    log = open(tmp_path / "log", "w+")  # noqa: SIM115 - closed below
    process = subprocess.Popen([sys.executable, "-m", "corral", *words], stdout=log, stderr=log, cwd=tmp_path)
    seen, until, settled = set(), time.monotonic() + 90, None
    try:
        while process.poll() is None and time.monotonic() < until:
            seen |= listening(process.pid)
            begun = words[0] != "train" or row is ROWS[6] or (tmp_path / "run" / "metrics.csv").exists()
            if begun and len(seen) >= row.places:
                settled = settled or time.monotonic()
                if time.monotonic() - settled > 1:
                    break
            time.sleep(0.02)
        assert process.poll() is None, (tmp_path / "log").read_text()
        assert settled, f"not begun; listens at {seen}"
        assert all(host in ("127.0.0.1", "::1", "::ffff:127.0.0.1") for host, _ in seen), seen
        assert bool(seen) == bool(row.places), seen
    finally:
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(60)
        process.kill()
        process.wait()
        log.close()


def test_the_documentation_has_this_table():
    text = (ROOT / "docs" / "security.md").read_text()
    for row in ROWS:
        assert f"| {row.command} | {row.listens} | {row.proof} |" in text


@pytest.mark.slow
def test_a_run_with_sim_takes_no_other_simulator(tmp_path):
    """A process of this machine that connects to the address is refused, in words."""
    words = ["train", "ppo", "--env", "tcp://127.0.0.1:0", "--num-envs", "2", "--steps", "1000000000", "--sim", SIM]
    with open(tmp_path / "log", "w+") as log:
        learner = subprocess.Popen(
            [sys.executable, "-m", "corral", *words, "--run-dir", str(tmp_path / "run")], stdout=log, stderr=log
        )
        try:
            until = time.monotonic() + 60
            while not (places := listening(learner.pid)) and time.monotonic() < until:
                time.sleep(0.05)
            (place,) = places
            environ = {key: value for key, value in os.environ.items() if key != "CORRAL_INSTANCE"}
            other = subprocess.run(
                [sys.executable, "-m", "corral", "serve", "CartPole-v1", "--connect", f"tcp://127.0.0.1:{place[1]}"],
                env=environ, capture_output=True, text=True, timeout=60,
            )  # fmt: skip
            assert other.returncode == 2
            assert "was not started by this learner" in other.stderr
        finally:
            learner.terminate()
            learner.wait(60)
