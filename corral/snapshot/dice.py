"""Random generators as they are kept with a state: read, brought to life, and given other numbers, in microseconds."""

from __future__ import annotations

from typing import Any

import numpy as np

from corral.snapshot.rng import (
    State,
    is_generator,
    is_torch_generator,
    read_generator,
    same_state,
    write_generator,
)

_WORD = (1 << 64) - 1


class Die:
    """A generator's state."""

    __slots__ = ("kind", "state")
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, generator: Any):
        self.kind = _kind(generator)
        self.state: State = read_generator(generator)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Die) or self.kind != other.kind:
            return False
        if self.kind[1] is np.random.PCG64:  # the usual one, which has no arrays
            return self.state == other.state
        return same_state(self.state, other.state)

    def fits(self, generator: Any) -> bool:
        """Whether a generator can take this state."""
        return is_generator(type(generator)) and _kind(generator) == self.kind

    def write(self, generator: Any) -> None:
        """Let a generator go on from here."""
        write_generator(generator, self.state)

    def alive(self) -> Any:
        """A generator that goes on from here."""
        outer, inner = self.kind
        if inner is None:
            made = outer()
        else:
            made = outer(inner) if is_torch_generator(outer) else outer(inner(0))
        self.write(made)
        return made

    @property
    def nbytes(self) -> int:
        """What it takes to keep."""
        return 400 + sum(value.nbytes for value in self.state.values() if isinstance(value, np.ndarray))


def throw_anew(generator: Any, seed: int, place: int) -> None:
    """Let a generator, the `place`-th of its environment, go on with numbers that `seed` says."""
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
    """The next number after x in a splitmix64 sequence: all bits of x matter to all of it."""
    x = (x + 0x9E3779B97F4A7C15) & _WORD
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & _WORD
    x = (x ^ x >> 27) * 0x94D049BB133111EB & _WORD
    return x ^ x >> 31


def _kind(generator: Any) -> tuple[type, Any]:
    """What it takes to make another: its type, and that of its bits, or the device that it is for."""
    if isinstance(generator, np.random.Generator):
        return type(generator), type(generator.bit_generator)
    if is_torch_generator(type(generator)):
        return type(generator), generator.device
    return type(generator), None
