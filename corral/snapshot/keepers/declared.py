"""States that environments declare, as bytes: they go on in another process, or on another machine."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium.wrappers import OrderEnforcing, PassiveEnvChecker, TimeLimit

from corral.core.encoding import decode, encode
from corral.core.gym_env import layers
from corral.snapshot.find_rng import RngFinder
from corral.snapshot.keeper import CannotSave, Env, FindStart, StateKeeper
from corral.snapshot.rng import RngState, State

# States that environments declare: what they say of themselves, by functions of their own. `state_dict()` and
# `load_state_dict(state)` are about the whole state; `get_key_state()` and `set_key_state(state)` about what its
# author thinks enough to go on from. The outermost wrapper that has them is asked, or the environment inside where
# nothing but Gymnasium's time limit and checks is around it.


WHOLE, KEY = ("state_dict", "load_state_dict"), ("get_key_state", "set_key_state")
_TRANSPARENT = (TimeLimit, OrderEnforcing, PassiveEnvChecker)


class NotDeclared(Exception):
    """This environment has no such functions."""


def declares(env: Env, names: tuple[str, str] = WHOLE) -> bool:
    """Whether it has both functions."""
    return _owner(env, names) is not None


def read_declared(env: Env, names: tuple[str, str] = WHOLE) -> State:
    """What an environment says of itself, and Gymnasium's time limits around it."""
    owner = _owner(env, names)
    if owner is None:
        raise NotDeclared
    limits = [layer._elapsed_steps for layer in layers(env) if isinstance(layer, TimeLimit)]
    return {"state": getattr(owner, names[0])(), "elapsed": limits if owner is not env else []}


def write_declared(env: Env, state: State, seed: int | None, names: tuple[str, str] = WHOLE) -> None:
    """Give an environment what `read_declared` read, after a reset with this seed, if there is one."""
    owner = _owner(env, names)
    if owner is None:
        raise NotDeclared
    if seed is not None:
        env.reset(seed=seed)
    getattr(owner, names[1])(state["state"])
    limits = [layer for layer in layers(env) if isinstance(layer, TimeLimit)]
    for layer, elapsed in zip(limits, state["elapsed"], strict=False):
        layer._elapsed_steps = elapsed


def _owner(env: Env, names: tuple[str, str]) -> Any:
    for layer in layers(env):
        if all(callable(getattr(layer, name, None)) for name in names):
            return layer
        if not isinstance(layer, _TRANSPARENT):
            return None
    return None


class DeclaredKeeper(StateKeeper):
    """What the environment's own functions say, as bytes that other environments of the same kind take.

    Values are arrays, numbers, text, bytes, and lists and dicts of them. A time limit's counter goes along.
    """

    level = 4

    def __init__(self, names: tuple[str, str]):
        self._names, self.exact = names, names == WHOLE
        self.capabilities = ("reseed", "export") if self.exact else ("reseed", "export", "key_state")
        self._rng_finder = RngFinder()

    def save(self, env: Env, find_start: FindStart | None = None) -> bytes:
        """Ask it."""
        try:
            return b"".join(encode(read_declared(env, self._names)))
        except TypeError as error:
            raise CannotSave(f"{self._names[0]}() returned {error}") from error

    def load(self, env: Env, kept: bytes) -> None:
        """Tell it. What only counts for its author is told after a reset, so that nothing else is left of before."""
        try:
            write_declared(env, _own_arrays(decode(kept)), None if self.exact else 0, self._names)
        except Exception as error:  # the author's functions may raise anything at what they did not write
            raise CannotSave(f"these bytes are no state of this environment ({error!r})") from error

    def reseed(self, env: Env, seed: int) -> None:
        """Other numbers for the generators that can be found."""
        self._rng_finder.reseed(env, seed)

    def rng_state(self, env: Env) -> list[RngState]:
        """The generators that can be found."""
        return self._rng_finder.read(env)

    def nbytes(self, kept: bytes) -> int:
        """Their number."""
        return len(kept)


def declared_keeper(env: Env) -> DeclaredKeeper | None:
    """Of an environment that declares its state, whole or what counts."""
    return next((DeclaredKeeper(names) for names in (WHOLE, KEY) if declares(env, names)), None)


def _own_arrays(value: Any) -> Any:
    """Copies: what arrived is read-only, and an environment may write to its state."""
    if isinstance(value, np.ndarray):
        return value.copy()
    if isinstance(value, dict):
        return {key: _own_arrays(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_own_arrays(item) for item in value]
    return value
