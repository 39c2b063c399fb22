"""Roles as threads of this process: for tests, and for following a distributed run with a debugger."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Sequence

from corral.core.encoding import Value
from corral.runtimes.base import Call, Handle, Mailbox, MakeRole, RoleHost, Runtime


class _Thread(Handle):
    def __init__(self, name: str, make: MakeRole, change: threading.Condition):
        self.name, self._make, self._change = name, make, change
        self._mailbox = Mailbox()
        self._calls: queue.SimpleQueue[tuple[Call, Sequence[Value]] | None] = (
            queue.SimpleQueue()
        )  # one per waiting caller
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def call(self, method: str, *args: Value) -> Call:
        call = Call(self, method)
        self._calls.put((call, args))
        return call

    def send_mail(self, key: str, value: Value) -> None:
        self._mailbox.put(key, value)

    def stop(self, timeout_s: float = 5.0) -> None:
        with self._change:
            self.lost = f"{self.name} was stopped"
            self._change.notify_all()
        self._mailbox.close()
        self._calls.put(None)
        self._thread.join(timeout_s)  # a thread cannot be ended; it ends with the process

    def _run(self) -> None:
        host = RoleHost(lambda: self._make(self._mailbox))
        while (item := self._calls.get()) is not None:
            call, args = item
            answer = host.answer(call.method, args) if self.lost is None else None
            with self._change:
                call.answer = answer
                self._change.notify_all()
        host.close()


class InlineRuntime(Runtime):
    """Threads. A role that hangs cannot be ended, and nothing is copied: roles must not write to their arguments."""

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
