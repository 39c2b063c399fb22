"""The C++ client of state servers, driven as a keeper of states like any other."""

import contextlib
import struct
import subprocess

from corral.core.errors import UserError
from corral.snapshot.states import StatesFull
from corral.snapshot.store.base import StateStore


class CppStates(StateStore):
    """A process of `state_driver`. What its client throws is raised here as the Python client would."""

    def __init__(self, built, url, token_file="", timeout_s=20.0):
        command = [str(built / "state_driver"), url, str(token_file), str(timeout_s)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def put(self, name, state):
        self._ask(b"p", _bytes(name), state)

    def get(self, name):
        return next(iter(self._ask(b"g", _bytes(name))), None)

    def drop(self, name):
        return bool(self._ask(b"d", _bytes(name)))

    def names(self, prefix=""):
        return [name.decode() for name in self._ask(b"n", prefix.encode())]

    @property
    def nbytes(self):
        return int(self._ask(b"b")[0])

    def close(self):
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait(30)

    def _ask(self, kind, *fields):
        self._process.stdin.write(kind + b"".join(struct.pack("<I", len(field)) + field for field in fields))
        self._process.stdin.flush()
        kind, count = struct.unpack("<cI", self._read(5))
        found = [self._read(struct.unpack("<I", self._read(4))[0]) for _ in range(count)]
        if kind != b"+":
            raise (StatesFull if kind == b"f" else UserError)(found[0].decode())
        return found

    def _read(self, size):
        data = self._process.stdout.read(size)
        assert len(data) == size, f"state_driver ended with {self._process.wait(30)}"
        return data


def _bytes(name):
    return name if isinstance(name, bytes) else name.encode()
