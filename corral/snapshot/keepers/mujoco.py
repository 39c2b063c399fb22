"""States of MuJoCo: integrator state, derived quantities of the last step, and current model parameters.

Environments read derived numbers before they step (Ant rewards the distance from its body's last place), so a state
that MuJoCo could continue from does not suffice for the same rewards. Contacts, which every step recomputes, are not
kept.
"""

from __future__ import annotations

import sys
import weakref
from typing import Any, NamedTuple

import numpy as np

from corral.core.types import Array
from corral.snapshot.keeper import CannotSave, Env
from corral.snapshot.keepers.fields import Native


class Physics(NamedTuple):
    """The numbers of a model, which may change between episodes: arrays without textures, and options."""

    arrays: list[bytes]
    options: list[Any]

    @property
    def nbytes(self) -> int:
        return sum(map(len, self.arrays)) + 2000


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
        options, arrays = self.model.opt, [*self._arrays, *self._option_arrays]
        return Physics([array.tobytes() for array in arrays], [getattr(options, name) for name in self._option_names])

    def write(self, physics: Physics) -> None:
        arrays = [*self._arrays, *self._option_arrays]
        if [array.nbytes for array in arrays] != [len(kept) for kept in physics.arrays]:
            raise CannotSave("its model differs from that of the state")
        for array, kept in zip(arrays, physics.arrays, strict=True):
            array[...] = np.frombuffer(kept, array.dtype).reshape(array.shape)
        for name, value in zip(self._option_names, physics.options, strict=True):
            setattr(self.model.opt, name, value)


def memory_of(first: Array, size: int, within: dict[str, Array]) -> Array:
    """The block of memory that begins with an array; CannotSave unless these others are in it as well."""
    for name, array in within.items():
        if not 0 <= array.ctypes.data - first.ctypes.data <= size - array.nbytes:
            raise CannotSave(f"this version of MuJoCo stores {name} in a separate buffer")
    return np.lib.stride_tricks.as_strided(first.view(np.uint8), (size,), (1,), writeable=True)


_DERIVED = ("qpos", "qvel", "qacc_warmstart", "xpos", "xquat", "subtree_com", "cinert", "cvel", "cfrc_ext")


class _MujocoState(NamedTuple):
    """A state. `own_bytes` is the size of its physics, which states share while they stay the same."""

    state: Array
    arrays: Array
    physics: Physics
    own_bytes: int


class MujocoNative(Native):
    """`mj_getState` for the integrated state, and MjData's arrays of fixed size, one block of memory, for the rest."""

    def __init__(self, env: Env):
        import mujoco

        self._mujoco: Any = mujoco
        self._which = int(mujoco.mjtState.mjSTATE_INTEGRATION)
        self._memory: weakref.WeakKeyDictionary[Env, tuple[Any, Array, ModelMemory]] = weakref.WeakKeyDictionary()
        base = _base(env)
        if base.model.nplugin:
            raise CannotSave("its model has plugins, whose state MuJoCo cannot copy")
        self._size = mujoco.mj_stateSize(base.model, self._which)
        self._physics = self._memory_of(env)[1].read()  # as in the last state

    def parts(self, env: Env) -> list[Any]:
        return [_base(env).model, _base(env).data]

    def save(self, env: Env) -> _MujocoState:
        base, state = _base(env), np.empty(self._size)
        arrays, model = self._memory_of(env)
        self._mujoco.mj_getState(base.model, base.data, state, self._which)
        physics, own_bytes = model.read(), 0
        if physics == self._physics:
            physics = self._physics
        else:
            self._physics, own_bytes = physics, physics.nbytes
        return _MujocoState(state, arrays.copy(), physics, own_bytes)

    def load(self, env: Env, kept: _MujocoState) -> None:
        base = _base(env)
        arrays, model = self._memory_of(env)
        model.write(kept.physics)
        self._mujoco.mj_setState(base.model, base.data, kept.state, self._which)
        arrays[:] = kept.arrays

    def nbytes(self, kept: _MujocoState) -> int:
        return kept.state.nbytes + kept.arrays.nbytes + kept.own_bytes + 300

    def _memory_of(self, env: Env) -> tuple[Array, ModelMemory]:
        base, found = _base(env), self._memory.get(env)
        if found is None or found[0] is not base.data or found[2].model is not base.model:
            data = base.data
            derived = memory_of(data.qpos, int(data.nbuffer), {name: getattr(data, name) for name in _DERIVED})
            found = self._memory[env] = data, derived, ModelMemory(base.model)
        return found[1], found[2]


def mujoco_native(env: Env) -> MujocoNative | None:
    """For an environment that has a model and data of MuJoCo."""
    module, base = sys.modules.get("mujoco"), _base(env)
    if module is None or not isinstance(getattr(base, "data", None), module.MjData):
        return None
    return MujocoNative(env) if isinstance(getattr(base, "model", None), module.MjModel) else None


def _base(env: Env) -> Any:
    return env.unwrapped
