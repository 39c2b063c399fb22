"""Resolve a user's name for an environment to a factory that works in any process."""

from __future__ import annotations

import copy
import difflib
import importlib.util
import inspect
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any

import gymnasium
from gymnasium.envs.registration import EnvSpec as GymSpec

from corral.core.errors import EnvNotStarted, UserError
from corral.core.gym_env import OLD_GYM, EnvFactory, explain
from corral.core.imports import import_named
from corral.envs import suites
from corral.envs.adapters.old_gym import OldGym
from corral.envs.suites.atari import is_atari_id

_PLUGINS = {
    "MiniGrid-": "minigrid", "BabyAI-": "minigrid", "MiniWorld-": "miniworld", "mo-": "mo_gymnasium",
    "highway-": "highway_env", "merge-": "highway_env", "roundabout-": "highway_env", "parking-": "highway_env",
    "intersection-": "highway_env", "racetrack-": "highway_env", "exit-v": "highway_env", "u-turn-": "highway_env",
    "two-way-": "highway_env", "lane-keeping-": "highway_env",
    "Fetch": "gymnasium_robotics", "Hand": "gymnasium_robotics", "AntMaze": "gymnasium_robotics",
    "PointMaze": "gymnasium_robotics", "Adroit": "gymnasium_robotics", "FrankaKitchen": "gymnasium_robotics",
    "PyFlyt/": "PyFlyt.gym_envs", "Meta-World/": "metaworld", "dm_control/": "shimmy", "MinAtar/": "minatar.gym",
}  # fmt: skip
"""Beginning of an id -> module whose import, or `register_envs()`, registers it in Gymnasium."""
_INSTALL = {
    "mo_gymnasium": "mo-gymnasium", "highway_env": "highway-env", "gymnasium_robotics": "gymnasium-robotics",
    "shimmy": "'shimmy[dm-control]'", "pettingzoo": "'corral-rl[games]'",
    **{name: name for name in ("minigrid", "miniworld", "PyFlyt", "metaworld", "minatar", "crafter")},
}  # fmt: skip
"""Package of environments -> what to give to `pip install`."""
_PETTINGZOO = (
    "PettingZoo's two-player games are --env corral.envs.suites.games:PettingZoo --env-kwargs game={game}, "
    "for alphazero"
)

EnvLike = str | Callable[..., "gymnasium.Env[Any, Any]"]


@dataclass(frozen=True)
class Resolved:
    """An environment that can be built: its name for messages, and its factory."""

    name: str
    factory: EnvFactory


@dataclass(frozen=True)
class _Factory:
    name: str
    build: Callable[..., gymnasium.Env[Any, Any]]
    kwargs: Mapping[str, Any]

    def __call__(self) -> gymnasium.Env[Any, Any]:
        try:
            return self.build(**self.kwargs)
        except TypeError as error:
            unexpected = (key for key in self.kwargs if f"unexpected keyword argument '{key}'" in str(error))
            if odd := [key for key in unexpected if key != "render_mode"]:
                raise UserError(
                    f"{self.name} does not accept the keyword argument {odd[0]!r}: correct or remove it in env_kwargs."
                ) from error
            raise


def resolve(env: EnvLike, kwargs: Mapping[str, Any] | None = None) -> Resolved:
    """Resolve a Gymnasium id, `module:Class` or factory; UserError describes what is wrong with anything else."""
    kwargs = dict(kwargs or {})
    if isinstance(env, str):
        if "://" in env:
            raise UserError(
                f"{env!r} is an external simulator, which cannot be built, recorded or served here: pass "
                "an id, module:Class or a factory."
            )
        return _from_string(env, kwargs)
    if isinstance(env, gymnasium.Env):
        raise UserError(
            f"Got an instance of {type(env.unwrapped).__name__}, but several are needed: pass a function that creates "
            "one, e.g. make_vec(lambda: MyEnv())."
        )
    if isinstance(env, OldGym):
        env.announce()
    if callable(env):
        name = getattr(env, "name", None) or getattr(env, "__qualname__", None) or type(env).__name__
        return Resolved(name, _from_callable(env, kwargs) if kwargs else env)
    raise UserError(
        f"{env!r} is not an environment: pass a Gymnasium id, 'module:Class', or a factory"
        + (f"; {OLD_GYM}." if hasattr(env, "step") else ".")
    )


def _from_string(text: str, kwargs: dict[str, Any]) -> Resolved:
    module_name, colon, attribute = text.partition(":")
    if colon:
        module = import_module(module_name, text)
        target = getattr(module, attribute, None)
        if isinstance(target, OldGym):
            target.announce()
        if target in (suites.atari, suites.pixels):
            return _from_suite(text, target, kwargs)
        if callable(target):
            _require_maker(target, text)
            return Resolved(text, _from_callable(target, kwargs))
        if attribute not in gymnasium.registry and callable(register := getattr(module, "register_envs", None)):
            register()
        if attribute not in gymnasium.registry:
            if isinstance(target, ModuleType) and target.__name__.startswith("pettingzoo."):
                raise UserError(f"{text} is a module; {_PETTINGZOO.format(game=attribute)}.")
            if target is not None:
                raise UserError(f"{text} is of type {type(target).__name__}, not a class or function of environments.")
            close = difflib.get_close_matches(attribute, [n for n in dir(module) if not n.startswith("_")], 3)
            hint = f"; close: {', '.join(close)}" if close else ""
            raise UserError(f"Module {module_name!r} has no {attribute!r} that builds an environment{hint}.")
        text = attribute
    spec = find_spec(text)  # builds without the registry, which worker processes do not share
    return Resolved(text, _Factory(spec.id, partial(gymnasium.make, spec), kwargs))


def _require_maker(target: Any, text: str) -> None:
    """UserError, before anything is called, if this can make no environment, such as `os:system`."""
    wanted = "name a class of environments, or a function that makes one"
    if inspect.isclass(target):
        if not (callable(getattr(target, "reset", None)) and callable(getattr(target, "step", None))):
            raise UserError(f"{text} is a class without reset() and step(), so it is no environment: {wanted}.")
        return
    if not inspect.isroutine(target):
        return
    module = str(target.__module__).partition(".")[0]
    if inspect.isbuiltin(target) or module in sys.stdlib_module_names - {"__main__"}:
        raise UserError(f"{text} is a function of Python itself, which makes no environment: {wanted}.")
    made = getattr(target, "__annotations__", {}).get("return")
    kind = made if isinstance(made, str) else getattr(made, "__name__", None)
    if kind in ("None", "NoneType", "bool", "int", "float", "str", "bytes", "list", "dict", "tuple") or (
        module == "corral" and "Env" not in str(kind) and "Suite" not in str(kind)
    ):
        raise UserError(f"{text} is a function that returns {kind}, so it makes no environment: {wanted}.")


def _from_suite(text: str, suite: Callable[..., Any], kwargs: dict[str, Any]) -> Resolved:
    """The environment that a suite describes; `render_mode` is for building it."""
    build = {key: kwargs.pop(key) for key in ("render_mode",) if key in kwargs}
    try:
        made = suite(**kwargs)
    except TypeError as error:
        raise UserError(f"{text}: {error}; correct its env_kwargs.") from error
    return Resolved(made.name, _from_callable(made, build) if build else made)


def _from_callable(build: Callable[..., gymnasium.Env[Any, Any]], kwargs: Mapping[str, Any]) -> _Factory:
    return _Factory(getattr(build, "__name__", "The environment"), build, kwargs)


def find_spec(env_id: str) -> GymSpec:
    """Spec of a registered id, without the wrappers that Corral's own checks make redundant."""
    if is_atari_id(env_id) and env_id not in gymnasium.registry:
        import_module("ale_py", env_id, hint="pip install 'corral-rl[atari]'")
    if env_id.startswith("corral/"):
        import_module("corral.envs.suites.games", env_id)  # registers its ids
    try:
        spec = copy.deepcopy(gymnasium.spec(env_id))
    except gymnasium.error.Error as error:
        ids = {name.lower(): name for name in gymnasium.registry}
        close = difflib.get_close_matches(env_id.lower(), list(ids), 3, 0.6)
        hint = f" Close: {', '.join(ids[name] for name in close)}." if close else ""
        module = next((module for start, module in _PLUGINS.items() if env_id.startswith(start)), "")
        if module:
            raise UserError(f"No environment {env_id!r}; {_where(module)} {module}:{env_id}.") from error
        if re.search(r"\w_v\d+$", env_id):
            raise UserError(f"No environment {env_id!r}; {_PETTINGZOO.format(game=env_id)}.") from error
        raise UserError(
            f"No environment {env_id!r}.{hint} `corral list envs` shows all; give your own as module:Class, and an id "
            "that a package registers as module:ID."
        ) from error
    spec.disable_env_checker = True
    spec.order_enforce = False
    if isinstance(spec.entry_point, str) and spec.entry_point.startswith("__main__:"):
        # The class is pickled by value, because `__main__` differs in a worker.
        spec.entry_point = getattr(sys.modules["__main__"], spec.entry_point.removeprefix("__main__:"))
    return spec


def _where(module: str) -> str:
    package = module.partition(".")[0]
    if importlib.util.find_spec(package) is not None:
        return "name the package that registers it:"
    return f"it may be in {module} (pip install {_INSTALL[package]}): install that, and use"


def _how_to_import(module: str) -> str:
    package = module.partition(".")[0]
    if package in _INSTALL and importlib.util.find_spec(package) is None:
        return f"pip install {_INSTALL[package]}"
    return "check the name and that it is on the Python path"


def _not_imported(wanted: str, error: Exception) -> EnvNotStarted:
    return EnvNotStarted(f"{wanted!r} cannot be imported: {explain(error, '; correct that first')}.")


def import_module(module: str, wanted: str, hint: str = "") -> Any:
    """Import the module of something that a user named; UserError if there is none."""
    try:
        return import_named(module)
    except ModuleNotFoundError as error:
        if error.name is not None and not f"{module}.".startswith(f"{error.name}."):
            raise _not_imported(wanted, error) from error
        raise UserError(
            f"{wanted!r} needs the module {module!r}, which cannot be imported; {hint or _how_to_import(module)}."
        ) from error
    except UserError:
        raise
    except Exception as error:
        raise _not_imported(wanted, error) from error
