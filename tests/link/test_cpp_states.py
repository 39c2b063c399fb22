"""The C++ client of state servers, with a real `corral state-server` and beside the Python client."""

import os
import subprocess
import sys

import pytest
from helpers.cpp_sdk import SCHEMES
from helpers.cpp_state_client import CppStates
from helpers.relay import Relay

from corral.core.errors import UserError
from corral.snapshot.states import StatesFull
from corral.snapshot.store.client import RemoteStates

TOKEN = "0123456789abcdef0123456789abcdef"


@pytest.fixture
def serve():
    """Starts state servers, which end with the test; gives each one's process and URL."""
    running = []

    def go(*options, bind="tcp://127.0.0.1:0"):
        command = [sys.executable, "-m", "corral.cli.main", "state-server", "--bind", bind, *map(str, options)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        running.append(process)
        return process, process.stdout.readline().split()[3].rstrip(";")

    yield go
    for process in running:
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.fixture
def token(tmp_path):
    path = tmp_path / "token"
    path.write_text(TOKEN + "\n")
    return path


@pytest.mark.parametrize("scheme", SCHEMES)
def test_states_go_from_python_to_cpp_and_back_bit_by_bit(built, serve, token, scheme):
    _, url = serve("--token-file", token, bind=f"{scheme}://127.0.0.1:0")
    states = {
        "": b"",
        "0": b"\0",
        "all": bytes(range(256)) * 5,
        "3 MiB": os.urandom(3 << 20),
        "épée/状態": b"\xff\0\xfe",
    }
    with CppStates(built, url, token) as cpp, RemoteStates(url, str(token)) as python:
        for one, other in ((python, cpp), (cpp, python)):
            for name, state in states.items():
                one.put(f"s{name}", state)
                assert other.get(f"s{name}") == state
            assert other.names("s") == one.names() == sorted(f"s{name}" for name in states)
            assert other.nbytes == one.nbytes == sum(map(len, states.values()))
            for name in states:
                assert other.drop(f"s{name}") is True
                assert one.drop(f"s{name}") is False
                assert one.get(f"s{name}") is None


def test_large_states_travel_whole(built, serve):
    _, url = serve()
    state = os.urandom(1 << 20) * 40
    with CppStates(built, url) as cpp, RemoteStates(url) as python:
        cpp.put("large", state)
        assert python.get("large") == state
        assert cpp.get("large") == state


def test_many_names_come_page_by_page(built, serve):
    _, url = serve()
    with CppStates(built, url) as cpp:
        for k in range(2300):
            cpp.put(f"s{k:05}", b"")
        assert cpp.names() == [f"s{k:05}" for k in range(2300)]


def test_full_budget_is_reported(built, serve):
    _, url = serve("--max-states", 1, "--max-mb", 1)
    with CppStates(built, url) as cpp:
        with pytest.raises(StatesFull, match="limit of 1048576"):
            cpp.put("a", bytes((1 << 20) + 1))
        cpp.put("a", bytes(1 << 20))
        with pytest.raises(StatesFull):
            cpp.put("b", b"")
        assert cpp.names() == ["a"]


@pytest.mark.parametrize("name", ["", "a\nb", "x" * 600, b"\xff\xfe"])
def test_invalid_name_is_refused(built, serve, name):
    _, url = serve()
    with CppStates(built, url) as cpp:
        with pytest.raises(UserError, match="name of a state"):
            cpp.put(name, b"")
        cpp.put("and it goes on", b"")


def test_wrong_token_is_refused(built, serve, token, tmp_path):
    (tmp_path / "other").write_text(TOKEN[::-1])
    _, url = serve("--token-file", token)
    for path, words in ((tmp_path / "other", "did not prove that it knows"), ("", "refused: a client did not")):
        with CppStates(built, url, path) as cpp, pytest.raises(UserError, match=words) as caught:
            cpp.get("a")
        assert len(str(caught.value).splitlines()) == 1
    _, open_to_all = serve()
    with CppStates(built, open_to_all, token) as cpp, pytest.raises(UserError, match="did not prove"):
        cpp.get("a")


@pytest.mark.parametrize("scheme", SCHEMES)
def test_lost_state_server_times_out_and_is_found_again(built, serve, tmp_path, scheme):
    process, url = serve("--dir", tmp_path / "s", bind=f"{scheme}://127.0.0.1:0")
    with CppStates(built, url, timeout_s=0.3) as hasty, CppStates(built, url, timeout_s=60.0) as patient:
        for cpp in (hasty, patient):
            cpp.put("walk/7", b"where it was")
        process.kill()
        process.wait()
        for _ in range(2):
            with pytest.raises(UserError, match=r"did not answer within 0.3 s; is it running"):
                hasty.get("walk/7")
        serve("--dir", tmp_path / "s", bind=url)
        assert patient.get("walk/7") == b"where it was"


@pytest.mark.parametrize("after_bytes", [0, 1, 37, 150, 5000, 70_001])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_cut_connection_costs_nothing(built, serve, scheme, after_bytes):
    _, url = serve(bind=f"{scheme}://127.0.0.1:0")
    relay = Relay(url)
    try:
        with CppStates(built, relay.url) as cpp:
            for k in range(6):
                state = os.urandom(50_000)
                relay.cut(after_bytes)
                cpp.put(f"s{k}", state)
                assert cpp.get(f"s{k}") == state
            assert len(cpp.names()) == 6
    finally:
        relay.close()
