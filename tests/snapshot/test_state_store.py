"""Every keeper of states passes one suite; those that outlive a process do so whole."""

import os
import signal
import subprocess
import sys
import threading

import pytest

from corral.core.errors import EnvFailed, UserError
from corral.link.address import parse_url
from corral.link.transports.open import open_binding
from corral.snapshot.states import StatesFull
from corral.snapshot.store.base import MemoryStates, StateBudget
from corral.snapshot.store.client import RemoteStates
from corral.snapshot.store.files import FileStates
from corral.snapshot.store.open import open_states
from corral.snapshot.store.server import StateServer

BUDGET = StateBudget(bytes=1000, count=5)


class Served:
    """A state server on a thread of this process."""

    def __init__(self, keeper, token=None):
        self.server = StateServer(open_binding("tcp", listen=parse_url("tcp://127.0.0.1:0")), keeper, token)
        self.url, self._stop = self.server.urls[0], False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self):
        while not self._stop:
            self.server.poll(0.02)
        self.server.close()

    def end(self):
        self._stop = True
        self._thread.join(5)


@pytest.fixture(params=["memory", "files", "server over memory", "server over files"])
def keeper(request, tmp_path):
    inner = MemoryStates(BUDGET) if "memory" in request.param else FileStates(tmp_path / "states", BUDGET)
    if "server" not in request.param:
        yield inner
        return
    served = Served(inner)
    with RemoteStates(served.url, timeout_s=10) as remote:
        yield remote
    served.end()


def test_put_get_drop(keeper):
    assert keeper.get("a") is None
    keeper.put("a", b"\x00state\xff")
    keeper.put("b/1", b"")
    assert keeper.get("a") == b"\x00state\xff"
    assert keeper.get("b/1") == b""
    assert keeper.names() == ["a", "b/1"]
    assert keeper.names("b/") == ["b/1"]
    keeper.put("a", b"other")
    assert keeper.get("a") == b"other"
    assert keeper.nbytes == 5
    assert keeper.drop("a") is True
    assert keeper.drop("a") is False
    assert keeper.get("a") is None
    assert keeper.nbytes == 0


def test_a_budget_is_never_exceeded_and_nothing_is_evicted(keeper):
    keeper.put("big", bytes(900))
    with pytest.raises(StatesFull, match="limit of 1000"):
        keeper.put("more", bytes(101))
    keeper.put("more", bytes(100))
    with pytest.raises(StatesFull):
        keeper.put("more", bytes(101))
    assert len(keeper.get("more")) == 100
    keeper.put("big", bytes(10))
    for k in range(3):
        keeper.put(f"n{k}", b"x")
    with pytest.raises(StatesFull, match="limit is 5"):
        keeper.put("one too many", b"x")
    keeper.put("n0", b"y")
    assert keeper.nbytes == 113


@pytest.mark.parametrize("name", ["", "a\nb", "x" * 600, None, 3])
def test_invalid_name_is_refused(keeper, name):
    with pytest.raises(UserError, match="name of a state"):
        keeper.put(name, b"")


def test_names_of_any_alphabet_and_look(keeper):
    for name in ("../../etc/passwd", "épée", "a b", "nul", "状態"):
        keeper.put(name, name.encode())
    assert keeper.names() == sorted(["../../etc/passwd", "épée", "a b", "nul", "状態"])
    assert keeper.get("状態") == "状態".encode()


def test_files_persist_and_damaged_ones_are_skipped(tmp_path):
    first = FileStates(tmp_path, BUDGET)
    for name in ("a", "b", "c"):
        first.put(name, name.encode() * 10)
    paths = sorted(tmp_path.glob("*.state"))
    paths[0].write_bytes(paths[0].read_bytes()[:-1])
    (tmp_path / "x.state").write_bytes(b"nonsense")
    (tmp_path / "half.123.part").write_bytes(b"CST1")
    first.close()
    again = FileStates(tmp_path, BUDGET)
    assert len(again.names()) == 2
    assert all(again.get(name) == name.encode() * 10 for name in again.names())
    assert not list(tmp_path.glob("*.part"))


class Unsummed(dict):
    """The sizes of states, which no put may add up."""

    def values(self):
        raise AssertionError("all sizes were read")

    items = __iter__ = values


def test_put_does_not_read_the_sizes_of_all_states(tmp_path):
    with FileStates(tmp_path, BUDGET) as store:
        store.put("a", bytes(100))
        store._sizes = Unsummed(store._sizes)
        store.put("b", bytes(30))
        store.put("a", bytes(10))
        assert store.nbytes == 40
        assert store.drop("b")
        with pytest.raises(StatesFull):
            store.put("c", bytes(991))
        store.put("c", bytes(990))
        assert store.nbytes == 1000
    with FileStates(tmp_path, BUDGET) as again:
        assert again.nbytes == 1000


def test_failed_write_does_not_change_the_total(tmp_path, monkeypatch):
    with FileStates(tmp_path, BUDGET) as store:
        store.put("a", bytes(10))
        with monkeypatch.context() as broken:
            broken.setattr(os, "fsync", lambda fd: (_ for _ in ()).throw(OSError(28, "No space left on device")))
            with pytest.raises(UserError, match="No space left"):
                store.put("a", bytes(20))
        assert (store.nbytes, len(store.get("a"))) == (10, 10)


@pytest.mark.linux("descriptors of folders, which can be synced", hidden=True)
def test_put_syncs_the_folder_after_the_rename(tmp_path, monkeypatch):
    synced, sync = [], os.fsync
    with FileStates(tmp_path, BUDGET) as store:
        monkeypatch.setattr(
            os,
            "fsync",
            lambda fd: (synced.append((os.readlink(f"/proc/self/fd/{fd}"), *os.listdir(tmp_path))), sync(fd)),
        )
        store.put("a", b"1")
    (part, *_), (folder, *names) = synced
    assert part.endswith(".part")
    assert folder == str(tmp_path)
    assert [name.rpartition(".")[2] for name in names] == ["state"]


def test_a_folder_of_states_is_for_one_at_a_time(tmp_path):
    with FileStates(tmp_path, BUDGET) as first:
        first.put("a", b"1")
        with pytest.raises(UserError, match="is in use; share it by `corral state-server"):
            FileStates(tmp_path, BUDGET)
    with FileStates(tmp_path, BUDGET) as second:
        assert second.get("a") == b"1"


def test_many_names_come_page_by_page():
    served = Served(MemoryStates())
    with RemoteStates(served.url) as states:
        for k in range(2500):
            states.put(f"s{k:05}", b"")
        assert states.names() == [f"s{k:05}" for k in range(2500)]
    served.end()


def test_large_states_travel_whole():
    served = Served(MemoryStates())
    blob = os.urandom(1 << 20) * 40
    with RemoteStates(served.url) as states:
        states.put("large", blob)
        assert states.get("large") == blob
    served.end()


def test_the_token_is_asked_for_on_both_sides(tmp_path):
    (tmp_path / "t").write_text("0123456789abcdef0123456789abcdef")
    (tmp_path / "u").write_text("x123456789abcdef0123456789abcdef")
    served = Served(MemoryStates(), (tmp_path / "t").read_bytes())
    with RemoteStates(served.url, str(tmp_path / "t")) as states:
        states.put("a", b"1")
    for path in ("u", None):
        with RemoteStates(served.url, path and str(tmp_path / path), timeout_s=3) as states, pytest.raises(UserError):
            states.get("a")
    served.end()


def test_missing_server_times_out():
    with RemoteStates("tcp://127.0.0.1:9", timeout_s=0.5) as states, pytest.raises(EnvFailed, match="is it running"):
        states.get("a")


def test_state_store_is_chosen_by_address(tmp_path):
    assert isinstance(open_states(), MemoryStates)
    assert isinstance(open_states(str(tmp_path)), FileStates)
    with open_states("tcp://127.0.0.1:9") as remote:
        assert isinstance(remote, RemoteStates)


def test_the_command_keeps_states_through_kill_9(tmp_path):
    def start():
        command = ["-m", "corral.cli.main", "state-server", "--bind", "tcp://127.0.0.1:0", "--dir", str(tmp_path / "s")]
        process = subprocess.Popen([sys.executable, *command], stdout=subprocess.PIPE, text=True)
        return process, process.stdout.readline().split()[3].rstrip(";")

    process, url = start()
    with RemoteStates(url) as states:
        states.put("walk/7", b"where it was")
        process.send_signal(signal.SIGKILL)
        process.communicate()
    process, url = start()
    with RemoteStates(url) as states:
        assert states.get("walk/7") == b"where it was"
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=10)
