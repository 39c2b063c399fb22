"""States in files of a folder: they outlive the process, and after a crash each is whole or absent."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import struct
import weakref
import zlib
from pathlib import Path

from corral.core.errors import UserError
from corral.core.file_lock import open_locked_folder
from corral.snapshot.store.base import MAX_NAME, StateBudget, StateStore, check_name

log = logging.getLogger("corral.snapshot")

_HEAD = struct.Struct("<4sIIQ")  # magic, bytes of the name, CRC-32 of name and state, bytes of the state
_MAGIC = b"CST1"


class FileStates(StateStore):
    """One file per state, named by the hash of its name, written to a temporary file and renamed."""

    def __init__(self, folder: str | Path, budget: StateBudget | None = None):
        self._folder, self._budget = Path(folder), budget or StateBudget()
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"The folder of states {folder} cannot be made: {error.strerror}.") from error
        self._fd = self._lock()
        self._end = weakref.finalize(self, os.close, self._fd)
        self._sizes: dict[str, int] = {}
        self._held = 0  # the sum of the sizes: this process alone changes the folder, which is locked
        for path in sorted(self._folder.glob("*.state")):
            self._find(path)
        for path in self._folder.glob("*.part"):  # of a crash
            path.unlink(missing_ok=True)

    def put(self, name: str, state: bytes) -> None:
        """Returns after the state is on the disk."""
        old = self._sizes.get(check_name(name))
        self._budget.require_room(self._held, len(self._sizes), old, len(state))
        path, key = self._path(name), name.encode()
        part = path.with_suffix(f".{os.getpid()}.part")
        head = _HEAD.pack(_MAGIC, len(key), zlib.crc32(state, zlib.crc32(key)), len(state))
        try:
            with part.open("wb") as file:
                file.writelines((head, key, state))
                file.flush()
                os.fsync(file.fileno())
            part.replace(path)
            self._count(name, len(state))
            os.fsync(self._fd)  # the new name of the file
        except OSError as error:
            with contextlib.suppress(OSError):
                part.unlink()
            raise UserError(f"The state {name!r} cannot be written to {self._folder}: {error.strerror}.") from error

    def get(self, name: str) -> bytes | None:
        """Read and check; None, and a warning, if the file is damaged."""
        if check_name(name) not in self._sizes:
            return None
        found = _read(self._path(name))
        if found is None or found[0] != name:
            log.warning("the state %r in %s is damaged or missing.", name, self._folder)
            return None
        return found[1]

    def drop(self, name: str) -> bool:
        size = self._sizes.pop(check_name(name), None)
        if size is None:
            return False
        self._held -= size
        self._path(name).unlink(missing_ok=True)
        return True

    def names(self, prefix: str = "") -> list[str]:
        return sorted(name for name in self._sizes if name.startswith(prefix))

    def close(self) -> None:
        self._end()

    def _lock(self) -> int:
        """Open and lock the folder: cached names and sizes would be wrong with two processes."""
        try:
            return open_locked_folder(self._folder)
        except BlockingIOError:
            raise UserError(
                f"The folder of states {self._folder} is in use; share it by `corral state-server --dir "
                f"{self._folder}` and its URL."
            ) from None

    @property
    def nbytes(self) -> int:
        return self._held

    def _count(self, name: str, size: int) -> None:
        self._held += size - self._sizes.get(name, 0)
        self._sizes[name] = size

    def _path(self, name: str) -> Path:
        return self._folder / f"{hashlib.sha256(name.encode()).hexdigest()}.state"

    def _find(self, path: Path) -> None:
        found = _read(path)
        if found is None or self._path(found[0]) != path:
            log.warning("%s is not a complete state; it is ignored.", path)
            return
        self._count(found[0], len(found[1]))


def _read(path: Path) -> tuple[str, bytes] | None:
    try:
        data = path.read_bytes()
        magic, name_size, crc, size = _HEAD.unpack_from(data)
        body = data[_HEAD.size :]
        if magic != _MAGIC or name_size > MAX_NAME or len(body) != name_size + size or zlib.crc32(body) != crc:
            return None
        return body[:name_size].decode(), body[name_size:]
    except (OSError, struct.error, UnicodeDecodeError):
        return None
