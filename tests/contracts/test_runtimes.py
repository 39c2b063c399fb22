"""What every runtime does with roles, and what only those can do whose roles have a life of their own."""

import contextlib
import os
import signal
import time

import numpy as np
import pytest
from helpers.portable import forced  # noqa: F401

from corral.core.encoding import DecodeError, decode, encode
from corral.core.errors import RunFailed, UserError
from corral.runtimes.base import RoleLost, make_runtime


class Echo:
    """A role that says what it was told."""

    def __init__(self, mailbox):
        self.mailbox, self.calls = mailbox, 0

    def echo(self, value):
        self.calls += 1
        return {"value": value, "calls": self.calls}

    def grown(self, array):
        return array + 1

    def mail(self, key, least):
        return self.mailbox.wait(key, lambda value: value["n"] >= least, 20.0)

    def fail(self, kind):
        raise {"user": UserError("a mistake"), "failed": RunFailed("a failure"), "other": KeyError("odd")}[kind]

    def pid(self):
        return os.getpid()

    def sleep(self, seconds):
        time.sleep(seconds)
        return seconds


class Broken:
    def __init__(self, mailbox):
        raise UserError("it cannot be built; build it otherwise")


PORTABLE = pytest.param("portable", marks=pytest.mark.slow)


@pytest.fixture(params=["inline", "process", PORTABLE, pytest.param("ray", marks=pytest.mark.ray)])
def runtime(request):
    if request.param == "portable":
        request.getfixturevalue("forced")
    made = make_runtime(request.param.replace("portable", "process"))
    yield made
    made.close()


@pytest.fixture(params=["process", "portable"])
def processes(request):
    if request.param == "portable":
        request.getfixturevalue("forced")
    made = make_runtime("process")
    yield made
    made.close()


def result(runtime, call, timeout_s=60.0):
    assert runtime.wait([call], timeout_s) == [call]
    return call.result()


def test_calls_are_answered_in_order(runtime):
    role = runtime.spawn("echo", Echo)
    calls = [role.call("echo", k) for k in range(20)]
    while waiting := [call for call in calls if not call.done]:
        assert runtime.wait(waiting, 60)
    assert [call.result() for call in calls] == [{"value": k, "calls": k + 1} for k in range(20)]


def test_arrays_of_every_kind_come_back_as_they_were(runtime):
    role = runtime.spawn("echo", Echo)
    value = {
        "floats": np.arange(12, dtype=np.float32).reshape(3, 4)[:, ::2],
        "flags": np.array([True, False]),
        "none": np.zeros((0, 3), np.int64),
        "scalar": np.array(3.5),
        "bytes": b"\x00\xff",
        "big": 2**100 + 1,
        "nested": [1, 2.5, None, "text", {"more": np.arange(5, dtype=np.uint8)}],
    }
    back = result(runtime, role.call("echo", value))["value"]
    for name in ("floats", "flags", "none", "scalar"):
        assert back[name].dtype == value[name].dtype
        assert back[name].shape == value[name].shape
        np.testing.assert_array_equal(back[name], value[name])
    assert back["bytes"] == value["bytes"]
    assert back["big"] == value["big"]
    np.testing.assert_array_equal(back["nested"][4]["more"], value["nested"][4]["more"])


def test_large_calls_and_results_do_not_deadlock(runtime):
    role = runtime.spawn("echo", Echo)
    big = np.zeros(3_000_000)
    calls = [role.call("grown", big) for _ in range(4)]
    for _ in range(4):
        role.send_mail("weights", {"n": 1, "array": big})
    for call in calls:
        assert result(runtime, call)[0] == 1


def test_the_newest_mail_wins_and_arrives_during_a_call(runtime):
    role = runtime.spawn("echo", Echo)
    call = role.call("mail", "weights", 3)
    for n in range(4):
        role.send_mail("weights", runtime.share({"n": n, "array": np.full(4, n)}))
    got = result(runtime, call)
    assert got["n"] >= 3
    assert result(runtime, role.call("mail", "weights", 3))["n"] == 3


def test_a_shared_value_is_passed_to_calls_of_several_roles(runtime):
    shared = runtime.share({"n": 7, "array": np.arange(5)})
    for call in [runtime.spawn(f"echo {k}", Echo).call("echo", shared) for k in range(2)]:
        value = result(runtime, call)["value"]
        assert value["n"] == 7
        np.testing.assert_array_equal(value["array"], np.arange(5))


@pytest.mark.parametrize(
    ("kind", "error", "text"),
    [("user", UserError, "a mistake"), ("failed", RunFailed, "a failure"), ("other", RunFailed, "KeyError")],
)
def test_role_continues_after_an_error(runtime, kind, error, text):
    role = runtime.spawn("echo", Echo)
    with pytest.raises(error, match=text):
        result(runtime, role.call("fail", kind))
    assert result(runtime, role.call("echo", 1))["value"] == 1


def test_role_that_cannot_be_built_names_the_reason(runtime):
    role = runtime.spawn("broken", Broken)
    with pytest.raises(UserError, match="build it otherwise"):
        result(runtime, role.call("echo", 1))


def test_waiting_ends_when_its_time_is_up(runtime):
    role = runtime.spawn("echo", Echo)
    assert result(runtime, role.call("echo", 0))
    call = role.call("sleep", 0.5)
    assert runtime.wait([call], 0.1) == []
    assert result(runtime, call) == 0.5


def test_the_first_answer_is_not_held_up_by_a_slow_role(runtime):
    slow, quick = runtime.spawn("slow", Echo), runtime.spawn("quick", Echo)
    assert result(runtime, slow.call("echo", 0))
    assert result(runtime, quick.call("echo", 0))
    late, early = slow.call("sleep", 1.5), quick.call("echo", 1)
    assert runtime.wait([late, early], 60) == [early]
    assert result(runtime, late) == 1.5


def test_a_stopped_role_does_not_answer(runtime):
    role = runtime.spawn("echo", Echo)
    assert result(runtime, role.call("echo", 0))
    role.stop()
    assert not role.alive
    with pytest.raises(RoleLost):
        result(runtime, role.call("echo", 1))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_killed_role_is_lost_with_its_signal(processes, number):
    role, other = processes.spawn("victim", Echo), processes.spawn("other", Echo)
    assert result(processes, role.call("echo", 0))
    call = role.call("sleep", 60)
    os.kill(role.pid, number)
    with pytest.raises(RoleLost, match=number.name):
        result(processes, call)
    assert not role.alive
    with pytest.raises(RoleLost):
        result(processes, role.call("echo", 1))
    assert result(processes, other.call("echo", 2))["value"] == 2


def test_a_frozen_role_is_given_up(processes):
    with contextlib.closing(make_runtime("process", silence_s=2.0)) as runtime:
        role = runtime.spawn("victim", Echo)
        pid = result(runtime, role.call("pid"))
        os.kill(pid, signal.SIGSTOP)
        with pytest.raises(RoleLost, match="sent nothing for 2 s"):
            result(runtime, role.call("echo", 1))


def test_roles_end_with_the_runtime(monkeypatch):
    monkeypatch.setattr("corral.runtimes.process._CLOSE_S", 0.5)
    runtime = make_runtime("process")
    roles = [runtime.spawn(str(k), Echo) for k in range(2)]
    pids = [result(runtime, role.call("pid")) for role in roles]
    roles[1].call("sleep", 60)  # one of them is busy
    runtime.close()
    runtime.close()
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


@pytest.mark.parametrize("cut", [0, 3, 8, 20, 70])
def test_cut_and_garbled_messages_are_refused(cut):
    whole = b"".join(bytes(part) for part in encode({"a": np.arange(100), "b": "text"}))
    assert decode(whole)["b"] == "text"
    with pytest.raises(DecodeError):
        decode(whole[:cut])
    with pytest.raises(DecodeError):
        decode(whole[:8] + b"\xc1" * (len(whole) - 8))


def test_objects_cannot_be_sent():
    with pytest.raises(TypeError, match="cannot be sent"):
        encode({"a": object()})
    with pytest.raises(TypeError, match="cannot be sent"):
        encode({"a": np.array([object()])})
