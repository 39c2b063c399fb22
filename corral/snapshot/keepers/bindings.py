"""Copies of what reaches other objects without having fields: closures, bound methods, caches and weak references.

Left as they are they would lead from a copy of an environment back to the environment itself: `self.rule = lambda
action: self.go(action)` of the environment that acts, in the one that a planner steps, moves the one that acts.
"""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from corral.snapshot.keepers.deepcopy import Copier

Way = Callable[["Copier", Any], Any]


class _Named:
    """In a state: a native method, by its name and whose it is."""

    __slots__ = ("name", "owner")

    def __init__(self, owner: Any, name: str):
        self.owner, self.name = owner, name


class _Weak:
    """In a state: a weak reference, or a proxy, and what it is to. That is held, since nothing else may hold it."""

    __slots__ = ("kind", "target")

    def __init__(self, kind: Callable[[Any], Any], target: Any):
        self.kind, self.target = kind, target


def _function(copier: Copier, value: types.FunctionType) -> types.FunctionType:
    """Cells are copied whatever is in them: what is in one may be written by the function, or by another with it."""
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
    if owner is None or isinstance(owner, (types.ModuleType, type)):  # a function, of a module or a class
        return value
    return _Named(copier.copy(owner), value.__name__)


def _named(copier: Copier, value: _Named) -> Any:
    return getattr(copier.copy(value.owner), value.name)


def _cached(copier: Copier, value: Any) -> Any:
    """With nothing in its cache, which belongs to the function that it was."""
    wrapped = copier.copy(value.__wrapped__)
    return value if wrapped is value.__wrapped__ else functools.lru_cache(**value.cache_parameters())(wrapped)


def _reference(copier: Copier, value: weakref.ref[Any]) -> Any:
    target = value()
    return value if target is None else _Weak(weakref.ref, copier.copy(target))


def _proxy(copier: Copier, value: Any) -> Any:
    return _Weak(weakref.proxy, copier.copy(value.__reduce_ex__.__self__))  # what it is to answers for it


def _weak(copier: Copier, value: _Weak) -> Any:
    target = copier.copy(value.target)
    copier.held.append(target)
    return value.kind(target)


def _refused(copier: Copier, value: Any) -> Any:
    raise TypeError("its own copy shares what it holds weakly")


BINDINGS: dict[type, Way] = {
    types.FunctionType: _function, types.CellType: _cell, types.MethodType: _method,
    types.BuiltinMethodType: _native_method, _Named: _named, type(functools.lru_cache(len)): _cached,
    weakref.ref: _reference, weakref.ProxyType: _proxy, weakref.CallableProxyType: _proxy, _Weak: _weak,
    weakref.WeakValueDictionary: _refused, weakref.WeakKeyDictionary: _refused,
}  # fmt: skip
"""How values of these types are copied."""
