"""How the state of a Python environment is kept: by its own functions, which gives bytes, or by copying it."""

from __future__ import annotations

import copy
import pickle
from abc import ABC, abstractmethod
from typing import Any

import gymnasium
import numpy as np

from corral.encoding import decode, encode
from corral.envs.build import EnvFactory
from corral.envs.declared import KEY, WHOLE, declares, read_declared, write_declared

Env = gymnasium.Env[Any, Any]
_UNKNOWN_BYTES = 1 << 16  # of an environment whose size cannot be told


class CannotKeep(Exception):
    """This environment's state cannot be kept, or these bytes are no state of it."""


class Keeping(ABC):
    """A way to keep states. `level` and `capabilities` are what HELLO says of it."""

    level: int
    exact = True
    capabilities: tuple[str, ...] = ()

    @abstractmethod
    def keep(self, env: Env) -> Any:
        """What the environment's state is kept as; it does not change with the environment."""

    @abstractmethod
    def revive(self, kept: Any) -> Env:
        """An environment in that state, to step."""

    @abstractmethod
    def nbytes(self, kept: Any) -> int:
        """What it takes to keep."""


class Copies(Keeping):
    """A deep copy of the environment, wrappers and generators included."""

    level = 2
    capabilities = ("reseed", "rng_in_state")

    def __init__(self) -> None:
        self._bytes: int | None = None

    def keep(self, env: Env) -> Any:
        """A copy that is never stepped."""
        try:
            return copy.deepcopy(env)
        except Exception as error:
            raise CannotKeep(f"this environment cannot be copied ({error!r})") from error

    def revive(self, kept: Any) -> Env:
        """A copy of the copy."""
        env: Env = copy.deepcopy(kept)
        return env

    def nbytes(self, kept: Any) -> int:
        """Measured once, by pickling it and throwing that away."""
        if self._bytes is None:
            try:
                self._bytes = len(pickle.dumps(kept))
            except Exception:
                self._bytes = _UNKNOWN_BYTES
        return self._bytes


class OwnFunctions(Keeping):
    """What the environment's own functions say, as bytes that other simulators of the same environment take.

    Values are arrays, numbers, text, bytes, and lists and dicts of them. A time limit's counter goes along.
    """

    level = 4

    def __init__(self, factory: EnvFactory, names: tuple[str, str]):
        self._factory, self._names, self.exact = factory, names, names == WHOLE
        self.capabilities = ("export",) if self.exact else ("export", "key_state")

    def keep(self, env: Env) -> bytes:
        """Ask it."""
        try:
            return b"".join(encode(read_declared(env, self._names)))
        except TypeError as error:
            raise CannotKeep(f"{self._names[0]}() returned {error}") from error

    def revive(self, kept: bytes) -> Env:
        """Tell another one."""
        env = self._factory()
        try:
            write_declared(env, _own_arrays(decode(kept)), 0, self._names)
        except Exception as error:  # the author's functions may raise anything at what they did not write
            env.close()
            raise CannotKeep(f"these bytes are no state of this environment ({error!r})") from error
        return env

    def nbytes(self, kept: bytes) -> int:
        """Their number."""
        return len(kept)


def choose_keeping(factory: EnvFactory) -> Keeping | None:
    """The best way for this environment, None where there is none."""
    env = factory()
    try:
        env.reset(seed=0)
        for names in (WHOLE, KEY):
            if declares(env, names):
                return OwnFunctions(factory, names)
        copies = Copies()
        try:
            copies.keep(env)
        except CannotKeep:
            return None
        return copies
    finally:
        env.close()


def _own_arrays(value: Any) -> Any:
    """Copies: what arrived is read-only, and an environment may write to its state."""
    if isinstance(value, np.ndarray):
        return value.copy()
    if isinstance(value, dict):
        return {key: _own_arrays(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_own_arrays(item) for item in value]
    return value
