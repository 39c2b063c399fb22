"""Deep copies of environments: like `copy.deepcopy`, but faster, and with special treatment of RNGs.

Copying from an environment turns every RNG into an `RngState`, and copying back turns it into an RNG again; both are
listed, so that a planner can reseed a state wherever its RNGs are. Objects whose ids are in the memo are replaced
instead of copied: layers, spaces and native objects of one environment become those of another.
"""

from __future__ import annotations

import copy
import functools
import logging
import operator
import types
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import gymnasium
import numpy as np
from gymnasium.envs.registration import EnvSpec as GymSpec
from gymnasium.utils import EzPickle

from corral.core.types import Array
from corral.snapshot.find_rng import find_generators_in
from corral.snapshot.rng import RngState, is_generator

# Closures, bound methods, caches and weak references also refer to other objects. Without copies of them, a copied
# environment would lead back to the original: `self.rule = lambda action: self.go(action)` of a live environment would,
# in the scratch environment, move the live one.
CopyFn = Callable[["Copier", Any], Any]


class _Named(NamedTuple):
    """In a state: a native method, by its name and owner."""

    owner: Any
    name: str


class _Weak(NamedTuple):
    """In a state: a weak reference or proxy, and its target, which is held because nothing else may hold it."""

    kind: Callable[[Any], Any]
    target: Any


def _function(copier: Copier, value: types.FunctionType) -> types.FunctionType:
    """Cells are always copied: the function, or another that shares the cell, may write to them."""
    defaults, named = copier.copy(value.__defaults__), value.__kwdefaults__
    if value.__closure__ is None and defaults is value.__defaults__ and named is None:
        return value
    closure = None if value.__closure__ is None else tuple([copier.copy(cell) for cell in value.__closure__])
    made = types.FunctionType(value.__code__, value.__globals__, value.__name__, defaults, closure)
    made.__kwdefaults__, made.__qualname__ = copier.copy(named), value.__qualname__
    made.__dict__.update(value.__dict__)
    return made


def _cell(copier: Copier, value: types.CellType) -> types.CellType:
    made = copier.memo[id(value)] = types.CellType()
    try:
        content = value.cell_contents
    except ValueError:  # nothing has been assigned yet
        return made
    made.cell_contents = copier.copy(content)
    return made


def _method(copier: Copier, value: types.MethodType) -> types.MethodType:
    return types.MethodType(copier.copy(value.__func__), copier.copy(value.__self__))


def _native_method(copier: Copier, value: types.BuiltinMethodType) -> Any:
    owner = value.__self__
    if owner is None or isinstance(owner, (types.ModuleType, type)):  # a function of a module or a class
        return value
    return _Named(copier.copy(owner), value.__name__)


def _named(copier: Copier, value: _Named) -> Any:
    return getattr(copier.copy(value.owner), value.name)


def _cached(copier: Copier, value: Any) -> Any:
    """With an empty cache, since its contents belong to the original function."""
    wrapped = copier.copy(value.__wrapped__)
    return value if wrapped is value.__wrapped__ else functools.lru_cache(**value.cache_parameters())(wrapped)


def _reference(copier: Copier, value: weakref.ref[Any]) -> Any:
    target = value()
    return value if target is None else _Weak(weakref.ref, copier.copy(target))


def _proxy(copier: Copier, value: Any) -> Any:
    return _Weak(weakref.proxy, copier.copy(value.__reduce_ex__.__self__))  # the target's method


def _weak(copier: Copier, value: _Weak) -> Any:
    target = copier.copy(value.target)
    copier.held.append(target)
    return value.kind(target)


def _refused(copier: Copier, value: Any) -> Any:
    raise TypeError("its own copy shares what it holds weakly")


ATOMS: set[type] = {
    type(None), bool, int, float, complex, str, range, type, types.ModuleType, types.EllipsisType, property,
    np.float64, np.float32, np.int64, np.int32, np.bool_,
}  # fmt: skip
"""Immutable types, whose values are not copied; grows as types are seen."""
_SHARED = (type, np.generic, np.dtype, np.ufunc, GymSpec, logging.Logger)
_RENDERING = frozenset({"pygame", "pyglet", "matplotlib", "glfw", "OpenGL"})
_RENDERERS = "gymnasium.envs.mujoco.mujoco_rendering"
_OBJECT_BYTES, _ITEM_BYTES = 100, 40


def has_slots(kind: type) -> bool:
    """Whether a type keeps fields outside its objects' dicts."""
    return any(vars(base).get("__slots__") for base in kind.__mro__)


_IS_RENDERING: dict[type, bool] = {}


def is_rendering(kind: type) -> bool:
    """Whether a type is a handle for drawing or display, which is not part of a state."""
    if kind not in _IS_RENDERING:
        _IS_RENDERING[kind] = kind.__module__.partition(".")[0] in _RENDERING or kind.__module__ == _RENDERERS
    return _IS_RENDERING[kind]


class Copier:
    """One copy of any number of values: an object shared by two of them is shared by the copies."""

    __slots__ = ("held", "memo", "nbytes", "rngs")

    def __init__(self, memo: dict[int, Any]):
        self.memo, self.nbytes = memo, 0
        self.rngs: list[Any] = []  # each RNG found, as it is in the copies
        self.held: list[Any] = []  # targets that the copies may only refer to weakly

    def copy(self, value: Any) -> Any:
        kind = type(value)
        if kind in ATOMS:
            return value
        made = self.memo.get(id(value), self)
        if made is not self:
            return made
        how = _HOW.get(kind)
        if how is None:
            how = _HOW[kind] = _find_copier(kind)
        made = how(self, value)
        if made is not value:
            self.memo[id(value)] = made
        return made


def _same(copier: Copier, value: Any) -> Any:
    return value


def _bytes(copier: Copier, value: bytes) -> bytes:
    copier.nbytes += len(value)  # possibly new at every step: a picture
    return value


def _array(copier: Copier, value: Array) -> Array:
    if value.dtype.hasobject:
        made = np.empty_like(value)
        copier.memo[id(value)] = made
        made.ravel(order="K")[:] = [copier.copy(item) for item in value.ravel(order="K")]
        return made
    whole = value.base
    if type(whole) is np.ndarray and not whole.dtype.hasobject:  # a view of an array that others may hold as well
        return _part(copier.copy(whole), whole, value)
    copier.nbytes += value.nbytes + _OBJECT_BYTES
    return value.copy(order="K")


def _part(made: Array, whole: Array, part: Array) -> Array:
    """The view of `made`, the copy of `whole`, that corresponds to `part` of `whole`."""
    offset = part.__array_interface__["data"][0] - whole.__array_interface__["data"][0]
    memory = made.ravel(order="K").view(np.uint8)
    return np.ndarray(part.shape, part.dtype, memory, offset, part.strides)


def _list(copier: Copier, value: list[Any]) -> list[Any]:
    made: list[Any] = []
    copier.memo[id(value)] = made
    copier.nbytes += _OBJECT_BYTES + _ITEM_BYTES * len(value)
    made += [item if type(item) in ATOMS else copier.copy(item) for item in value]
    return made


def _tuple(copier: Copier, value: tuple[Any, ...]) -> tuple[Any, ...]:
    made = tuple([item if type(item) in ATOMS else copier.copy(item) for item in value])
    if all(map(operator.is_, made, value)):
        return value
    copier.nbytes += _OBJECT_BYTES + _ITEM_BYTES * len(value)
    again: tuple[Any, ...] = copier.memo.get(id(value), made)  # one that contains itself
    return again


def _dict(copier: Copier, value: dict[Any, Any]) -> dict[Any, Any]:
    made: dict[Any, Any] = {}
    copier.memo[id(value)] = made
    copier.nbytes += _OBJECT_BYTES + 2 * _ITEM_BYTES * len(value)
    for key, item in value.items():
        made[copier.copy(key)] = item if type(item) in ATOMS else copier.copy(item)
    return made


def _generator(copier: Copier, value: Any) -> RngState:
    state = RngState(value)
    copier.rngs.append(state)
    copier.nbytes += state.nbytes
    return state


def _rng_state(copier: Copier, value: RngState) -> Any:
    made = value.alive()
    copier.rngs.append(made)
    return made


def _plain(copier: Copier, value: Any) -> Any:
    made = object.__new__(type(value))
    copier.memo[id(value)] = made
    copier.nbytes += _OBJECT_BYTES + 2 * _ITEM_BYTES * len(value.__dict__)
    fields = made.__dict__
    for name, item in value.__dict__.items():
        fields[name] = item if type(item) in ATOMS else copier.copy(item)
    return made


def _by_deepcopy(copier: Copier, value: Any) -> Any:
    made = copy.deepcopy(value, copier.memo)
    copier.nbytes += _OBJECT_BYTES + int(getattr(made, "nbytes", 0))
    copier.rngs += [one for one in find_generators_in(made) if not any(one is other for other in copier.rngs)]
    return made


def _reduced(copier: Copier, value: Any) -> Any:
    reduced = value.__reduce_ex__(4)
    if isinstance(reduced, str):  # a module's global of this name
        return value
    build, arguments, state, items, pairs = (*reduced, None, None, None)[:5]
    made = build(*[copier.copy(argument) for argument in arguments])
    copier.memo[id(value)] = made
    copier.nbytes += _OBJECT_BYTES
    if state is not None:
        state = copier.copy(state)
        if hasattr(made, "__setstate__"):
            made.__setstate__(state)
        else:
            state, slots = state if isinstance(state, tuple) else (state, {})
            if state:
                made.__dict__.update(state)
            for name, item in slots.items():
                setattr(made, name, item)
    for item in items or ():
        made.append(copier.copy(item))
        copier.nbytes += _ITEM_BYTES
    for key, item in pairs or ():
        made[copier.copy(key)] = copier.copy(item)
    return made


_HOW: dict[type, CopyFn] = {
    bytes: _bytes, np.ndarray: _array, list: _list, tuple: _tuple, dict: _dict, RngState: _rng_state,
    types.FunctionType: _function, types.CellType: _cell, types.MethodType: _method,
    types.BuiltinMethodType: _native_method, _Named: _named, type(functools.lru_cache(len)): _cached,
    weakref.ref: _reference, weakref.ProxyType: _proxy, weakref.CallableProxyType: _proxy, _Weak: _weak,
    weakref.WeakValueDictionary: _refused, weakref.WeakKeyDictionary: _refused,
}  # fmt: skip


def _find_copier(kind: type) -> CopyFn:
    if issubclass(kind, _SHARED):
        ATOMS.add(kind)
        return _same
    if is_generator(kind):
        return _generator
    if is_rendering(kind):
        return _same
    if "__deepcopy__" in dir(kind):
        return _by_deepcopy
    has_fields = kind.__dictoffset__ != 0 and not has_slots(kind)
    python = kind.__new__ is object.__new__ and has_fields
    default = all(
        getattr(kind, name, None) is getattr(object, name, None)
        for name in ("__reduce_ex__", "__reduce__", "__getstate__", "__setstate__")
    )
    # Environments, and objects pickled by their constructor arguments, have changed since they were built.
    if python and (default or issubclass(kind, (gymnasium.Env, EzPickle))):
        return _plain
    return _reduced
