"""The random generators of an environment, and of a process: read and set, without pickle."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

Env = gymnasium.Env[Any, Any]
State = dict[str, Any]
Generators = dict[str, Any]
_KINDS = (np.random.Generator, np.random.RandomState, random.Random)


def layers(env: Env) -> Iterator[Any]:
    """An environment's wrappers from outside in, and the environment."""
    layer: Any = env
    while isinstance(layer, gymnasium.Wrapper):
        yield layer
        layer = layer.env
    yield layer


def find_generators(env: Env) -> Generators:
    """All random generators that an environment, its wrappers and their spaces hold, by name."""
    return dict(_generators(env))


def read_generators(found: Generators) -> State:
    """Their states."""
    return {name: read_generator(generator) for name, generator in found.items()}


def write_generators(found: Generators, saved: State) -> None:
    """Set the generators, in place, to what `read_generators` read; those that do not exist yet are left out."""
    for name, generator in found.items():
        if name in saved:
            write_generator(generator, saved[name])


def read_global_generators() -> State:
    """States of the generators that this process shares, `random` and `numpy.random`."""
    return {"random": read_generator(random), "numpy": read_generator(np.random)}


def write_global_generators(saved: State) -> None:
    """Set them."""
    write_generator(random, saved["random"])
    write_generator(np.random, saved["numpy"])


def same_state(a: Any, b: Any) -> bool:
    """Whether two states are equal, arrays included."""
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(same_state(a[key], b[key]) for key in a)
    return bool(np.array_equal(a, b))


def _generators(env: Env) -> Iterator[tuple[str, Any]]:
    for depth, layer in enumerate(layers(env)):
        for name, value in vars(layer).items():
            if is_generator(type(value)):
                yield f"{depth}.{name}", value
            elif isinstance(value, spaces.Space):
                for path, space in inner_spaces(f"{depth}.{name}", value):
                    if space._np_random is not None:  # the property would make one
                        yield path, space._np_random


def is_generator(kind: type) -> bool:
    """Whether values of a type are random generators: Python's, NumPy's and torch's are known."""
    return issubclass(kind, _KINDS) or is_torch_generator(kind)


def is_torch_generator(kind: type) -> bool:
    """Whether it is torch's, which is not imported to find out."""
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


def read_generator(generator: Any) -> State:
    """State of one."""
    if isinstance(generator, np.random.Generator):
        return dict(generator.bit_generator.state)
    if is_torch_generator(type(generator)):
        return {"torch": generator.get_state().numpy()}
    if hasattr(generator, "get_state"):  # RandomState, and numpy.random itself
        return dict(generator.get_state(legacy=False))
    version, key, gauss = generator.getstate()
    return {"version": version, "key": np.array(key, np.uint32), "gauss": gauss}


def write_generator(generator: Any, state: State) -> None:
    """Set one, in place."""
    if isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    elif is_torch_generator(type(generator)):
        import torch

        generator.set_state(torch.from_numpy(state["torch"].copy()))
    elif hasattr(generator, "set_state"):
        generator.set_state(state)
    else:
        generator.setstate((state["version"], tuple(state["key"].tolist()), state["gauss"]))
