"""What a model of MuJoCo is at the moment: environments change masses, frictions or gravity from episode to episode."""

from __future__ import annotations

from typing import Any

import numpy as np

from corral.core.types import Array
from corral.snapshot.keeper import CannotKeep


class Physics:
    """The numbers of a model: its arrays but textures, which are large and only seen, and its options."""

    __slots__ = ("arrays", "options")

    def __init__(self, arrays: list[bytes], options: list[Any]):
        self.arrays, self.options = arrays, options

    @property
    def nbytes(self) -> int:
        """What it takes to keep."""
        return sum(map(len, self.arrays)) + 2000

    def is_like(self, other: Physics) -> bool:
        """Whether all numbers are the same."""
        return self.arrays == other.arrays and self.options == other.options


class ModelMemory:
    """One model, whose numbers are read and written in place."""

    def __init__(self, model: Any):
        self.model = model
        whole = memory_of(model.qpos0, int(model.nbuffer), {"body_mass": model.body_mass})
        textures = np.asarray(model.tex_data)
        at = textures.ctypes.data - model.qpos0.ctypes.data if textures.size else len(whole)
        self._arrays = [whole[:at], whole[at + textures.nbytes :]]
        values = {name: getattr(model.opt, name) for name in dir(model.opt) if not name.startswith("_")}
        self._option_arrays = [value for value in values.values() if isinstance(value, np.ndarray)]
        self._option_names = [name for name, value in values.items() if isinstance(value, (int, float))]

    def read(self) -> Physics:
        """Its numbers now."""
        options, arrays = self.model.opt, [*self._arrays, *self._option_arrays]
        return Physics([array.tobytes() for array in arrays], [getattr(options, name) for name in self._option_names])

    def write(self, physics: Physics) -> None:
        """Give it these; CannotKeep when they are of a model with other parts."""
        arrays = [*self._arrays, *self._option_arrays]
        if [array.nbytes for array in arrays] != [len(kept) for kept in physics.arrays]:
            raise CannotKeep("its model has other parts than the one that the state is of")
        for array, kept in zip(arrays, physics.arrays, strict=True):
            array[...] = np.frombuffer(kept, array.dtype).reshape(array.shape)
        for name, value in zip(self._option_names, physics.options, strict=True):
            setattr(self.model.opt, name, value)


def memory_of(first: Array, size: int, within: dict[str, Array]) -> Array:
    """The one piece of memory that begins with an array; CannotKeep unless these others are in it as well."""
    for name, array in within.items():
        if not 0 <= array.ctypes.data - first.ctypes.data <= size - array.nbytes:
            raise CannotKeep(f"this version of MuJoCo has {name} elsewhere")
    return np.lib.stride_tricks.as_strided(first.view(np.uint8), (size,), (1,), writeable=True)
