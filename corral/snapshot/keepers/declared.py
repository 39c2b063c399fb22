"""States that environments declare, as bytes that another process or machine can continue from."""

from __future__ import annotations

from typing import Any

from gymnasium.wrappers import OrderEnforcing, PassiveEnvChecker, TimeLimit

from corral.core.encoding import decode, encode
from corral.core.gym_env import layers
from corral.snapshot.find_rng import RngFinder
from corral.snapshot.keeper import CannotSave, Env, FindStart, StateKeeper
from corral.snapshot.rng import RngState, State

# `state_dict()` and `load_state_dict(state)` are about the whole state; `get_key_state()` and `set_key_state(state)`
# about what the author considers enough to continue. `reseed(seed)` beside them, if there is one, replaces random
# numbers that do not come from a generator of NumPy, Python or torch. The outermost wrapper that has them is used, or
# the base environment if only Gymnasium's time limit and checks are around it.
WHOLE, KEY = ("state_dict", "load_state_dict"), ("get_key_state", "set_key_state")
_TRANSPARENT = (TimeLimit, OrderEnforcing, PassiveEnvChecker)


def declares(env: Env, names: tuple[str, str] = WHOLE) -> bool:
    """Whether it has both functions."""
    return _owner(env, names) is not None


def read_declared(env: Env, names: tuple[str, str] = WHOLE) -> State:
    """The state that an environment declares, and Gymnasium's time limits around it."""
    owner = _require_owner(env, names)
    elapsed = [limit._elapsed_steps for limit in time_limits(env)]
    return {"state": getattr(owner, names[0])(), "elapsed": elapsed if owner is not env else []}


def write_declared(env: Env, state: State, seed: int | None, names: tuple[str, str] = WHOLE) -> None:
    """Load what `read_declared` read, after a reset with this seed, if given."""
    owner = _require_owner(env, names)
    if seed is not None:
        env.reset(seed=seed)
    getattr(owner, names[1])(state["state"])
    for limit, elapsed in zip(time_limits(env), state["elapsed"], strict=False):
        limit._elapsed_steps = elapsed


def time_limits(env: Env) -> list[Any]:
    """Gymnasium's time limits among the wrappers of an environment."""
    return [layer for layer in layers(env) if isinstance(layer, TimeLimit)]


def _owner(env: Env, names: tuple[str, str]) -> Any:
    for layer in layers(env):
        if all(callable(getattr(layer, name, None)) for name in names):
            return layer
        if not isinstance(layer, _TRANSPARENT):
            return None
    return None


def _require_owner(env: Env, names: tuple[str, str]) -> Any:
    owner = _owner(env, names)
    if owner is None:
        raise CannotSave(f"it has no {names[0]}() and {names[1]}()")
    return owner


class DeclaredKeeper(StateKeeper):
    """The declared state (arrays, numbers, text, bytes, lists and dicts) and the time limits' counters, as bytes.

    Where the author wrote `reseed`, steps count as random: draws from his own generators cannot be seen.
    """

    level = 4

    def __init__(self, names: tuple[str, str], is_random: bool = False):
        self._names, self.exact, self.is_random = names, names == WHOLE, is_random
        self.capabilities = ("reseed", "export") if self.exact else ("reseed", "export", "key_state")
        self._rng_finder = RngFinder()

    def save(self, env: Env, find_start: FindStart | None = None) -> bytes:
        try:
            return b"".join(encode(read_declared(env, self._names)))
        except TypeError as error:
            raise CannotSave(f"{self._names[0]}() returned {error}") from error

    def load(self, env: Env, kept: bytes) -> None:
        """A key state is loaded after a reset, so that nothing remains of before."""
        try:  # of a copy: an environment may write to its state
            write_declared(env, decode(bytearray(kept)), None if self.exact else 0, self._names)
        except Exception as error:  # the author's functions may raise anything for foreign data
            raise CannotSave(f"these bytes are not a state of this environment ({error!r})") from error

    def reseed(self, env: Env, seed: int) -> None:
        self._rng_finder.reseed(env, seed)
        if self.is_random:
            _owner(env, self._names).reseed(seed)

    def rng_state(self, env: Env) -> list[RngState]:
        return self._rng_finder.read(env)

    def nbytes(self, kept: bytes) -> int:
        return len(kept)


def declared_keeper(env: Env) -> DeclaredKeeper | None:
    """For an environment that declares its state, whole or key."""
    for names in (WHOLE, KEY):
        if declares(env, names):
            return DeclaredKeeper(names, is_random=callable(getattr(_owner(env, names), "reseed", None)))
    return None
