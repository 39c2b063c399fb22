"""States of MuJoCo: what it integrates, and what it derived from that in its last step.

Environments read derived numbers before they step (Ant rewards the way from where its body last was), so a state that
MuJoCo could go on from is not enough to give the same rewards. Contacts, which every step finds anew, are not kept.
"""

from __future__ import annotations

import sys
import weakref
from typing import Any

import numpy as np

from corral.envs.keeping.contract import CannotKeep, Env
from corral.envs.keeping.fields import Native
from corral.types import Array


class MujocoNative(Native):
    """`mj_getState` for what counts, and MjData's arrays of fixed size, which are one piece of memory, for the rest."""

    def __init__(self, env: Env):
        import mujoco

        self._mujoco: Any = mujoco
        self._which = int(mujoco.mjtState.mjSTATE_INTEGRATION)
        self._memory: weakref.WeakKeyDictionary[Env, tuple[Any, Array]] = weakref.WeakKeyDictionary()
        if _base(env).model.nplugin:
            raise CannotKeep("its model has plugins, whose states are not MuJoCo's to copy")
        self._size = mujoco.mj_stateSize(_base(env).model, self._which)
        _fixed_memory(_base(env).data)

    def parts(self, env: Env) -> list[Any]:
        """The model, which stays as it is, and the data."""
        return [_base(env).model, _base(env).data]

    def keep(self, env: Env) -> tuple[Array, Array]:
        """Both."""
        base, state = _base(env), np.empty(self._size)
        self._mujoco.mj_getState(base.model, base.data, state, self._which)
        return state, self._arrays(env).copy()

    def put(self, env: Env, kept: tuple[Array, Array]) -> None:
        """Both."""
        base, (state, arrays) = _base(env), kept
        self._mujoco.mj_setState(base.model, base.data, state, self._which)
        self._arrays(env)[:] = arrays

    def nbytes(self, kept: tuple[Array, Array]) -> int:
        """Their sizes."""
        return kept[0].nbytes + kept[1].nbytes + 300

    def _arrays(self, env: Env) -> Array:
        data = _base(env).data
        found = self._memory.get(env)
        if found is None or found[0] is not data:
            found = self._memory[env] = data, _fixed_memory(data)
        return found[1]


def mujoco_native(env: Env) -> MujocoNative | None:
    """Of an environment that has a model and data of MuJoCo's."""
    module, base = sys.modules.get("mujoco"), _base(env)
    if module is None or not isinstance(getattr(base, "data", None), module.MjData):
        return None
    return MujocoNative(env) if isinstance(getattr(base, "model", None), module.MjModel) else None


def _base(env: Env) -> Any:
    return env.unwrapped


def _fixed_memory(data: Any) -> Array:
    """The memory of all arrays whose size does not change, qpos first; CannotKeep when it is laid out otherwise."""
    size, begin = int(data.nbuffer), data.qpos.ctypes.data
    for name in ("qpos", "qvel", "qacc_warmstart", "xpos", "xquat", "subtree_com", "cinert", "cvel", "cfrc_ext"):
        array = getattr(data, name)
        if not 0 <= array.ctypes.data - begin <= size - array.nbytes:
            raise CannotKeep(f"this version of MuJoCo has {name} elsewhere")
    return np.lib.stride_tricks.as_strided(data.qpos.view(np.uint8), (size,), (1,), writeable=True)
