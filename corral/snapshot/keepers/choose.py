"""Chooses the best keeper for an environment, and makes scratch environments to step from its states."""

from __future__ import annotations

import copy
import logging
import types
from collections.abc import Callable
from functools import partial
from typing import Any

import gymnasium
from gymnasium.wrappers import OrderEnforcing, PassiveEnvChecker

from corral.core.errors import UserError
from corral.core.gym_env import EnvFactory, PassiveWrapper, hide, layers, require_unused
from corral.snapshot.find_rng import unshare
from corral.snapshot.keeper import CannotSave, Env, StateKeeper
from corral.snapshot.keepers.ale import ale_native
from corral.snapshot.keepers.bullet import bullet_native
from corral.snapshot.keepers.declared import declared_keeper
from corral.snapshot.keepers.deepcopy import Copier
from corral.snapshot.keepers.fields import FieldsKeeper, type_name
from corral.snapshot.keepers.mujoco import mujoco_native
from corral.snapshot.keepers.replay import ReplayKeeper
from corral.snapshot.keepers.trial import SharedState, Trial
from corral.snapshot.live_env import unwatch
from corral.snapshot.states import warn_once

log = logging.getLogger("corral.envs")

_NATIVES = (ale_native, mujoco_native, bullet_native)
RULE_PRESERVING = (OrderEnforcing, PassiveEnvChecker, PassiveWrapper)
"""Wrappers that change neither the steps of an environment nor its observations."""


def choose_keeper(scratch: Env, make: Callable[[], Env], *, replay: bool) -> StateKeeper:
    """The best keeper for environments like this one, which has been reset; CannotSave if there is none. In this order:
    the keeper offered by `state_keeper()`, the declared state, copies of its fields with the state of its native code,
    and, if its actions are recorded, replay. Copies and replay are tested: the same steps must follow a state twice.
    With any of them, `make` builds another instance, which must not change these steps: SharedState if it does.
    """
    *wrappers, base = layers(scratch)
    if hasattr(base, "state_keeper") and all(isinstance(layer, RULE_PRESERVING) for layer in wrappers):
        return _isolated(base.state_keeper(), scratch, make)
    declared = declared_keeper(scratch)
    if declared is not None:
        return _isolated(declared, scratch, make)
    native = None
    try:
        native = next((found for find in _NATIVES if (found := find(scratch))), None)
        keeper: StateKeeper = FieldsKeeper(native)
        trial = Trial(scratch, keeper)
        if not trial.repeats():
            raise CannotSave("its attributes do not hold its full state: repeating a step gave a different result")
    except CannotSave as error:
        if not replay:
            raise
        keeper, trial = ReplayKeeper(), Trial(scratch, None)
        if not trial.repeats():
            raise UserError(
                f"Planning saves and restores environments, and {_name(scratch)} cannot be saved: the same seed and "
                "actions gave different steps; draw random numbers only from self.np_random and keep no state outside "
                "the instance, or implement state_dict() and load_state_dict(state)."
            ) from error
        log.info("%s is saved by replaying its actions, because %s.", _name(scratch), error)
    return _accept(keeper, trial, make, foresight=native is None)


def _isolated(keeper: StateKeeper, scratch: Env, make: Callable[[], Env]) -> StateKeeper:
    """The keeper; SharedState if instances share state. What it loads may not repeat, so seeds are tried as well."""
    for kept_by in (keeper, None):
        try:
            trial = Trial(scratch, kept_by, seed=1)
            repeats = trial.repeats()
        except Exception:  # of the author's functions, which is reported when a state is saved
            continue
        if repeats:
            return _accept(keeper, trial, make, foresight=kept_by is keeper and not keeper.is_random)
    log.warning(
        "Steps of %s differ when they are repeated, so it cannot be tested whether planning disturbs the environment "
        "that acts: keep no state outside the instance.", _name(scratch),
    )  # fmt: skip
    return keeper


def _accept(keeper: StateKeeper, trial: Trial, make: Callable[[], Env], *, foresight: bool) -> StateKeeper:
    """The keeper after the rest of its trial. Native simulators' random numbers are known: they need no `foresight`."""
    keeper.foreseen = trial.require_isolated(make, foresight=foresight)
    trial.close()
    if keeper.foreseen:
        warn_once(keeper.foreseen)
    return keeper


def _name(env: Env) -> str:
    return type(env.unwrapped).__name__


def find_keeper(factory: EnvFactory) -> StateKeeper | None:
    """The best keeper without recorded actions for a factory's environments; None, and a log entry, if none fits."""
    scratch = make_scratch(factory)
    try:
        return choose_keeper(scratch, partial(make_scratch, factory), replay=False)
    except (SharedState, CannotSave) as error:
        log.info("States of %s are not offered to planners: %s", _name(scratch), error)
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
