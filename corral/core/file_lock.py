"""Locks of files between processes, which end with the process that has them."""

from __future__ import annotations

import importlib
import os
from typing import Any

# Locked on Windows, where a lock forbids reading too: a byte that no file here has.
_FAR = 1 << 30


def lock(file: int, *, shared: bool = False) -> None:
    """Lock an open file for this process alone, not its children; OSError if another process has it.

    Closing any descriptor of the file in this process ends it.
    """
    if (fcntl := _module("fcntl")) is not None:
        # lockf, because forked children would inherit a lock by flock.
        fcntl.lockf(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        return
    msvcrt: Any = importlib.import_module("msvcrt")
    os.lseek(file, _FAR, os.SEEK_SET)
    msvcrt.locking(file, msvcrt.LK_NBLCK, 1)
    if shared:  # asked only whether it is free
        os.lseek(file, _FAR, os.SEEK_SET)
        msvcrt.locking(file, msvcrt.LK_UNLCK, 1)


def open_locked_folder(folder: str | os.PathLike[str]) -> int:
    """Open and lock a folder; BlockingIOError if another process has it. Without locks of folders, a file in it."""
    fcntl = _module("fcntl")
    if fcntl is None:
        file = os.open(os.path.join(folder, ".lock"), os.O_RDWR | os.O_CREAT)
        try:
            lock(file)
        except OSError as error:
            os.close(file)
            raise BlockingIOError(*error.args) from error
        return file
    file = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(file)
        raise
    except OSError:  # a file system without locks
        pass
    return file


def _module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        return None
