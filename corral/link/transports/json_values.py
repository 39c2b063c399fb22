"""Values of the JSON loop: clients' messages, spaces that they or the learner describe, observations and actions."""

from __future__ import annotations

from typing import Annotated, Any

import gymnasium
import msgspec
import numpy as np

from corral.core.encoding import Buffer
from corral.core.errors import UserError
from corral.core.spaces import Layout, Leaf
from corral.core.types import Array
from corral.link.layout import read_space, space_difference
from corral.link.message import BadMessage

COMMANDS = ("reset", "step", "terminate")
_MAX_ID = 200  # characters
_MAX_DEPTH, _MAX_LEAVES = 8, 256
_BYTES_EACH, _BYTES_MORE = 64, 1 << 16  # of a number in an observation, and of everything else in a message


class ClientError(Exception):
    """A client's error, in one sentence without a full stop."""


class ClientMessage(msgspec.Struct, frozen=True):
    """A message of a client. Unknown keys are ignored."""

    command: str
    env_id: str | int | float
    obs: Any = None
    reward: float | None = None
    terminated: bool | None = None
    truncated: bool | None = None
    raw_reward: float | None = None  # the unscaled reward, where `reward` is another
    life_lost: bool = False  # the episode ended, but the game continues
    seeded: bool = False  # with a reset: this client accepts `{"reset": true, "seed": n}`
    action_space: Any = None
    observation_space: Any = None
    instance: Annotated[str, msgspec.Meta(pattern=r"^([0-9a-f]{32})?$")] = ""
    """With the first reset: the value of CORRAL_INSTANCE, in a process that the learner started."""


_decoder = msgspec.json.Decoder(ClientMessage)


def read_client_message(body: Buffer) -> ClientMessage:
    """Parse a client's message; ClientError when it is invalid."""
    try:
        message = _decoder.decode(body)
    except msgspec.ValidationError as error:
        raise ClientError(f"the message is invalid: {error}") from error
    except (ValueError, RecursionError) as error:
        hint = "; JSON has no NaN or Infinity" if b"NaN" in bytes(body) or b"Infinity" in bytes(body) else ""
        raise ClientError(f"the message is not JSON ({error}{hint})") from error
    if message.command not in COMMANDS:
        raise ClientError(f"the command {message.command[:40]!r} is not one of {', '.join(COMMANDS)}")
    if isinstance(message.env_id, str) and len(message.env_id) > _MAX_ID:
        raise ClientError(f"the env_id has {len(message.env_id)} characters, at most {_MAX_ID} are accepted")
    if isinstance(message.env_id, str) and not message.env_id.isprintable():
        raise ClientError(f"the env_id {message.env_id!r} has characters that cannot be printed")
    needed = {"reset": ("obs",), "step": ("obs", "reward", "terminated", "truncated"), "terminate": ()}[message.command]
    if missing := [key for key in needed if getattr(message, key) is None]:
        raise ClientError(f"the {message.command} has no {missing[0]!r}")
    return message


def described(value: Any, what: str) -> Layout:
    """A space from a Gymnasium space, a description (docs/link.md, section 2), or n for Discrete(n)."""
    if isinstance(value, Layout):
        return value
    if isinstance(value, gymnasium.Space):
        return Layout(value)
    if isinstance(value, int) and not isinstance(value, bool) and 0 < value < 2**31:
        return Layout(gymnasium.spaces.Discrete(value))
    try:
        return read_space(value, what)
    except BadMessage as error:
        raise UserError(f"{what}={str(value)[:100]}: {error}; pass a Gymnasium space, or n for Discrete(n).") from error


def spaces_of(message: ClientMessage, observation: Layout | None, action: Layout | None) -> tuple[Layout, Layout]:
    """Observation and action space, from a client's first message and the learner's settings; ClientError otherwise."""
    action = _agreed(message.action_space, action, "action")
    if action is None:
        raise ClientError(
            "the action space is not known: make_vec needs env_kwargs={'action': ...}, a space or n for "
            "Discrete(n), or the first message an 'action_space'"
        )
    return _agreed(message.observation_space, observation, "observation") or inferred(message.obs), action


def _agreed(theirs: Any, ours: Layout | None, what: str) -> Layout | None:
    if theirs is None:
        return ours
    try:
        layout = described(theirs, what)
    except UserError as error:
        raise ClientError(f"the {what}_space of the first message cannot be used: {error}") from error
    if ours is not None and (found := space_difference(ours, layout, what)) is not None:
        raise ClientError(f"the first message describes {found}")
    return layout


def inferred(obs: Any) -> Layout:
    """Unbounded float32 space with the shapes of an observation, object keys in sorted order; ClientError otherwise."""
    if (found := _count_leaves(obs, _MAX_DEPTH)) > _MAX_LEAVES:  # before a space is made for each
        raise ClientError(f"obs has {found} leaves, at most {_MAX_LEAVES} are accepted")
    return Layout(_inferred(obs, "obs", _MAX_DEPTH))


def _count_leaves(value: Any, depth: int) -> int:
    return sum(_count_leaves(part, depth - 1) for part in value.values()) if isinstance(value, dict) and depth else 1


def _inferred(value: Any, where: str, depth: int) -> gymnasium.Space[Any]:
    if isinstance(value, dict) and value and depth > 0:
        parts = [(key, _inferred(value[key], f"{where}.{key}", depth - 1)) for key in sorted(value)]
        return gymnasium.spaces.Dict(parts)
    array = _numbers(value, where)
    if not array.size:
        raise ClientError(f"{where} is empty")
    return gymnasium.spaces.Box(-np.inf, np.inf, array.shape, np.float32)


def max_message_bytes(observation: Layout, limit: int) -> int:
    """Largest message with such an observation, however wastefully it is encoded."""
    numbers = sum(int(np.prod(leaf.shape, dtype=np.int64)) for leaf in observation.leaves)
    return min(limit, _BYTES_MORE + _BYTES_EACH * numbers)


def read_obs(obs: Any, layout: Layout) -> list[Array]:
    """An observation as leaves with a row of one, all finite and in range; ClientError otherwise."""
    try:
        values = layout.flatten(obs)
    except (KeyError, IndexError, TypeError) as error:
        raise ClientError(f"obs {str(obs)[:60]} does not have the structure of {str(layout.space)[:200]}") from error
    return [_read_leaf(value, leaf) for value, leaf in zip(values, layout.leaves, strict=True)]


def _read_leaf(value: Any, leaf: Leaf) -> Array:
    where = ".".join(map(str, ("obs", *leaf.path)))
    array = _numbers(value, where)
    if array.shape != leaf.shape:
        raise ClientError(f"{where} has shape {array.shape}, expected {leaf.shape}")
    with np.errstate(over="ignore", invalid="ignore"):
        cast: Array = array.astype(leaf.dtype)
    if not (np.isfinite(cast).all() if leaf.dtype.kind == "f" else np.array_equal(cast, array)):
        raise ClientError(f"{where} has numbers that {leaf.dtype} cannot hold")
    low, high = leaf.bounds
    discrete = not isinstance(leaf.space, gymnasium.spaces.Box)
    if discrete and low is not None and high is not None and ((cast < low).any() or (cast > high).any()):
        raise ClientError(f"{where} is outside {leaf.space}")
    return cast[None]


def _numbers(value: Any, where: str) -> Array:
    if _has_text(value):  # NumPy would give each element the size of the longest text
        raise ClientError(f"{where} is {str(value)[:60]}, expected numbers")
    try:
        array = np.array(value)
    except ValueError as error:
        raise ClientError(f"{where} has rows of different lengths") from error
    if array.dtype.kind not in "biuf":
        raise ClientError(f"{where} is {str(value)[:60]}, expected numbers")
    return array


def _has_text(value: Any) -> bool:
    if not isinstance(value, list):
        return isinstance(value, str)
    kinds = set(map(type, value))
    return str in kinds or (list in kinds and any(map(_has_text, value)))


def action_value(leaves: list[Array], layout: Layout) -> Any:
    """An action as plain JSON values, from its leaves with a row of one."""
    return layout.unflatten([leaf[0].tolist() for leaf in leaves])
