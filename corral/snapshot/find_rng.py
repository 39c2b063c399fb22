"""Finds the RNGs of an environment wherever they are: in nested objects, lists or closures.

For keepers that do not look into the environment, because they use its own functions or repeat its actions. If an RNG
were missed, a planner would know the random numbers that the environment is going to draw.
"""

from __future__ import annotations

import copy
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from operator import getitem
from typing import Any

import numpy as np
from gymnasium import spaces

from corral.core.gym_env import Env
from corral.snapshot.rng import RngState, is_generator, reseed

Step = tuple[Callable[[Any, Any], Any], Any]  # how to get a part of a value, and by which name or index
Path = tuple[Step, ...]
_CLOSED = (type, types.ModuleType, str, bytes, bytearray, int, float, complex, type(None), np.generic, np.dtype)
_WEAK = (weakref.ref, weakref.ProxyType, weakref.CallableProxyType)
_EVERY_LOOK = 256  # calls between two searches of the whole environment


class RngFinder:
    """RNGs of environments. The paths to them are cached, because searching takes long."""

    def __init__(self) -> None:
        self._paths: weakref.WeakKeyDictionary[Env, list[Path]] = weakref.WeakKeyDictionary()
        self._looks: weakref.WeakKeyDictionary[Env, int] = weakref.WeakKeyDictionary()

    def read(self, env: Env) -> list[RngState]:
        return [RngState(generator) for generator in self._find(env)]

    def reseed(self, env: Env, seed: int) -> None:
        for place, generator in enumerate(self._find(env)):
            reseed(generator, seed, place)

    def _find(self, env: Env) -> list[Any]:
        looks = self._looks[env] = self._looks.get(env, 0) + 1
        paths = self._paths.get(env)
        if paths is not None and looks & (looks - 1) and looks % _EVERY_LOOK:
            found = [_follow(env, path) for path in paths]
            if all(is_generator(type(one)) for one in found):
                return found
        walked = list(_walk(env))
        self._paths[env] = [path for path, _ in walked]
        return [generator for _, generator in walked]


def find_generators_in(value: Any) -> list[Any]:
    """The RNGs in a value, each once."""
    return [generator for _, generator in _walk(value)]


def unshare(env: Env) -> None:
    """Give an environment its own spaces and RNGs: its factory may share them between environments."""
    memo: dict[int, Any] = {}
    for path, _ in list(_walk(env, also=spaces.Space)):
        *way, (get, key) = path
        holder = _follow(env, tuple(way))
        if get is _field:
            vars(holder)[key] = copy.deepcopy(vars(holder)[key], memo)
        elif get is getitem and isinstance(holder, (list, dict)):
            holder[key] = copy.deepcopy(holder[key], memo)


def _walk(root: Any, also: type | tuple[type, ...] = ()) -> Iterator[tuple[Path, Any]]:
    """RNGs, or values of other types, and the paths to them; each path to a holder once."""
    seen = {id(root)}
    alive = [root]  # so that ids stay unique
    ahead: deque[tuple[Path, Any]] = deque([((), root)])
    while ahead:
        path, value = ahead.popleft()
        if path and (is_generator(type(value)) or isinstance(value, also)):
            yield path, value
            continue
        for step, part in _parts(value):
            if type(part) in _WEAK:
                continue
            found = is_generator(type(part)) or isinstance(part, also)
            if isinstance(part, _CLOSED) or (id(part) in seen and not (also and found)):
                continue
            seen.add(id(part))
            alive.append(part)
            ahead.append(((*path, step), part))


def _field(value: Any, name: str) -> Any:
    return vars(value)[name]


def _cell(value: Any, k: int) -> Any:
    return value.__closure__[k].cell_contents


def _parts(value: Any) -> Iterator[tuple[Step, Any]]:
    if isinstance(value, types.FunctionType):
        for k, cell in enumerate(value.__closure__ or ()):
            try:
                yield (_cell, k), cell.cell_contents
            except ValueError:  # nothing has been assigned yet
                continue
        return
    if isinstance(value, (types.MethodType, types.BuiltinMethodType)):
        yield (getattr, "__self__"), value.__self__
        return
    if isinstance(value, dict):
        yield from (((getitem, key), item) for key, item in list(value.items()))
    elif isinstance(value, (list, tuple, deque)):
        yield from (((getitem, k), item) for k, item in enumerate(list(value)))
    elif isinstance(value, np.ndarray):
        if value.dtype.hasobject and value.dtype.fields is None:
            yield from (((getitem, index), value[index]) for index in np.ndindex(value.shape))
        return
    yield from (((_field, name), item) for name, item in list(getattr(value, "__dict__", {}).items()))
    for kind in type(value).__mro__:
        slots = vars(kind).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name != "__dict__" and hasattr(value, name):
                yield (getattr, name), getattr(value, name)


def _follow(value: Any, path: Path) -> Any:
    try:
        for get, key in path:
            value = get(value, key)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError):
        return None
    return value
