"""Chooses the best keeper for an environment, and makes scratch environments to step from its states."""

from __future__ import annotations

import copy
import logging
import types
from collections.abc import Iterator
from typing import Any

import gymnasium
import numpy as np
from gymnasium.wrappers import OrderEnforcing, PassiveEnvChecker

from corral.core.errors import UserError
from corral.core.gym_env import EnvFactory, PassiveWrapper, hide, layers, require_unused
from corral.core.spaces import Layout
from corral.snapshot.find_rng import unshare
from corral.snapshot.keeper import CannotSave, Env, StateKeeper
from corral.snapshot.keepers.ale import ale_native
from corral.snapshot.keepers.bullet import bullet_native
from corral.snapshot.keepers.declared import declared_keeper
from corral.snapshot.keepers.deepcopy import Copier
from corral.snapshot.keepers.fields import FieldsKeeper, type_name
from corral.snapshot.keepers.mujoco import mujoco_native
from corral.snapshot.keepers.replay import ReplayKeeper
from corral.snapshot.live_env import unwatch

log = logging.getLogger("corral.envs")

_NATIVES = (ale_native, mujoco_native, bullet_native)
_TRIED_STEPS = 5
RULE_PRESERVING = (OrderEnforcing, PassiveEnvChecker, PassiveWrapper)
"""Wrappers that change neither the steps of an environment nor its observations."""


def choose_keeper(scratch: Env, *, replay: bool) -> StateKeeper:
    """The best keeper for environments like this one, which has been reset; CannotSave if there is none. In this order:
    the keeper offered by `state_keeper()`, the declared state, copies of its fields with the state of its native code,
    and, if its actions are recorded, replay. Copies are tested: the same steps must follow a state twice.
    """
    *wrappers, base = layers(scratch)
    if hasattr(base, "state_keeper") and all(isinstance(layer, RULE_PRESERVING) for layer in wrappers):
        offered: StateKeeper = base.state_keeper()
        return offered
    declared = declared_keeper(scratch)
    if declared is not None:
        return declared
    try:
        fields = FieldsKeeper(next((found for find in _NATIVES if (found := find(scratch))), None))
        _try_out(fields, scratch)
    except CannotSave as error:
        if not replay:
            raise
        log.info("%s is saved by replaying its actions, because %s.", type(scratch.unwrapped).__name__, error)
        return ReplayKeeper()
    return fields


def _try_out(keeper: StateKeeper, scratch: Env) -> None:
    space, layout = copy.deepcopy(scratch.action_space), Layout(scratch.observation_space)
    space.seed(0)
    actions = [space.sample() for _ in range(_TRIED_STEPS)]
    kept = keeper.save(scratch)
    seen = []
    for _ in range(2):
        keeper.load(scratch, kept)
        seen.append(list(_walk(scratch, actions, layout)))
    keeper.load(scratch, kept)
    keeper.drop(kept)
    if seen[0] != seen[1]:
        raise CannotSave("its attributes do not hold its full state: repeating a step gave a different result")


def _walk(env: Env, actions: list[Any], layout: Layout) -> Iterator[tuple[Any, ...]]:
    for action in actions:
        try:
            obs, reward, terminated, truncated, _ = env.step(action)
        except Exception as error:  # reported when a planner steps from a state
            yield (repr(error),)
            return
        leaves = [np.asarray(leaf).tobytes() for leaf in layout.flatten(obs)]
        yield *leaves, float(np.asarray(reward).reshape(())), bool(terminated), bool(truncated)
        if terminated or truncated:
            return


def find_keeper(factory: EnvFactory) -> StateKeeper | None:
    """The best keeper without recorded actions for a factory's environments, None if there is none."""
    scratch = make_scratch(factory)
    try:
        return choose_keeper(scratch, replay=False)
    except CannotSave:
        return None
    finally:
        scratch.close()


def make_scratch(factory: EnvFactory) -> Env:
    """Make a scratch environment to load states into; it opens no window."""
    env = factory()
    require_unused(env, type(env.unwrapped).__name__)
    return _ready(env)


def scratch_like(env: Env) -> Env:
    """A scratch environment like one whose factory is unknown; UserError if it cannot be copied."""
    for build in (_copy, _from_spec):
        try:
            made = build(env)
            if made is not None and [*map(type_name, layers(made))] == [*map(type_name, layers(env))]:
                return _ready(made)
        except Exception:  # its own methods may raise anything
            continue
    raise UserError(
        f"{type(env.unwrapped).__name__} cannot be copied, and planning needs a second instance: pass an id, "
        "module:Class or a factory instead of the instance."
    )


def _copy(env: Env) -> Env:
    new: dict[int, Any] = {}
    made = copy.deepcopy(env, new)
    unwatch(made)
    new.pop(id(new), None)  # `deepcopy` keeps its arguments alive here
    marks = {old: object() for old in new}
    back = {id(mark): new[old] for old, mark in marks.items()}
    for theirs, own in zip(layers(env), layers(made), strict=True):
        for name, value in vars(theirs).items():
            if isinstance(value, types.FunctionType):  # its closure refers to the old environment
                vars(own)[name] = Copier(back).copy(Copier(dict(marks)).copy(value))
    return made


def _from_spec(env: Env) -> Env | None:
    return None if env.spec is None else gymnasium.make(env.spec)


def _ready(env: Env) -> Env:
    hide(env)
    env.reset(seed=0)
    unshare(env)
    return env
