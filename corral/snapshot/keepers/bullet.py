"""States of PyBullet environments: what the client writes to a file, which any client with the same bodies reads.

`saveState` belongs to one client and must be removed again; a file goes from the live environment's client to the
planner's, takes as long, and leaves nothing behind. Neither is exact while bodies touch: a restored contact often
continues differently, sometimes even with `setPhysicsEngineParameter(deterministicOverlappingPairs=1)`. So an
environment has to declare `metadata["deterministic"] = True`, which `corral check-env` checks; all others are replayed.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from corral.core.gym_env import layers
from corral.snapshot.keeper import CannotSave, Env
from corral.snapshot.keepers.fields import Native


class BulletNative(Native):
    """The files of its clients, as bytes."""

    def __init__(self, env: Env):
        if not env.unwrapped.metadata.get("deterministic"):
            raise CannotSave("PyBullet does not restore contacts exactly, and its metadata lacks deterministic=True")
        self._folder = tempfile.TemporaryDirectory(prefix="corral-bullet-")
        self._file = Path(self._folder.name) / "state.bullet"

    def parts(self, env: Env) -> list[Any]:
        """The clients, set to read a file again even if its name is known."""
        clients = _clients(env)
        for client in clients:
            client.setPhysicsEngineParameter(enableFileCaching=0)
        return clients

    def save(self, env: Env) -> list[bytes]:
        return [self._write(client) for client in _clients(env)]

    def load(self, env: Env, kept: list[bytes]) -> None:
        for client, state in zip(_clients(env), kept, strict=True):
            self._file.write_bytes(state)
            try:
                client.restoreState(fileName=str(self._file))
            except Exception as error:  # raised by PyBullet when the bodies differ
                raise CannotSave(f"PyBullet cannot restore it ({error}); its bodies may differ") from error

    def nbytes(self, kept: list[bytes]) -> int:
        return sum(map(len, kept)) + 100

    def _write(self, client: Any) -> bytes:
        client.saveBullet(str(self._file))
        return self._file.read_bytes()


def bullet_native(env: Env) -> BulletNative | None:
    """For an environment with PyBullet clients; CannotSave if it uses them by client id."""
    pybullet = sys.modules.get("pybullet")
    if pybullet is None:
        return None
    if _clients(env):
        return BulletNative(env)
    modules = [sys.modules.get(type(layer).__module__) for layer in layers(env)]
    if any(value is pybullet for module in modules if module is not None for value in vars(module).values()):
        raise CannotSave("it uses PyBullet by client id; give it a pybullet_utils.bullet_client.BulletClient")
    return None


def _clients(env: Env) -> list[Any]:
    module = sys.modules.get("pybullet_utils.bullet_client")
    found: list[Any] = []
    for value in _values(env) if module is not None else ():
        if module is not None and isinstance(value, module.BulletClient) and not any(value is one for one in found):
            found.append(value)
    return found


def _values(env: Env) -> Iterator[Any]:
    for layer in layers(env):
        for value in list(vars(layer).values()):
            yield value
            if type(value).__module__ != "builtins" and hasattr(type(value), "__dict__"):
                yield from list(getattr(value, "__dict__", {}).values())
