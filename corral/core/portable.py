"""What differs between operating systems, and the setting that forces what all of them have.

On Linux, Corral uses memfds, `poll` and `epoll`, process groups and a shell that ends orphans. Elsewhere, and on Linux
with CORRAL_PORTABLE=1, it uses nothing that Windows or macOS lacks.
"""

from __future__ import annotations

import _thread
import contextlib
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

PORTABLE = sys.platform != "linux" or os.environ.get("CORRAL_PORTABLE", "0") not in ("", "0")

# What asks a program to stop: Ctrl-C, `kill`, a terminal that is closed, and on Windows Ctrl-Break, the only one that
# reaches a process group.
_NAMES = ("SIGINT", "SIGTERM", "SIGHUP", "SIGBREAK")
STOP_SIGNALS = tuple(getattr(signal, name) for name in _NAMES if hasattr(signal, name))

READABLE, WRITABLE = 1, 4  # POLLIN and POLLOUT, EPOLLIN and EPOLLOUT
_REPLACE_S = 2.0

yield_core: Callable[[], Any] = getattr(os, "sched_yield", lambda: time.sleep(0))


def signal_main_thread(number: signal.Signals) -> None:
    """Run the main thread's handler of a signal; on POSIX also while it waits in a system call."""
    if hasattr(signal, "pthread_kill"):
        signal.pthread_kill(threading.main_thread().ident or 0, number)
    else:
        _thread.interrupt_main(number)


class Poll(Protocol):
    """The part of `select.poll` and `select.epoll` that is used here."""

    def register(self, fd: Any, eventmask: int, /) -> None: ...
    def modify(self, fd: Any, eventmask: int, /) -> None: ...
    def unregister(self, fd: Any, /) -> None: ...
    def poll(self, timeout: float | None = None, /) -> list[tuple[int, int]]: ...


class SelectPoll:
    """`select.select` as a Poll; its timeouts are in units of `unit_s` seconds."""

    def __init__(self, unit_s: float):
        self._unit_s = unit_s
        self._events: dict[int, int] = {}

    def register(self, fd: Any, eventmask: int, /) -> None:
        self._events[fd if isinstance(fd, int) else fd.fileno()] = eventmask

    modify = register

    def unregister(self, fd: Any, /) -> None:
        self._events.pop(fd if isinstance(fd, int) else fd.fileno(), None)

    def poll(self, timeout: float | None = None, /) -> list[tuple[int, int]]:
        wait_s = None if timeout is None or timeout < 0 else timeout * self._unit_s
        if not self._events:  # Windows refuses to wait for nothing
            time.sleep(wait_s or 0.0)
            return []
        readers = [fd for fd, events in self._events.items() if events & READABLE]
        writers = [fd for fd, events in self._events.items() if events & WRITABLE]
        found = dict.fromkeys(self._events, 0)
        readable, writable, _ = select.select(readers, writers, [], wait_s)
        for fd in readable:
            found[fd] |= READABLE
        for fd in writable:
            found[fd] |= WRITABLE
        return [(fd, events) for fd, events in found.items() if events]

    def close(self) -> None:
        self._events.clear()


def new_poll() -> Poll:
    """Waits for sockets; timeouts in milliseconds."""
    return SelectPoll(1e-3) if PORTABLE else select.poll()


def new_epoll() -> Any:
    """Waits for many sockets; timeouts in seconds. A Poll that is to be closed."""
    return SelectPoll(1.0) if PORTABLE else select.epoll()


def replace_file(source: Path, target: Path) -> None:
    """Rename, replacing `target`. Windows refuses as long as another program has the file open, so try again."""
    until = time.monotonic() + (_REPLACE_S if os.name == "nt" else 0.0)
    while True:
        try:
            os.replace(source, target)
            return
        except PermissionError:
            if time.monotonic() >= until:
                raise
        time.sleep(0.02)


def sync_folder(folder: Path) -> None:
    """Write a folder's changed names to the disk; Windows cannot, and needs not."""
    if os.name == "nt":
        return
    file = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def point(link: Path, name: str) -> None:
    """Make `link` a symbolic link to a neighbour or, where these need a privilege, a file that contains its name."""
    temporary = link.with_name(f".tmp-{link.name}")
    temporary.unlink(missing_ok=True)
    try:
        temporary.symlink_to(name)
    except OSError:
        temporary.write_text(name, encoding="utf-8")
    replace_file(temporary, link)


def pointed_to(link: Path) -> str | None:
    """The name that `point` has written; None if there is none."""
    with contextlib.suppress(OSError):
        if link.is_symlink():
            return os.readlink(link)
        if link.is_file():
            return link.read_text(encoding="utf-8")
    return None
