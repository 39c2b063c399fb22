"""States of MuJoCo: what it integrates, what it derived from that in its last step, and what the model is then.

Environments read derived numbers before they step (Ant rewards the way from where its body last was), so a state that
MuJoCo could go on from is not enough to give the same rewards. Contacts, which every step finds anew, are not kept.
"""

from __future__ import annotations

import sys
import weakref
from typing import Any, NamedTuple

import numpy as np

from corral.core.types import Array
from corral.snapshot.keeper import CannotKeep, Env
from corral.snapshot.keepers.fields import Native
from corral.snapshot.keepers.mujoco_model import ModelMemory, Physics, memory_of

_DERIVED = ("qpos", "qvel", "qacc_warmstart", "xpos", "xquat", "subtree_com", "cinert", "cvel", "cfrc_ext")


class _Kept(NamedTuple):
    """A state. `own_bytes` is what its physics take, which states share while they stay the same."""

    state: Array
    arrays: Array
    physics: Physics
    own_bytes: int


class MujocoNative(Native):
    """`mj_getState` for what counts, and MjData's arrays of fixed size, which are one piece of memory, for the rest."""

    def __init__(self, env: Env):
        import mujoco

        self._mujoco: Any = mujoco
        self._which = int(mujoco.mjtState.mjSTATE_INTEGRATION)
        self._memory: weakref.WeakKeyDictionary[Env, tuple[Any, Array, ModelMemory]] = weakref.WeakKeyDictionary()
        base = _base(env)
        if base.model.nplugin:
            raise CannotKeep("its model has plugins, whose states are not MuJoCo's to copy")
        self._size = mujoco.mj_stateSize(base.model, self._which)
        self._physics = self._memory_of(env)[1].read()  # as the last state had them

    def parts(self, env: Env) -> list[Any]:
        """The model and the data."""
        return [_base(env).model, _base(env).data]

    def keep(self, env: Env) -> _Kept:
        """All of it."""
        base, state = _base(env), np.empty(self._size)
        arrays, model = self._memory_of(env)
        self._mujoco.mj_getState(base.model, base.data, state, self._which)
        physics, own_bytes = model.read(), 0
        if physics.is_like(self._physics):
            physics = self._physics
        else:
            self._physics, own_bytes = physics, physics.nbytes
        return _Kept(state, arrays.copy(), physics, own_bytes)

    def put(self, env: Env, kept: _Kept) -> None:
        """All of it."""
        base = _base(env)
        arrays, model = self._memory_of(env)
        model.write(kept.physics)
        self._mujoco.mj_setState(base.model, base.data, kept.state, self._which)
        arrays[:] = kept.arrays

    def nbytes(self, kept: _Kept) -> int:
        """Their sizes."""
        return kept.state.nbytes + kept.arrays.nbytes + kept.own_bytes + 300

    def _memory_of(self, env: Env) -> tuple[Array, ModelMemory]:
        base, found = _base(env), self._memory.get(env)
        if found is None or found[0] is not base.data or found[2].model is not base.model:
            data = base.data
            derived = memory_of(data.qpos, int(data.nbuffer), {name: getattr(data, name) for name in _DERIVED})
            found = self._memory[env] = data, derived, ModelMemory(base.model)
        return found[1], found[2]


def mujoco_native(env: Env) -> MujocoNative | None:
    """Of an environment that has a model and data of MuJoCo's."""
    module, base = sys.modules.get("mujoco"), _base(env)
    if module is None or not isinstance(getattr(base, "data", None), module.MjData):
        return None
    return MujocoNative(env) if isinstance(getattr(base, "model", None), module.MjModel) else None


def _base(env: Env) -> Any:
    return env.unwrapped
