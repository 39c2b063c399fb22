"""Which way keeps the states of an environment best, and another environment of its kind to step from them."""

from __future__ import annotations

import copy
import logging
import types
from collections.abc import Iterator
from typing import Any

import gymnasium
import numpy as np

from corral.core.errors import UserError
from corral.core.gym_env import EnvFactory, hide, layers
from corral.core.spaces import Layout
from corral.snapshot.find_rng import unshare
from corral.snapshot.keeper import CannotSave, Env, StateKeeper
from corral.snapshot.keepers.ale import ale_native
from corral.snapshot.keepers.bullet import bullet_native
from corral.snapshot.keepers.declared import declared_keeping
from corral.snapshot.keepers.deepcopy import Copier
from corral.snapshot.keepers.fields import FieldsKeeper, type_name
from corral.snapshot.keepers.mujoco import mujoco_native
from corral.snapshot.keepers.replay import ReplayKeeper
from corral.snapshot.live_env import unwatch

log = logging.getLogger("corral.envs")

_NATIVES = (ale_native, mujoco_native, bullet_native)
_TRIED_STEPS = 5


def choose_keeping(scratch: Env, *, replay: bool) -> StateKeeper:
    """The best way for environments like this one, which has been reset; CannotKeep where there is none.

    In this order: the state that it declares, its native part's own, copies of its fields, and, where its actions are
    recorded, repeating them. Copies are tried out: what follows a state must follow it again.
    """
    declared = declared_keeping(scratch)
    if declared is not None:
        return declared
    try:
        fields = FieldsKeeper(next((found for find in _NATIVES if (found := find(scratch))), None))
        _try_out(fields, scratch)
    except CannotSave as error:
        if not replay:
            raise
        log.info("states of %s are kept as its actions, because %s.", type(scratch.unwrapped).__name__, error)
        return ReplayKeeper()
    return fields


def _try_out(keeping: StateKeeper, scratch: Env) -> None:
    """CannotKeep unless the same follows a state twice."""
    space, layout = copy.deepcopy(scratch.action_space), Layout(scratch.observation_space)
    space.seed(0)
    actions = [space.sample() for _ in range(_TRIED_STEPS)]
    kept = keeping.keep(scratch)
    seen = []
    for _ in range(2):
        keeping.put(scratch, kept)
        seen.append(list(_walk(scratch, actions, layout)))
    keeping.put(scratch, kept)
    keeping.drop(kept)
    if seen[0] != seen[1]:
        raise CannotSave("its fields are not all of its state: another step followed the same one")


def _walk(env: Env, actions: list[Any], layout: Layout) -> Iterator[tuple[Any, ...]]:
    for action in actions:
        try:
            obs, reward, terminated, truncated, _ = env.step(action)
        except Exception as error:  # whoever steps from a state will be told
            yield (repr(error),)
            return
        leaves = [np.asarray(leaf).tobytes() for leaf in layout.flatten(obs)]
        yield *leaves, float(np.asarray(reward).reshape(())), bool(terminated), bool(truncated)
        if terminated or truncated:
            return


def keeping_of(factory: EnvFactory) -> StateKeeper | None:
    """The best way without recorded actions for what a factory builds, None where there is none."""
    scratch = make_scratch(factory)
    try:
        return choose_keeping(scratch, replay=False)
    except CannotSave:
        return None
    finally:
        scratch.close()


def make_scratch(factory: EnvFactory) -> Env:
    """An environment to put states into, which opens no window."""
    return _ready(factory())


def scratch_like(env: Env) -> Env:
    """Another environment of the same make as one that nobody can build; UserError when it cannot be copied."""
    for build in (_copy, _from_spec):
        try:
            made = build(env)
            if made is not None and [*map(type_name, layers(made))] == [*map(type_name, layers(env))]:
                return _ready(made)
        except Exception:  # whatever its own methods raise at this
            continue
    raise UserError(
        f"{type(env.unwrapped).__name__} cannot be copied, and a second one is needed to step from its states: pass "
        "what builds it, an id, module:Class or a factory."
    )


def _copy(env: Env) -> Env:
    new: dict[int, Any] = {}
    made = copy.deepcopy(env, new)
    unwatch(made)
    new.pop(id(new), None)  # what `deepcopy` holds on to
    marks = {old: object() for old in new}
    back = {id(mark): new[old] for old, mark in marks.items()}
    for theirs, own in zip(layers(env), layers(made), strict=True):
        for name, value in vars(theirs).items():
            if isinstance(value, types.FunctionType):  # `deepcopy` leaves its closure, with the old environment in it
                vars(own)[name] = Copier(back).copy(Copier(dict(marks)).copy(value))
    return made


def _from_spec(env: Env) -> Env | None:
    return None if env.spec is None else gymnasium.make(env.spec)


def _ready(env: Env) -> Env:
    hide(env)
    env.reset(seed=0)
    unshare(env)
    return env
