"""Planning in a cheaper stand-in environment whose state is copied from the live one before every action."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from gymnasium.wrappers import TimeLimit

from corral.core.errors import UserError
from corral.core.gym_env import build_env, claim, layers
from corral.core.types import Array
from corral.envs.backends.local import LocalVecEnv
from corral.envs.resolve import EnvLike, resolve
from corral.envs.vec_env import VecEnv
from corral.snapshot.env_states import EnvStates
from corral.snapshot.keeper import Env, EpisodeStart
from corral.snapshot.keepers.choose import make_scratch
from corral.snapshot.keepers.declared import KEY, WHOLE, declares, read_declared, write_declared
from corral.snapshot.live_env import LiveEnv

Transfer = Callable[[Env], Any]
"""Returns the state that a stand-in takes from the live environment."""


def stand_in_states(env: EnvLike, vec: VecEnv, transfer: Transfer | None, memory_mb: float) -> EnvStates:
    """States of a stand-in for the environments of `vec`.

    The stand-in has `set_key_state(state)` or `load_state_dict(state)`. It receives the result of `transfer` for the
    live environment, or the live one's `get_key_state()` or `state_dict()`; time limits are taken over as well.
    """
    if not isinstance(vec, LocalVecEnv):
        raise UserError("A stand-in needs the live environments in this process: use backend=local.")
    resolved = resolve(env)
    built, spec = build_env(resolved.factory, resolved.name)
    if (spec.observation.digest, spec.action.digest) != (vec.spec.observation.digest, vec.spec.action.digest):
        built.close()
        raise UserError(
            f"{resolved.name} cannot stand in for {vec.spec.name}: their observation and action spaces must be equal."
        )
    names = next((names for names in (KEY, WHOLE) if declares(built, names)), None)
    if names is None:
        built.close()
        raise UserError(
            f"{resolved.name} cannot be used as a stand-in: implement set_key_state(state) and get_key_state()."
        )
    live = [_StandInEnv(vec.live_env(i), built, names, transfer or _declared) for i in range(vec.num_envs)]
    claim(built, live[0])
    make = partial(make_scratch, resolved.factory)
    return EnvStates(vec.spec, live, [make] * vec.num_envs, memory_mb)


class _StandInEnv(LiveEnv):
    """The stand-in in the place of a live environment."""

    def __init__(self, real: LiveEnv, stand_in: Env, names: tuple[str, str], transfer: Transfer):
        self._real, self._stand_in, self._names, self._transfer = real, stand_in, names, transfer

    @property
    def env(self) -> Env:
        """The stand-in, in the current state of the environment."""
        real = self._real.env
        elapsed = [layer._elapsed_steps for layer in layers(real) if isinstance(layer, TimeLimit)]
        write_declared(self._stand_in, {"state": self._transfer(real), "elapsed": elapsed}, 0, self._names)
        return self._stand_in

    @property
    def over(self) -> bool:
        return self._real.over

    def record(self) -> None:
        """A stand-in takes over states; it does not replay actions."""
        raise UserError("States of this stand-in cannot be copied: give it state_dict() and load_state_dict(state).")

    def last_obs(self) -> list[Array] | None:
        return self._real.last_obs()

    def episode_start(self) -> EpisodeStart | None:
        return None

    def on_load(self, obs: list[Array] | None, over: bool, start: EpisodeStart | None) -> None:
        """Impossible: states of a stand-in are not states of the live environment."""
        raise UserError("A state of a stand-in cannot be loaded into the live environment.")


def _declared(env: Env) -> Any:
    for names in (KEY, WHOLE):
        if declares(env, names):
            return read_declared(env, names)["state"]
    raise UserError(
        f"{type(env.unwrapped).__name__} does not define the state that a stand-in takes over: give it "
        "get_key_state(), or pass transfer=, a function of the environment."
    )
