"""One Gymnasium environment: building it, its layers, the results of a step, legal actions, passive wrappers."""

from __future__ import annotations

import contextlib
import copy
import gc
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import gymnasium
import numpy as np
from gymnasium.wrappers import HumanRendering, RecordVideo, RenderCollection

from corral.core.errors import EnvFailed, EnvNotStarted, UserError, describe_error
from corral.core.types import Array, EnvSpec

Env = gymnasium.Env[Any, Any]
EnvFactory = Callable[[], Env]
_RENDER_WRAPPERS = (HumanRendering, RecordVideo, RenderCollection)
INSTALL = {
    "Box2D": "pip install 'corral-rl[box2d]'",
    "mujoco": "pip install 'corral-rl[mujoco]'",
    "jax": "pip install 'gymnasium[jax]'",
    "flax": "pip install 'gymnasium[jax]'",
    "ale_py": "pip install 'corral-rl[atari]'",
    "cv2": "pip install 'corral-rl[atari]'",
    "pygame": "pip install 'corral-rl[pixels]'",
    "pybullet": "pip install 'corral-rl[bullet]'",
    "pettingzoo": "pip install 'corral-rl[games]'",
}
"""Package that environments need -> what installs it."""
OLD_GYM = (
    "adapt such a class with corral.envs.old_gym(Class, observation_space=..., action_space=...), assign the result to "
    "a name in your module, and use module:NAME"
)
"""The remedy for environments with the interface of gym before 0.26."""
_owners: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
"""What steps an environment of this process, by the id of the unwrapped environment, which the owner keeps alive."""


class SharedEnv(UserError):
    """A factory returned an environment that something else steps."""


class SpacesDiffer(UserError, RuntimeError):
    """Environments that cannot share a batch; a RuntimeError, as in Gymnasium."""


def claim(env: Env, owner: Any) -> None:
    """Note that `owner` steps this environment, until `release` or the owner's end."""
    _owners[id(env.unwrapped)] = owner


def release(env: Env) -> None:
    """Note that nothing steps this environment any more."""
    _owners.pop(id(env.unwrapped), None)


def require_unused(env: Env, name: str) -> None:
    """SharedEnv if an environment, or another wrapper of it, is already stepped: two would share one episode."""
    if id(env.unwrapped) in _owners:
        gc.collect()  # its owner may have been dropped without being closed
        if id(env.unwrapped) in _owners:
            raise SharedEnv(
                f"The factory of {name} returned an environment that is already in use, the same object or another "
                "wrapper around it: return a new one from every call, e.g. make_vec(lambda: MyEnv())."
            )


def build_env(factory: EnvFactory, name: str) -> tuple[gymnasium.Env[Any, Any], EnvSpec]:
    """Build one environment; UserError if that fails, it is in use already, or its spaces are not supported."""
    with explained(f"{name} cannot be built"):
        env = factory()
    spec = spec_of(env, name)
    require_unused(env, name)
    return env, spec


@contextlib.contextmanager
def explained(what: str) -> Iterator[None]:
    """Raise EnvNotStarted in place of any other exception of an environment; the message begins with `what`."""
    try:
        yield
    except (UserError, EnvFailed):
        raise
    except (Exception, SystemExit) as error:
        remedy = "; correct that first, `corral check-env` tries the environment alone"
        raise EnvNotStarted(f"{what}: {explain(error, remedy)}.") from error


def explain(error: BaseException, otherwise: str = "") -> str:
    """An environment's exception in one line, with the remedy if it is known; `otherwise` is that of all others."""
    cause = error.__cause__ if isinstance(error, gymnasium.error.DependencyNotInstalled) else error
    package = (getattr(cause, "name", None) or "").partition(".")[0] if isinstance(cause, ImportError) else ""
    if package in INSTALL:
        return f"the package {package} is missing; {INSTALL[package]}"
    if isinstance(cause, ModuleNotFoundError):
        return f"{describe_error(error)}; install the package that has it"
    if isinstance(error, TypeError) and "unexpected keyword argument 'seed'" in str(error):
        return f"{describe_error(error)}, as in the old gym interface; {OLD_GYM}"
    return f"{describe_error(error)}{otherwise}"


def spec_of(env: Any, name: str) -> EnvSpec:
    """The spec of an environment; UserError if it is none or its spaces are not supported."""
    if not isinstance(env, gymnasium.Env):
        raise UserError(
            f"The factory of {name} returned {type(env).__module__}.{type(env).__name__}, not a gymnasium.Env; "
            + (f"{OLD_GYM}." if callable(getattr(env, "step", None)) else "return the environment from it.")
        )
    for what in ("observation_space", "action_space"):
        if not isinstance(getattr(env, what, None), gymnasium.Space):
            raise UserError(
                f"{name} has no {what} of gymnasium.spaces; set one in its __init__, or pass it to corral.envs.old_gym."
            )
    limit = env.spec.max_episode_steps if env.spec is not None else None
    # Copies: sampling from the spec's spaces must not change what the environment draws from its own.
    spaces = copy.deepcopy(env.observation_space), copy.deepcopy(env.action_space)
    spec = EnvSpec(*spaces, name, limit, getattr(env.unwrapped, "needs_masks", False))
    for layout in (spec.observation, spec.action):
        if not layout.leaves:
            raise UserError(f"{name} has an empty space, {layout.space}; give it at least one leaf.")
        if not any(np.prod(leaf.shape) for leaf in layout.leaves):
            raise UserError(f"{name} has a space without any number, {layout.space}; give it a shape without zeros.")
    return spec


def unpack_step(result: Any, name: str) -> tuple[Any, Any, Any, Any, Any]:
    """The five values of a step; UserError if they are not five."""
    if isinstance(result, tuple) and len(result) == 5:
        return result
    raise UserError(
        f"{name}: step() must return (obs, reward, terminated, truncated, info); for four values of the old gym "
        f"interface, {OLD_GYM}."
    )


def require_same_spaces(a: EnvSpec, a_id: int, b: EnvSpec, b_id: int) -> None:
    """SpacesDiffer, naming the difference, unless two environments can share a batch."""
    for what in ("observation", "action"):
        left, right = getattr(a, what), getattr(b, what)
        if left != right:
            raise SpacesDiffer(
                f"Environments {a_id} and {b_id} have different {what} spaces, {left.space} and {right.space}; "
                "all environments of one VecEnv need the same spaces."
            )


def seeded_reset(
    env: gymnasium.Env[Any, Any], seed: int | None, options: Mapping[str, Any] | None = None
) -> tuple[Any, Any]:
    """First observation and info of an episode; UserError if reset() has the old interface."""
    # An environment need not take options that nobody gives.
    result = env.reset(seed=seed) if options is None else env.reset(seed=seed, options=dict(options))
    if not (isinstance(result, tuple) and len(result) == 2):
        raise UserError(
            f"{type(env.unwrapped).__name__}.reset() must return (obs, info), got {type(result).__name__}; for an "
            f"observation alone, as in the old gym interface, {OLD_GYM}."
        )
    return result


def layers(env: Env) -> Iterator[Any]:
    """An environment's wrappers from outside in, and the environment."""
    layer: Any = env
    while isinstance(layer, gymnasium.Wrapper):
        yield layer
        layer = layer.env
    yield layer


def sample_actions(env: Env, count: int, seed: int) -> list[Any]:
    """Random actions, drawn from a copy of the environment's action space."""
    space = copy.deepcopy(env.action_space)
    space.seed(seed)
    return [space.sample() for _ in range(count)]


def legal(action: Any, info: Mapping[str, Any]) -> Any:
    """The action, or a legal one if the environment's mask excludes it."""
    mask = info.get("action_mask") if isinstance(info, dict) else None
    if mask is None or mask[action]:
        return action
    there = np.flatnonzero(mask)
    return there[action % len(there)] if len(there) else action


def require_legal(name: str, move: int, mask: Array) -> None:
    """ValueError unless a game's move is legal."""
    if 0 <= move < len(mask) and mask[move]:
        return
    there = ", ".join(map(str, np.flatnonzero(mask))) or "none, the game is over: call reset()"
    raise ValueError(
        f"{name}: {move} is not a legal move here; legal: {there}. Train it with alphazero: other algorithms ignore "
        "action masks."
    )


class PassiveWrapper(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Changes nothing and has no state, so that planners may ignore it."""


def only_renders(layer: Any) -> bool:
    """Whether a wrapper only renders or records, so that it must not run in a planner's copy.

    A copy of Gymnasium's RecordVideo would draw every step of a search, keep the frames in every state, and overwrite
    the video of the live environment.
    """
    return isinstance(layer, _RENDER_WRAPPERS)


def hide(env: Env) -> None:
    """Keep an environment from opening windows and its wrappers from rendering or recording."""
    base = env.unwrapped
    if getattr(base, "render_mode", None) == "human":
        base.render_mode = None
    for layer in layers(env):
        if only_renders(layer):
            layer.step, layer.reset = layer.env.step, layer.env.reset
        if isinstance(layer, RecordVideo):  # the original may record; closing this copy would write its video
            layer.recording, layer.recorded_frames = False, []
