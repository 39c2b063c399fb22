"""Memory that a process shares with its children.

On Linux a memfd: a crash leaves nothing behind, and unlike /dev/shm it is bounded only by the machine's memory.
Elsewhere named memory: on Windows it goes with its last user; on other systems it is a file in the temporary folder,
removed when it is closed, by the orphan reaper when its owner is killed, and at the next start if both were.
"""

from __future__ import annotations

import contextlib
import glob
import mmap
import os
import secrets
import sys
import tempfile
from abc import ABC, abstractmethod

from corral.core import portable

_PREFIX = "corral-memory-"
Token = int | tuple[str, int]


class SharedMemory(ABC):
    """A block of shared memory, in its owner or in a child that was given its token."""

    path: str | None = None
    """A file to remove when the owner is gone."""

    @property
    @abstractmethod
    def token(self) -> Token:
        """What a child needs to open it."""

    @abstractmethod
    def create(self, size: int) -> mmap.mmap:
        """Allocate it, in its owner; a child may have been started before."""

    @abstractmethod
    def map(self, size: int) -> mmap.mmap:
        """Map it, in a child, once it was created with this size."""

    @abstractmethod
    def read(self) -> bytes:
        """The content it was made with."""

    @abstractmethod
    def close(self) -> None:
        """Remove it, if that was not done; what is mapped remains mapped."""


class Memfd(SharedMemory):
    """Memory without a name, inherited by its number."""

    def __init__(self, fd: int):
        self._fd = fd

    @property
    def token(self) -> int:
        return self._fd

    def create(self, size: int) -> mmap.mmap:
        os.ftruncate(self._fd, size)
        return self.map(size)

    def map(self, size: int) -> mmap.mmap:
        return mmap.mmap(self._fd, size)

    def read(self) -> bytes:
        with open(self._fd, "rb", closefd=False) as file:
            file.seek(0)
            return file.read()

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


class NamedMemory(SharedMemory):
    """Memory with a name, for systems where a child inherits no descriptors."""

    def __init__(self, name: str, size: int = 0):
        self._name, self._size = name, size
        self._map: mmap.mmap | None = None
        if sys.platform != "win32":
            self.path = os.path.join(tempfile.gettempdir(), name)

    @property
    def token(self) -> tuple[str, int]:
        return self._name, self._size

    def create(self, size: int) -> mmap.mmap:
        self._map, self._size = self._open(size, os.O_RDWR | os.O_CREAT | os.O_EXCL), size
        return self._map

    def map(self, size: int) -> mmap.mmap:
        return self._open(size, os.O_RDWR)

    def read(self) -> bytes:
        return bytes(self._open(self._size, os.O_RDWR)) if self._size else b""

    def close(self) -> None:
        self._map = None
        if self.path is not None:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.path)

    def _open(self, size: int, flags: int) -> mmap.mmap:
        if sys.platform == "win32":
            return mmap.mmap(-1, size, tagname=self._name)
        assert self.path is not None
        fd = os.open(self.path, flags, 0o600)
        try:
            if flags & os.O_CREAT:
                os.ftruncate(fd, size)
            return mmap.mmap(fd, size)
        finally:
            os.close(fd)


def shared_memory(name: str, content: bytes = b"") -> SharedMemory:
    """New shared memory with this content; without one it is to be created later."""
    memory: SharedMemory
    if portable.PORTABLE:
        _remove_abandoned()
        memory = NamedMemory(f"{_PREFIX}{os.getpid()}-{secrets.token_hex(8)}")
    else:
        memory = Memfd(os.memfd_create(name))
    if content:
        memory.create(len(content))[:] = content
    return memory


def open_memory(token: Token) -> SharedMemory:
    """The shared memory with this token, in a child."""
    return Memfd(token) if isinstance(token, int) else NamedMemory(*token)


def _remove_abandoned() -> None:
    """Remove the files of processes that were killed together with their orphan reaper."""
    if sys.platform == "win32":
        return
    for path in glob.glob(os.path.join(tempfile.gettempdir(), f"{_PREFIX}*")):
        pid = os.path.basename(path)[len(_PREFIX) :].partition("-")[0]
        try:
            os.kill(int(pid), 0)
        except ProcessLookupError:
            with contextlib.suppress(OSError):  # another user's
                os.unlink(path)
        except (OSError, ValueError):  # another user's process
            continue
