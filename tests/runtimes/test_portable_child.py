"""Child processes with nothing that Windows lacks: who may connect, what they report, and that nothing is left."""

import os
import signal
import socket
import subprocess
import sys
import time

import psutil
import pytest
from helpers.orphans import busy_program, gone
from helpers.portable import forced, portable_env  # noqa: F401

from corral.core.errors import RunFailed
from corral.core.portable import READABLE, WRITABLE, SelectPoll
from corral.runtimes.base import RoleLost, make_runtime
from corral.runtimes.child import describe_exit
from corral.runtimes.portable_child import PortableChild, _check
from corral.runtimes.shared_memory import NamedMemory, shared_memory


class Slow:
    """A role that can be asked to wait."""

    def __init__(self, mailbox):
        self.stopped = []
        signal.signal(signal.SIGTERM, lambda number, frame: self.stopped.append(number))

    def sleep(self, seconds):
        until = time.monotonic() + seconds
        while time.monotonic() < until and not self.stopped:
            time.sleep(0.01)
        return [int(number) for number in self.stopped]


@pytest.fixture
def start(tmp_path):
    """Starts a script with two workers, each with a process of its own; returns it and all their pids."""
    started = []

    def run(how):
        path = tmp_path / "script.py"
        path.write_text(busy_program(how, workers=2))
        memory = tmp_path / "memory"
        memory.mkdir(exist_ok=True)
        child = subprocess.Popen([sys.executable, path], env=portable_env(memory), stdout=subprocess.PIPE, text=True)
        started.append(child)
        pids = [int(word) for word in child.stdout.readline().split()]
        time.sleep(0.3)  # let the environments get into their step
        return child, pids, memory

    yield run
    for child in started:
        child.kill()
        child.wait()
        child.stdout.close()


@pytest.mark.parametrize("how", ["time.sleep(1000)", "ctypes.PyDLL(None).sleep(1000)"])
def test_kill_of_the_parent_leaves_no_process_or_memory(start, how):
    child, pids, memory = start(how)
    assert len(pids) == 5
    assert list(memory.iterdir())
    child.kill()
    child.wait()
    assert gone(pids)
    assert not list(memory.iterdir())


def test_memory_of_a_killed_reaper_goes_at_the_next_start(start, monkeypatch, forced):  # noqa: F811
    child, pids, memory = start("time.sleep(1000)")
    os.kill(pids[-1], signal.SIGKILL)
    child.kill()
    child.wait()
    assert gone(pids[:-1:2])  # the workers end by themselves
    assert gone(pids[1::2])  # and what they started
    assert list(memory.iterdir())
    monkeypatch.setattr("tempfile.tempdir", str(memory))
    mine = shared_memory("mine", b"content")
    assert [path.name for path in memory.iterdir()] == [mine.token[0]]
    assert NamedMemory(*mine.token).read() == b"content"
    mine.close()
    mine.close()
    assert not list(memory.iterdir())


def test_memory_is_for_its_owner_alone(monkeypatch, tmp_path, forced):  # noqa: F811
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    memory = shared_memory("mine", b"content")
    assert os.stat(memory.path).st_mode & 0o777 == 0o600
    memory.close()


@pytest.mark.parametrize(
    ("sent", "purpose"),
    [(b"s" * 32 + b"m", b"m"), (b"x" * 32 + b"m", None), (b"", None), (b"s" * 31, None), (b"s" * 32, b"")],
)
def test_a_connection_without_the_secret_is_refused(sent, purpose):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        with socket.create_connection(listener.getsockname()) as stranger:
            stranger.sendall(sent)
        ours, _ = listener.accept()
        with ours:
            assert _check(ours, b"s" * 32) == purpose


def test_a_running_child_leaves_no_open_port(forced):  # noqa: F811
    before = {c.laddr for c in psutil.net_connections("tcp")}  # of other tests in this process
    runtime = make_runtime("process")
    try:
        role = runtime.spawn("slow", Slow)
        assert isinstance(role._process, PortableChild)
        call = role.call("sleep", 0)
        assert runtime.wait([call], 60)
        pids = {os.getpid(), role.pid}
        ports = [c for c in psutil.net_connections("tcp") if c.pid in pids and c.status == psutil.CONN_LISTEN]
        assert not {c.laddr for c in ports} - before
    finally:
        runtime.close()


def test_a_role_is_terminated_without_a_signal(forced):  # noqa: F811
    runtime = make_runtime("process")
    try:
        role = runtime.spawn("slow", Slow)
        assert runtime.wait([role.call("sleep", 0)], 60)
        call = role.call("sleep", 60)
        role.terminate()
        assert runtime.wait([call], 30)
        assert call.result() == [signal.SIGTERM]
    finally:
        runtime.close()


class Sleeper:
    """A role in which being told to stop raises."""

    def __init__(self, mailbox):
        signal.signal(signal.SIGTERM, self._stop)

    def _stop(self, number, frame):
        raise RuntimeError("told to stop")

    def sleep(self, seconds):
        time.sleep(seconds)


@pytest.mark.linux("signals to a thread, which wake it", hidden=True)
def test_a_role_is_terminated_while_it_sleeps(forced):  # noqa: F811
    runtime = make_runtime("process")
    try:
        role = runtime.spawn("sleeper", Sleeper)
        assert runtime.wait([role.call("sleep", 0)], 60)
        call = role.call("sleep", 600)
        time.sleep(0.3)  # until it does
        role.terminate()
        assert runtime.wait([call], 30)
        with pytest.raises(RunFailed, match="told to stop"):
            call.result()
    finally:
        runtime.close()


def test_a_child_that_cannot_start_is_lost(monkeypatch, forced):  # noqa: F811
    monkeypatch.setattr("corral.runtimes.portable_child._BOOT", "raise SystemExit(7)")
    runtime = make_runtime("process")
    try:
        role = runtime.spawn("broken", Slow)
        call = role.call("sleep", 0)
        assert runtime.wait([call], 30)
        with pytest.raises(RoleLost, match="exit code 7"):
            call.result()
    finally:
        runtime.close()


def test_exits_are_described_on_every_system():
    assert describe_exit(3) == "exit code 3"
    assert describe_exit(-signal.SIGKILL) == "signal SIGKILL"
    assert describe_exit(0xC0000005) == "exit code 0xC0000005"
    assert describe_exit(None) == "exit code None"


def test_select_finds_what_poll_finds():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        poll = SelectPoll(1e-3)
        assert poll.poll(1) == []
        poll.register(ours, READABLE)
        assert poll.poll(0) == []
        theirs.send(b"x")
        assert poll.poll(None) == [(ours.fileno(), READABLE)]
        poll.modify(ours, READABLE | WRITABLE)
        assert poll.poll(-1) == [(ours.fileno(), READABLE | WRITABLE)]
        poll.unregister(ours.fileno())
        assert poll.poll(0) == []
