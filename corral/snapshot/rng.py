"""The RNGs of an environment, and of a process: read and set, without pickle."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from gymnasium import spaces

from corral.core import seeding
from corral.core.errors import EnvFailed, UserError
from corral.core.gym_env import Env, layers
from corral.core.types import EnvSpec

State = dict[str, Any]
Generators = dict[str, Any]
_KINDS = (np.random.Generator, np.random.RandomState, random.Random)
_BIT_GENERATORS = (np.random.PCG64, np.random.PCG64DXSM, np.random.MT19937, np.random.Philox, np.random.SFC64)


def find_generators(env: Env) -> Generators:
    """All RNGs that an environment, its wrappers and their spaces hold, by name."""
    found: Generators = {}
    for depth, layer in enumerate(layers(env)):
        for name, value in vars(layer).items():
            if is_generator(type(value)):
                found[f"{depth}.{name}"] = value
    return found | find_space_generators(env)


def find_space_generators(env: Env) -> Generators:
    """Those of `find_generators` that belong to spaces."""
    found: Generators = {}
    for depth, layer in enumerate(layers(env)):
        for name, value in vars(layer).items():
            if isinstance(value, spaces.Space):
                for path, space in inner_spaces(f"{depth}.{name}", value):
                    if space._np_random is not None:  # the property would make one
                        found[path] = space._np_random
    return found


def read_generators(found: Generators) -> State:
    """The states of these RNGs."""
    return {name: read_generator(generator) for name, generator in found.items()}


def write_generators(found: Generators, saved: State) -> None:
    """Set the RNGs, in place, to what `read_generators` read; those that do not exist yet are skipped."""
    for name, generator in found.items():
        if name in saved:
            write_generator(generator, saved[name])


def read_global_generators() -> State:
    """States of the process-wide RNGs, `random` and `numpy.random`."""
    return {"random": read_generator(random), "numpy": read_generator(np.random)}


def write_global_generators(saved: State) -> None:
    """Set the process-wide RNGs."""
    write_generator(random, saved["random"])
    write_generator(np.random, saved["numpy"])


def same_state(a: Any, b: Any) -> bool:
    """Whether two states are equal, arrays included."""
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(same_state(a[key], b[key]) for key in a)
    return bool(np.array_equal(a, b))


def is_generator(kind: type) -> bool:
    """Whether a type is an RNG: those of Python, NumPy and torch are known."""
    return issubclass(kind, _KINDS) or is_torch_generator(kind)


def is_torch_generator(kind: type) -> bool:
    """Whether it is torch's, without importing torch."""
    return kind.__name__ == "Generator" and kind.__module__ == "torch._C"


def inner_spaces(name: str, space: spaces.Space[Any]) -> Iterator[tuple[str, spaces.Space[Any]]]:
    """A space and those within it, by name."""
    yield name, space
    parts: dict[Any, Any] = {}
    if isinstance(space, spaces.Dict):
        parts = space.spaces
    elif isinstance(space, spaces.Tuple):
        parts = dict(enumerate(space.spaces))
    for key, part in parts.items():
        yield from inner_spaces(f"{name}.{key}", part)


def read_space_rngs(spec: EnvSpec) -> State:
    """The states of the RNGs that a spec's spaces draw samples from, as the environment seeded them."""
    found: State = {}
    for path, space in _spec_spaces(spec):
        rng: Any = space._np_random  # the property would make one
        if type(rng) is np.random.Generator and type(rng.bit_generator) in _BIT_GENERATORS:
            found[path] = read_generator(rng)
    return found


def write_space_rngs(spec: EnvSpec, saved: State) -> None:
    """Give a spec's spaces the RNGs that `read_space_rngs` read."""
    for path, space in _spec_spaces(spec):
        if path in saved:
            bits = next(kind() for kind in _BIT_GENERATORS if kind.__name__ == saved[path]["bit_generator"])
            space._np_random = np.random.Generator(bits)
            write_generator(space._np_random, saved[path])


def seed_spaces(spec: EnvSpec, run_seed: int, role: str) -> None:
    """Seed the spaces that have no RNG yet from the run's seed; Gymnasium would seed them from OS entropy."""
    for place, (_, space) in enumerate(_spec_spaces(spec)):
        rng: Any = space._np_random
        if rng is None:
            seed = seeding.component_seed(run_seed, role, "spaces", place)
            space._np_random = np.random.Generator(np.random.PCG64(seed))


def _spec_spaces(spec: EnvSpec) -> list[tuple[str, spaces.Space[Any]]]:
    return [*inner_spaces("observation", spec.observation_space), *inner_spaces("action", spec.action_space)]


def read_generator(generator: Any) -> State:
    """The state of one RNG."""
    if isinstance(generator, np.random.Generator):
        return dict(generator.bit_generator.state)
    if is_torch_generator(type(generator)):
        return {"torch": generator.get_state().numpy()}
    if hasattr(generator, "get_state"):  # RandomState, and numpy.random itself
        return dict(generator.get_state(legacy=False))
    version, key, gauss = generator.getstate()
    return {"version": version, "key": np.array(key, np.uint32), "gauss": gauss}


def write_generator(generator: Any, state: State) -> None:
    """Set one RNG, in place."""
    if isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    elif is_torch_generator(type(generator)):
        import torch

        generator.set_state(torch.from_numpy(state["torch"].copy()))
    elif hasattr(generator, "set_state"):
        generator.set_state(state)
    else:
        generator.setstate((state["version"], tuple(state["key"].tolist()), state["gauss"]))


_WORD = (1 << 64) - 1


class RngState:
    """The state of an RNG, as a keeper keeps it."""

    __slots__ = ("kind", "state")
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, generator: Any):
        self.kind = _kind(generator)
        self.state: State = read_generator(generator)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, RngState) or self.kind != other.kind:
            return False
        if self.kind[1] is np.random.PCG64:  # the usual one, which has no arrays
            return self.state == other.state
        return same_state(self.state, other.state)

    def fits(self, generator: Any) -> bool:
        return is_generator(type(generator)) and _kind(generator) == self.kind

    def write(self, generator: Any) -> None:
        write_generator(generator, self.state)

    def alive(self) -> Any:
        outer, inner = self.kind
        if inner is None:
            made = outer()
        else:
            made = outer(inner) if is_torch_generator(outer) else outer(inner(0))
        self.write(made)
        return made

    @property
    def nbytes(self) -> int:
        return 400 + sum(value.nbytes for value in self.state.values() if isinstance(value, np.ndarray))


def reseed(generator: Any, seed: int, place: int) -> None:
    """Reseed an RNG, the `place`-th of its environment, from `seed`."""
    a = _mix(seed ^ _mix(place + 1))
    if isinstance(generator, np.random.Generator):
        bits: Any = generator.bit_generator
        if type(bits) is np.random.PCG64:  # a seed sequence would cost five times as much
            numbers: Any = {"state": a << 64 | _mix(a), "inc": (_mix(a + 1) << 64 | _mix(a + 2)) | 1}
            bits.state = {"bit_generator": "PCG64", "state": numbers, "has_uint32": 0, "uinteger": 0}
        else:
            bits.state = type(bits)(a).state
    elif is_torch_generator(type(generator)):
        generator.manual_seed(a >> 1)
    else:
        generator.seed(a & 0xFFFFFFFF)


def _mix(x: int) -> int:
    """The next number after x in a splitmix64 sequence, in which all bits of x affect the result."""
    x = (x + 0x9E3779B97F4A7C15) & _WORD
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & _WORD
    x = (x ^ x >> 27) * 0x94D049BB133111EB & _WORD
    return x ^ x >> 31


def _kind(generator: Any) -> tuple[type, Any]:
    """What is needed to make another: its type, and its bit generator's type or its device."""
    if isinstance(generator, np.random.Generator):
        return type(generator), type(generator.bit_generator)
    if is_torch_generator(type(generator)):
        return type(generator), generator.device
    return type(generator), None


_FIRST, _EVERY = 64, 16  # when to look: reading them takes as long as some steps


class GlobalRng:
    """Guards the process-wide RNGs, `random` and `numpy.random`, in every step at first, later in some. An
    environment whose steps draw from them cannot be planned on: a planner would change the random numbers of the live
    environment, and they are not part of its kept state. It is refused as soon as that is detected.
    """

    def __init__(self, name: str):
        self._name, self._calls = name, 0

    @contextmanager
    def spared(self) -> Iterator[None]:
        """Restores them after the steps inside; UserError if those drew from them."""
        self._calls += 1
        if self._calls > _FIRST and self._calls % _EVERY:
            yield
            return
        failed: Exception | None = None
        with put_back() as taken:
            try:
                yield
            except (EnvFailed, UserError) as error:  # perhaps for that reason
                failed = error
        if taken:
            raise UserError(
                f"{self._name} draws from the global generator {taken[0]}, so planning would "
                "change its random numbers: use self.np_random instead."
            ) from failed
        if failed is not None:
            raise failed


@contextmanager
def put_back() -> Iterator[list[str]]:
    """Restores them at the end; yields the names of those that were used."""
    taken: list[str] = []
    before = read_global_generators()
    try:
        yield taken
    finally:
        now = read_global_generators()
        for name, public in (("numpy", "numpy.random"), ("random", "random")):
            if not same_state(before[name], now[name]):
                taken.append(public)
        if taken:
            write_global_generators(before)
