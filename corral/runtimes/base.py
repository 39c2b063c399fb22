"""One interface to run a role of a topology somewhere, call it, and notice when it is gone.

```python
actor = runtime.spawn("actor 0", make_actor)          # make_actor(mailbox) returns an object: the role
actor.send_mail("weights", weights)                        # only the newest is kept; the role may read it at any time
calls = [actor.call("sample", 3)]
for call in runtime.wait(calls, timeout_s=5):
    print(call.result())                              # what role.sample(3) returned; RoleLost when it is gone
```
"""

from __future__ import annotations

import pkgutil
import threading
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from corral.core.encoding import Value
from corral.core.errors import EnvFailed, RunFailed, UserError
from corral.core.machine import require_processes

_ROLE_BYTES = 150_000_000  # an interpreter with torch
Role = Any
"""An object whose methods take and return values; one call at a time. `close()`, if it has one, ends it.

Arrays that a method returns may still be in flight during the next call, so it must not write to them later.
"""


class RoleLost(Exception):
    """A role exited unexpectedly or stopped responding; the message is the reason."""


class Mailbox:
    """The newest value that a role was sent, for each key."""

    def __init__(self) -> None:
        self._values: dict[str, Value] = {}
        self._change = threading.Condition()
        self._closed = False

    def put(self, key: str, value: Value) -> None:
        with self._change:
            self._values[key] = value
            self._change.notify_all()

    def get(self, key: str) -> Value:
        with self._change:
            return self._values.get(key)

    def wait(self, key: str, enough: Callable[[Value], bool], timeout_s: float) -> Value:
        """Wait until the newest value satisfies `enough`; TimeoutError otherwise."""
        until = time.monotonic() + timeout_s
        with self._change:
            while not ((value := self._values.get(key)) is not None and enough(value)):
                left = until - time.monotonic()
                if left <= 0 or self._closed:
                    raise TimeoutError(f"nothing new under {key!r} for {timeout_s:g} s")
                self._change.wait(left)
            return value

    def close(self) -> None:
        with self._change:
            self._closed = True
            self._change.notify_all()


MakeRole = Callable[[Mailbox], Role]  # makes a role where it is to run; its closure is sent along


class Call:
    """An answer in flight."""

    def __init__(self, handle: Handle, method: str):
        self.handle, self.method = handle, method
        self.answer: dict[str, Value] | None = None

    @property
    def done(self) -> bool:
        """Whether `result` would not wait."""
        return self.answer is not None or self.handle.lost is not None

    def result(self) -> Value:
        """Once `done`: the return value. Raises RoleLost, UserError, or RunFailed for any other error of the method."""
        answer = self.answer
        if answer is None:
            raise RoleLost(self.handle.lost or "not done")
        if "ok" in answer:
            return answer["ok"]
        if answer["kind"] == "user":
            raise UserError(answer["text"])
        raise RunFailed(
            answer["text"] if answer["kind"] == "failed" else f"{self.handle.name} failed:\n{answer['text']}"
        )


class Handle(ABC):
    """A role, seen from outside."""

    name: str
    lost: str | None = None
    """Why it can no longer answer."""

    @abstractmethod
    def call(self, method: str, *args: Value) -> Call:
        """Call a method of the role; calls run in order."""

    @abstractmethod
    def send_mail(self, key: str, value: Value) -> None:
        """Put a value into the role's mailbox, without waiting for calls in flight."""

    @property
    def alive(self) -> bool:
        return self.lost is None

    @property
    def pid(self) -> int | None:
        """Its process id, if it has its own process on this machine."""
        return None

    def terminate(self) -> None:
        """Ask its process to stop, as SIGTERM does, if it has its own on this machine."""
        raise NotImplementedError

    @abstractmethod
    def stop(self, timeout_s: float = 5.0) -> None:
        """Let it close, and kill it if it does not. Safe to call twice."""


class Runtime(ABC):
    """Starts roles, and ends them all when it is closed."""

    host = "127.0.0.1"  # where roles reach this process
    is_local = True  # whether all roles run on this machine

    def reserve(self, count: int, what: str, extra_processes: int = 0) -> None:  # noqa: B027 - most need not reserve
        """Reserve room for `count` roles (`what`) and `extra_processes` others; UserError if there is none."""

    @abstractmethod
    def spawn(self, name: str, make: MakeRole) -> Handle:
        """Start a role; an error while making it is raised by its first call."""

    @abstractmethod
    def wait(self, calls: Sequence[Call], timeout_s: float) -> list[Call]:
        """Wait until at least one of these calls is done or the time is up; returns all that are done."""

    @abstractmethod
    def share(self, value: Value) -> Value:
        """Prepare a value once for sending to several roles."""

    @abstractmethod
    def close(self) -> None:
        """End every role. Safe to call twice."""


class RoleHost:
    """A role where it runs, made by `make`. Answers are plain values; if `make` fails, every answer is that error."""

    def __init__(self, make: Callable[[], Role]):
        self._role: Role = None
        self._broken: dict[str, Value] | None = None
        try:
            self._role = make()
        except Exception as error:
            self._broken = failure(error)

    def answer(self, method: str, args: Sequence[Value]) -> dict[str, Value]:
        if self._broken is not None:
            return self._broken
        try:
            return {"ok": getattr(self._role, method)(*args)}
        except Exception as error:
            return failure(error)

    def close(self) -> None:
        if hasattr(self._role, "close"):
            self._role.close()


def failure(error: BaseException) -> dict[str, Value]:
    """The answer of a call that raised an error."""
    if isinstance(error, (UserError, EnvFailed, RunFailed)):
        return {"kind": "user" if isinstance(error, UserError) else "failed", "text": str(error)}
    return {"kind": "other", "text": "".join(traceback.format_exception(error))}


def require_room(name: str, count: int, what: str) -> None:
    """UserError, before a runtime is started, if the runtime is known to lack capacity for `count` roles."""
    if name == "ray":
        from corral.runtimes.ray_cluster import require_local_cpus

        require_local_cpus(count, what)
    elif name == "process":
        require_processes(count, _ROLE_BYTES, what)


_RUNTIMES = {
    "inline": "corral.runtimes.inline:InlineRuntime",
    "process": "corral.runtimes.process:ProcessRuntime",
    "ray": "corral.runtimes.ray:RayRuntime",
}


def make_runtime(name: str, silence_s: float = 30.0) -> Runtime:
    """The runtime of that name; with processes, one that sends nothing for so long is lost."""
    if name not in _RUNTIMES:
        raise UserError(f"runtime={name!r} is not one of {', '.join(_RUNTIMES)}.")
    made: Runtime = pkgutil.resolve_name(_RUNTIMES[name])(*([silence_s] if name == "process" else []))
    return made
