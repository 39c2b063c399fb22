"""Environments with the interface of gym before 0.26: `old_gym` makes Gymnasium environments of them.

```python
# my_env.py
from gymnasium import spaces

class MyEnv:                                   # inherits nothing; reset() and step() as in old gym
    def reset(self): ...                       # -> obs
    def step(self, action): ...                # -> obs, reward, done, info

Adapted = corral.envs.old_gym(MyEnv, observation_space=spaces.Box(-1, 1, (3,)), action_space=spaces.Discrete(2))
# corral train ppo --env my_env:Adapted
```
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces as gs

from corral.core.errors import UserError
from corral.core.gym_env import unpack_step

_log = logging.getLogger("corral.envs")
_announced: set[str] = set()


def old_gym(build: Callable[..., Any], *, observation_space: Any = None, action_space: Any = None) -> OldGym:
    """A factory of Gymnasium environments from a class of the old gym interface, for `make_vec` or as `module:NAME`.

    `reset()` may return the observation alone, and `step()` four values; with `done`, an episode counts as terminated,
    or as truncated if `info["TimeLimit.truncated"]` is true. Seeds are passed to `reset(seed=...)` or `seed()`, if the
    class has one of them.

    Args:
        build: the class, or a function that makes one environment; keyword arguments are passed on.
        observation_space: a space of Gymnasium or gym; default: the environment's own.
        action_space: likewise.
    """
    if not callable(build):
        raise UserError(f"old_gym takes a class or function, got {build!r}: pass old_gym(MyEnv, ...).")
    return OldGym(build, *(None if space is None else _convert(space) for space in (observation_space, action_space)))


@dataclass(frozen=True)
class OldGym:
    """A factory of environments with the old interface, adapted to Gymnasium's."""

    build: Callable[..., Any]
    observation_space: gs.Space[Any] | None = None
    action_space: gs.Space[Any] | None = None

    @property
    def name(self) -> str:
        return getattr(self.build, "__qualname__", type(self.build).__name__)

    def announce(self) -> None:
        """Say once what is assumed about `done`."""
        if self.name not in _announced:
            _announced.add(self.name)
            _log.info(
                "%s is adapted from the old gym interface: where step() returns four values, done counts as "
                'terminated, or as truncated if info["TimeLimit.truncated"] is true; set that where a time limit ends '
                "an episode",
                self.name,
            )

    def __call__(self, render_mode: str | None = None, **kwargs: Any) -> gymnasium.Env[Any, Any]:
        return OldGymEnv(self.build(**kwargs), self, render_mode)


class OldGymEnv(gymnasium.Env[Any, Any]):
    """One environment with the old interface, as Gymnasium expects it."""

    def __init__(self, old: Any, factory: OldGym, render_mode: str | None = None):
        self.old, self._name, self.render_mode = old, factory.name, render_mode
        self.observation_space = self._space("observation_space", factory.observation_space)
        self.action_space = self._space("action_space", factory.action_space)
        metadata = getattr(old, "metadata", None) or {}
        self.metadata = {
            "render_modes": [*(metadata.get("render_modes") or metadata.get("render.modes") or ["human", "rgb_array"])],
            "render_fps": metadata.get("render_fps") or metadata.get("video.frames_per_second") or 30,
        }
        self._reset_takes_seed = _takes(old.reset, "seed")
        self.seedless = not self._reset_takes_seed and not callable(getattr(old, "seed", None))

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        if seed is not None and not self._reset_takes_seed and callable(getattr(self.old, "seed", None)):
            self.old.seed(seed % 2**31)  # many pass it on to a generator that takes 32 bits
        result = self.old.reset(seed=seed) if self._reset_takes_seed else self.old.reset()
        pair = isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], dict)
        if pair and not isinstance(self.observation_space, gs.Tuple):
            return result  # type: ignore[no-any-return]
        return result, {}

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        result = self.old.step(action)
        if not (isinstance(result, tuple) and len(result) == 4):
            return unpack_step(result, self._name)
        obs, reward, done, info = result
        info = info or {}  # None, in some classes
        truncated = bool(done and isinstance(info, Mapping) and info.get("TimeLimit.truncated", False))
        return obs, reward, bool(done) and not truncated, truncated, info

    def render(self) -> Any:
        if not callable(getattr(self.old, "render", None)):
            raise UserError(f"{self._name} has no render(): add one that returns uint8 [height, width, 3].")
        if _takes(self.old.render, "mode"):
            return self.old.render(mode=self.render_mode or "rgb_array")
        return self.old.render()

    def close(self) -> None:
        if callable(getattr(self.old, "close", None)):
            self.old.close()

    def _space(self, what: str, given: gs.Space[Any] | None) -> gs.Space[Any]:
        own = getattr(self.old, what, None)
        if given is None and own is None:
            raise UserError(f"{self._name} has no {what}: pass one, old_gym({self._name}, {what}=...).")
        try:
            return _convert(own) if given is None else given
        except UserError as error:
            raise UserError(f"{str(error).removesuffix('.')}, old_gym({self._name}, {what}=...).") from None


def _takes(method: Callable[..., Any], argument: str) -> bool:
    try:
        parameters = inspect.signature(method).parameters
    except (TypeError, ValueError):  # a builtin
        return False
    return argument in parameters


def _convert(space: Any) -> gs.Space[Any]:
    """A space of Gymnasium, from one, from a space of gym, or from a class that imitates one, such as `BoxSpace`."""
    if isinstance(space, gs.Space):
        return space
    kind = type(space).__name__.removesuffix("Space")
    if kind == "Box":
        shape = getattr(space, "shape", np.shape(space.low))
        low, high = (np.full(shape, bound, space.dtype) for bound in (space.low, space.high))
        return gs.Box(low, high, dtype=space.dtype)
    if kind == "Discrete":
        return gs.Discrete(int(space.n), start=int(getattr(space, "start", 0)))
    if kind == "MultiDiscrete":
        return gs.MultiDiscrete(space.nvec)
    if kind == "MultiBinary":
        return gs.MultiBinary(space.n)
    if kind == "Tuple":
        return gs.Tuple([_convert(inner) for inner in space.spaces])
    if kind == "Dict":
        return gs.Dict({key: _convert(inner) for key, inner in space.spaces.items()})
    raise UserError(f"old_gym cannot convert the space {space!r}: pass a space of gymnasium.spaces.")
