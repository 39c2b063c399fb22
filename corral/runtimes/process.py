"""Roles as processes of this machine, each behind a socket pair."""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Sequence

import cloudpickle

from corral.core.encoding import Buffer, DecodeError, Value, decode, encode
from corral.core.portable import READABLE, new_poll
from corral.runtimes.base import Call, Handle, MakeRole, Runtime
from corral.runtimes.child import start_child
from corral.runtimes.connection import Connection, ConnectionClosed
from corral.runtimes.orphan_reaper import OrphanReaper
from corral.runtimes.shared_memory import shared_memory

# Kinds of frames between a runtime and its roles.
CALL, MAIL, CLOSE = range(3)  # to a role
ANSWER, ALIVE = range(10, 12)  # from a role

_CLOSE_S = 5.0  # for all roles to finish what they do and end
_END_S = 0.2  # to end by itself, when its connection is closed
_START_S = 60.0  # to send something for the first time: a busy machine starts many processes slowly


class Shared:
    """A value encoded once for many receivers."""

    def __init__(self, value: Value):
        self.value = value
        self.frames: dict[str, list[Buffer]] = {}


class _RoleProcess(Handle):
    def __init__(self, name: str, make: MakeRole, reaper: OrphanReaper, silence_s: float):
        self.name = name
        # It sends ALIVE every second, and reads all the time: only a frozen one could make us wait, here too.
        self._silence_s, self._limit_s = silence_s, max(silence_s, _START_S)
        self._calls: dict[int, Call] = {}
        self._number = 0
        self._job = shared_memory("corral-role", cloudpickle.dumps(make))
        self._process = start_child("corral.runtimes.process_child:main", (self._job,), reaper)
        self.connection = Connection(self._process.socket, silence_s)
        self._seen = time.monotonic()

    @property
    def pid(self) -> int | None:
        return self._process.pid

    def call(self, method: str, *args: Value) -> Call:
        call = Call(self, method)
        self._number += 1
        self._calls[self._number] = call
        self._send(CALL, self._number, encode([method, [_plain(arg) for arg in args]]))
        return call

    def send_mail(self, key: str, value: Value) -> None:
        if isinstance(value, Shared):
            if key not in value.frames:
                value.frames[key] = encode([key, value.value])
            self._send(MAIL, 0, value.frames[key])
        else:
            self._send(MAIL, 0, encode([key, value]))

    def _send(self, kind: int, number: int, parts: list[Buffer]) -> None:
        if self.lost is None:
            try:
                self.connection.send(kind, number, parts)
            except ConnectionClosed as error:
                self.mark_lost(f"it does not accept messages: {error}")

    def read(self) -> None:
        if self.lost is not None:
            return
        try:
            while (frame := self.connection.read(wait=False)) is not None:
                self._seen, self._limit_s = time.monotonic(), self._silence_s
                kind, number, body = frame
                if kind == ANSWER and number in self._calls:
                    self._job.close()  # it has read it
                    self._calls.pop(number).answer = decode(body)
        except (ConnectionClosed, DecodeError) as error:
            self.mark_lost(str(error))

    def check(self) -> None:
        """Treat it as lost if it has been silent for too long."""
        if self.lost is None and time.monotonic() - self._seen > self._limit_s:
            self.mark_lost(f"it sent nothing for {self._limit_s:g} s")

    def mark_lost(self, why: str) -> None:
        if self.lost is None:
            ended = self._process.wait(time.monotonic() + _END_S)
            self._process.kill()  # and what it started
            why = f"its process ended with {self._process.ending}" if ended else why
            stacks = self._process.stacks
            self.connection.close()
            self._process.close()
            self._job.close()
            self.lost = f"{self.name} was lost: {why}" + (f"\n{stacks}" if stacks else "")
            self._calls.clear()

    def terminate(self) -> None:
        if self.lost is None:
            self._process.terminate()

    def stop(self, timeout_s: float = 5.0) -> None:
        self.request_close()
        self.wait_closed(time.monotonic() + timeout_s)

    def request_close(self) -> None:
        self._send(CLOSE, 0, [])

    def wait_closed(self, until: float) -> None:
        while self.lost is None and time.monotonic() < until and not self._process.has_ended():
            self.read()  # it may be in the middle of a long answer
            time.sleep(0.005)
        self.mark_lost("it was stopped")


class ProcessRuntime(Runtime):
    """Processes that end with this one, however it ends."""

    def __init__(self, silence_s: float = 30.0) -> None:
        self._silence_s = silence_s
        self._handles: list[_RoleProcess] = []
        self._reaper = OrphanReaper()
        self._finalizer = weakref.finalize(self, _end_all, self._handles, self._reaper, os.getpid())

    def spawn(self, name: str, make: MakeRole) -> Handle:
        handle = _RoleProcess(name, make, self._reaper, self._silence_s)
        self._handles[:] = [h for h in self._handles if h.lost is None] + [handle]
        return handle

    def wait(self, calls: Sequence[Call], timeout_s: float) -> list[Call]:
        until = time.monotonic() + timeout_s
        handles = list(dict.fromkeys(call.handle for call in calls if isinstance(call.handle, _RoleProcess)))
        for handle in handles:
            handle.read()
        while not (done := [call for call in calls if call.done]):
            left = until - time.monotonic()
            if left <= 0 or not handles:
                break
            poll, by_fd = new_poll(), {handle.connection.fileno(): handle for handle in handles}
            for fd in by_fd:
                poll.register(fd, READABLE)
            for fd, _ in poll.poll(min(left, 1.0) * 1000):
                by_fd[fd].read()
            for handle in handles:
                handle.check()
        return done

    def share(self, value: Value) -> Value:
        return Shared(value)

    def close(self) -> None:
        self._finalizer()


def _end_all(handles: list[_RoleProcess], reaper: OrphanReaper, owner: int) -> None:
    if os.getpid() != owner:  # a fork does not own them
        return
    for handle in handles:
        handle.request_close()
    until = time.monotonic() + _CLOSE_S
    for handle in handles:
        handle.wait_closed(until)
    handles.clear()
    reaper.stop()


def _plain(value: Value) -> Value:
    return value.value if isinstance(value, Shared) else value
