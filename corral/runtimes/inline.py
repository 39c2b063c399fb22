"""Roles as threads of this process: for tests, and for following a distributed run with a debugger."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Sequence

from corral.core.encoding import Value
from corral.runtimes.base import Call, Handle, Mailbox, MakeRole, RoleHost, RoleLost, Runtime, read_answer


class _InlineCall(Call):
    def __init__(self, handle: _Thread, method: str, args: tuple[Value, ...]):
        self.handle, self.method, self.args = handle, method, args
        self.answer: dict[str, Value] | None = None

    @property
    def done(self) -> bool:
        return self.answer is not None

    def result(self) -> Value:
        assert self.answer is not None, "not done"
        if "lost" in self.answer:
            raise RoleLost(self.answer["lost"])
        return read_answer(self.answer, self.handle.name)


class _Thread(Handle):
    def __init__(self, name: str, make: MakeRole, change: threading.Condition):
        self.name, self._make, self._change = name, make, change
        self._mailbox = Mailbox()
        self._calls: queue.SimpleQueue[_InlineCall | None] = queue.SimpleQueue()  # bounded by the waiting callers
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def call(self, method: str, *args: Value) -> _InlineCall:
        call = _InlineCall(self, method, args)
        if self._stopped:
            call.answer = {"lost": f"{self.name} was stopped"}
        else:
            self._calls.put(call)
        return call

    def send_mail(self, key: str, value: Value) -> None:
        self._mailbox.put(key, value)

    @property
    def alive(self) -> bool:
        return self._thread.is_alive() and not self._stopped

    def stop(self, timeout_s: float = 5.0) -> None:
        self._stopped = True
        self._mailbox.close()
        self._calls.put(None)
        self._thread.join(timeout_s)  # a thread cannot be ended; it ends with the process

    def _run(self) -> None:
        host = RoleHost(lambda: self._make(self._mailbox))
        while (call := self._calls.get()) is not None:
            stopped = {"lost": f"{self.name} was stopped"}
            answer = stopped if self._stopped else host.answer(call.method, call.args)
            with self._change:
                call.answer = answer
                self._change.notify_all()
        host.close()


class InlineRuntime(Runtime):
    """Threads. A role that hangs cannot be ended, and nothing is copied: roles must not write to their arguments."""

    name = "inline"

    def __init__(self) -> None:
        self._handles: list[_Thread] = []
        self._change = threading.Condition()

    def spawn(self, name: str, make: MakeRole) -> Handle:
        handle = _Thread(name, make, self._change)
        self._handles.append(handle)
        return handle

    def wait(self, calls: Sequence[Call], timeout_s: float) -> list[Call]:
        until = time.monotonic() + timeout_s
        with self._change:
            while not (done := [call for call in calls if call.done]):
                left = until - time.monotonic()
                if left <= 0 or not self._change.wait(left):
                    break
            return done

    def share(self, value: Value) -> Value:
        return value

    def close(self) -> None:
        for handle in self._handles:
            handle.stop()
        self._handles.clear()
