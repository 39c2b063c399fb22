"""States of environments that are Python objects: the fields of every wrapper and of the environment inside.

Fields that never change are not copied but compared by identity with their first values, so that a state of CartPole in
three wrappers is a few numbers. Native objects of an environment are kept by a `Native`.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from typing import Any, NamedTuple

from gymnasium import spaces

from corral.core.gym_env import layers, only_renders
from corral.snapshot.keeper import CannotSave, Env, FindStart, StateKeeper
from corral.snapshot.keepers.deepcopy import ATOMS, Copier, has_slots, is_rendering
from corral.snapshot.rng import RngState, inner_spaces, reseed

Fields = dict[str, Any]
# What an environment is, how it was built and how it is shown; `step` and `reset` if it is watched.
_NO_STATE = frozenset(
    {"spec", "_cached_spec", "render_mode", "metadata", "_metadata", "_saved_kwargs", "_ezpickle_args",
     "_ezpickle_kwargs", "step", "reset"}
)  # fmt: skip
# Tables that Gymnasium's toy environments never write to; copying them takes milliseconds.
_CONSTANT = {"gymnasium.envs.toy_text": frozenset({"P", "desc", "initial_state_distrib", "locs", "locs_colors"})}
_NO_NAMES: frozenset[str] = frozenset()
_NOTHING = object()


class Native(ABC):
    """The native objects of an environment, and how their state is kept."""

    is_random = False

    @abstractmethod
    def parts(self, env: Env) -> list[Any]:
        """The objects, in the same order in every environment of the kind."""

    @abstractmethod
    def save(self, env: Env) -> Any: ...

    @abstractmethod
    def load(self, env: Env, kept: Any) -> None: ...

    @abstractmethod
    def nbytes(self, kept: Any) -> int: ...

    def reseed(self, env: Env, seed: int) -> None:  # noqa: B027 - most have none
        """Give it other random numbers, if it draws any."""


class _Layer(NamedTuple):
    """Fields of one layer: those that changed since they were first seen, copies of the others, and all names."""

    changed: Fields
    copies: Fields
    names: frozenset[str]


class _FieldsState:
    __slots__ = ("layers", "native", "nbytes", "rngs", "space_rngs")

    def __init__(self, layers: list[_Layer], copier: Copier, space_rngs: dict[str, RngState], native: Any):
        self.layers, self.rngs, self.space_rngs, self.native = layers, copier.rngs, space_rngs, native
        own = sum(250 + 60 * len(layer.changed) + 60 * len(layer.copies) for layer in layers)
        self.nbytes = own + copier.nbytes + sum(state.nbytes for state in space_rngs.values())


class _EnvStructure:
    """The objects of one environment, without the outermost layer, so that it does not keep the environment alive."""

    def __init__(self, env: Env, native: Native | None, base: bool):
        outer, *inner = layers(env)
        self.parts = parts = [] if native is None else native.parts(env)
        self.fixed = {str(k): part for k, part in enumerate([*inner, *parts], 1)}
        """Objects that are not copied, by names that are the same in every such environment."""
        self.inner = inner if base else inner[:-1]
        self.spaces: list[tuple[str, Any]] = []
        self.own: list[frozenset[str]] = []  # fields of each layer that are never written
        self._found: list[tuple[int, str, Any]] = []  # their values, except the environment itself
        inside = {id(part) for part in (outer, *self.fixed.values())}
        for depth, layer in enumerate((outer, *self.inner)):
            own = set(_NO_STATE)
            for name, value in vars(layer).items():
                if isinstance(value, spaces.Space):
                    self.spaces += inner_spaces(f"{depth}.{name}", value)
                elif id(value) not in inside:
                    continue
                own.add(name)
                if value is not outer:
                    self._found.append((depth, name, value))
            self.own.append(frozenset(own | vars(layer).keys() if only_renders(layer) else own))
        self.fixed.update(self.spaces)
        self.rngs: list[Any] = []  # RNGs created by the last loaded state
        self.held: list[Any] = []  # weakly referenced objects of that state

    def is_still_of(self, env: Env, native: Native | None) -> bool:
        """Whether the environment's objects are unchanged; a reset may replace the inner environment or its spaces."""
        fields = [vars(env), *map(vars, self.inner)]
        parts = [] if native is None else native.parts(env)
        return all(fields[depth].get(name) is value for depth, name, value in self._found) and all(
            here is there for here, there in zip(parts, self.parts, strict=False)
        )

    def generators(self) -> list[tuple[str, Any]]:
        return [(name, space._np_random) for name, space in self.spaces if space._np_random is not None]


class FieldsKeeper(StateKeeper):
    """States as copies of fields, RNGs included; `native` keeps the rest. Without `base`, of the wrappers alone."""

    level = 2
    capabilities = ("reseed", "rng_in_state")

    def __init__(self, native: Native | None = None, *, base: bool = True):
        self._native, self._base = native, base
        self.is_random = native is not None and native.is_random
        self._kinds: list[str] = []  # of the layers, once one environment has been seen
        self._first: list[Fields] = []  # unchanged so far, of each layer
        self._names: list[frozenset[str]] = []  # of each layer, as last seen
        self._marks: dict[str, Any] = {}  # placeholders in states for the objects that are not copied
        self._anatomies: weakref.WeakKeyDictionary[Env, _EnvStructure] = weakref.WeakKeyDictionary()

    def save(self, env: Env, find_start: FindStart | None = None) -> _FieldsState:
        structure = self._structure(env)
        memo = {id(part): self._marks[name] for name, part in structure.fixed.items()}
        memo[id(env)] = self._marks["0"]
        copier = Copier(memo)
        kept = [
            self._keep_layer(copier, depth, layer, structure) for depth, layer in enumerate((env, *structure.inner))
        ]
        space_rngs = {name: RngState(generator) for name, generator in structure.generators()}
        return _FieldsState(kept, copier, space_rngs, None if self._native is None else self._native.save(env))

    def load(self, env: Env, kept: _FieldsState) -> None:
        structure = self._structure(env)
        memo = {id(self._marks[name]): part for name, part in structure.fixed.items()}
        memo[id(self._marks["0"])] = env
        copier = Copier(memo)
        for depth, layer in enumerate((env, *structure.inner)):
            self._put_layer(copier, vars(layer), self._first[depth], structure.own[depth], kept.layers[depth])
        structure.rngs, structure.held = copier.rngs, copier.held
        if kept.space_rngs:
            for name, space in structure.spaces:
                if name in kept.space_rngs:
                    kept.space_rngs[name].write(space.np_random)
        if self._native is not None:
            self._native.load(env, kept.native)

    def reseed(self, env: Env, seed: int) -> None:
        structure = self._anatomies[env]
        for place, generator in enumerate([*structure.rngs, *(one for _, one in structure.generators())]):
            reseed(generator, seed, place)
        if self._native is not None:
            self._native.reseed(env, seed)

    def rng_state(self, env: Env) -> list[RngState]:
        structure = self._anatomies[env]
        return [RngState(generator) for generator in [*structure.rngs, *(one for _, one in structure.generators())]]

    def nbytes(self, kept: _FieldsState) -> int:
        return kept.nbytes + (0 if self._native is None else self._native.nbytes(kept.native))

    def _structure(self, env: Env) -> _EnvStructure:
        found = self._anatomies.get(env)
        if found is None or not found.is_still_of(env, self._native):
            found = _EnvStructure(env, self._native, self._base)
            self._compare(env, found)
            self._anatomies[env] = found
        return found

    def _compare(self, env: Env, structure: _EnvStructure) -> None:
        all_layers = [env, *structure.inner]
        for layer in all_layers:
            if has_slots(type(layer)):
                raise CannotSave(f"{type(layer).__name__} has __slots__, which are not supported")
        if not self._kinds:
            self._kinds = [type_name(layer) for layer in all_layers]
            self._marks = {name: object() for name in ("0", *structure.fixed)}
            self._names = [frozenset(vars(layer)) for layer in all_layers]
            self._first = [
                {name: value for name, value in vars(layer).items() if type(value) in ATOMS and name not in own}
                for layer, own in zip(all_layers, structure.own, strict=True)
            ]
        same = [type_name(layer) for layer in all_layers] == self._kinds
        if not same or self._marks.keys() != {"0", *structure.fixed}:
            raise CannotSave("this environment is not wrapped or built like that of the state")

    def _keep_layer(self, copier: Copier, depth: int, layer: Any, structure: _EnvStructure) -> _Layer:
        fields, own, first = vars(layer), structure.own[depth], self._first[depth]
        changed, copies = {}, {}
        constant = _CONSTANT.get(type(layer).__module__.rpartition(".")[0], _NO_NAMES)
        for name, value in fields.items():
            if value is first.get(name, _NOTHING) or name in own:
                continue
            kind = type(value)
            if kind in ATOMS or name in constant:
                changed[name] = value
            elif is_rendering(kind):
                first.pop(name, None)  # each environment has its own
            else:
                try:
                    copies[name] = copier.copy(value)
                except Exception as error:
                    what = f"{type(layer).__name__}.{name}, a {kind.__name__},"
                    raise CannotSave(f"{what} cannot be copied ({error!r})") from error
        if fields.keys() != self._names[depth]:
            self._names[depth] = frozenset(fields)
        return _Layer(changed, copies, self._names[depth])

    @staticmethod
    def _put_layer(copier: Copier, fields: Fields, first: Fields, own: frozenset[str], state: _Layer) -> None:
        fields.update(first)
        fields.update(state.changed)
        for name, value in state.copies.items():
            if type(value) is RngState and id(value) not in copier.memo:
                there = fields.get(name)
                if value.fits(there) and not any(there is one for one in copier.rngs):
                    value.write(there)
                    copier.memo[id(value)] = there
                    copier.rngs.append(there)
                    continue
            fields[name] = copier.copy(value)
        if not fields.keys() <= state.names:
            for name in [name for name in fields if name not in state.names and name not in own]:
                del fields[name]


def type_name(layer: Any) -> str:
    """Its type by name, since a function that defines a class makes a new one at every call."""
    return f"{type(layer).__module__}.{type(layer).__qualname__}"
