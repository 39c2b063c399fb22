"""Gymnasium spaces as flat leaf tables.

Every supported space (Box, Discrete, MultiDiscrete, MultiBinary, and nested Dict and Tuple of them) is a fixed list of
arrays. A `Layout` is that list: it knows each leaf's path, dtype and shape, converts trees to leaves and back, checks
values, and has a hash and a JSON form that survive a round trip.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from gymnasium import spaces as gs
from numpy.typing import NDArray

from corral.core.errors import UserError

Array = NDArray[Any]
Space = gs.Space[Any]

_ADVICE = {
    "Text": "encode the text as a fixed-size Box or MultiDiscrete, e.g. token ids padded to a maximum length",
    "Graph": "pad nodes and edges to a maximum and return a Dict of Boxes with masks",
    "Sequence": "pad to a maximum length and return a Dict of a Box and its length",
    "OneOf": "use a Dict with a Discrete that selects the active part",
}


@dataclass(frozen=True)
class Leaf:
    """One array of a space: its place in the tree, dtype, shape and bounds."""

    path: tuple[str | int, ...]
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    space: Space

    @property
    def name(self) -> str:
        """Path as a user would write it: `camera.left`, `0`, or `value` for a space that is one leaf."""
        return ".".join(map(str, self.path)) or "value"

    def problem(self, value: Array, what: str) -> str | None:
        """What is wrong with one unbatched value, or None."""
        if value.shape != self.shape:
            return f"{what} leaf '{self.name}' has shape {value.shape}, its space says {self.shape}"
        if not self.takes(value):
            return f"{what} leaf '{self.name}' has dtype {value.dtype}, its space says {self.dtype}"
        low, high = self.bounds
        if low is not None and high is not None and (np.any(value < low) or np.any(value > high)):
            found = f"is {value.item():g}" if value.size == 1 else f"has values in [{value.min():g}, {value.max():g}]"
            return f"{what} leaf '{self.name}' {found}, outside its space {self.space}"
        return None

    def takes(self, value: Array) -> bool:
        """Whether values of another dtype can be stored without changing kind or wrapping around."""
        if value.dtype == self.dtype:
            return True
        if value.dtype.kind in "iu" and self.dtype.kind in "iu":
            limits = np.iinfo(self.dtype)
            return not value.size or bool(value.min() >= limits.min and value.max() <= limits.max)
        return bool(np.can_cast(value.dtype, self.dtype, "same_kind"))

    @property
    def is_discrete(self) -> bool:
        return not isinstance(self.space, gs.Box)

    def in_range(self, values: Array) -> bool:
        """Whether all values of a discrete leaf, of one row or of many, are in its space."""
        if values.size <= 1 and self._count is not None:  # a reduction would cost 5 us
            return not values.size or bool(0 <= values.item() < self._count)
        start, counts = self._start, self._counts
        # One comparison: negative numbers are large when unsigned.
        shifted = (values if start is None else values - start).view(counts.dtype)
        if self._count is not None:
            return bool(np.maximum.reduce(shifted, axis=None) < self._count)
        return not (shifted >= counts).any()

    def outside(self, values: Array) -> Array:
        """Which rows of a batch of a discrete leaf have a value outside its space."""
        low, high = self.bounds
        return np.asarray(((values < low) | (values > high)).reshape(len(values), -1).any(1))

    @cached_property
    def _count(self) -> int | None:
        """The number of values, counted from 0, if that describes the range."""
        space = self.space
        if isinstance(space, gs.MultiBinary):
            return 2
        return int(space.n) if isinstance(space, gs.Discrete) and space.start == 0 else None

    @cached_property
    def _counts(self) -> Array:
        """The number of values of each element, unsigned."""
        space: Any = self.space
        counts = space.nvec if isinstance(space, gs.MultiDiscrete) else self._count or space.n
        return np.asarray(counts, f"u{self.dtype.itemsize}")

    @cached_property
    def _start(self) -> Array | None:
        """The first value of each element, None if all are 0."""
        low = self.bounds[0]
        return None if low is None or not low.any() else low.astype(self.dtype)

    @cached_property
    def bounds(self) -> tuple[Array, Array] | tuple[None, None]:
        """Lowest and highest value per element, or (None, None) if they are the dtype's."""
        space = self.space
        if isinstance(space, gs.Box):
            if not space.low.size or (space.dtype == np.uint8 and space.low.max() == 0 and space.high.min() == 255):
                return None, None
            return space.low, space.high
        if isinstance(space, gs.Discrete):
            return np.asarray(space.start), np.asarray(space.start + space.n - 1)
        if isinstance(space, gs.MultiDiscrete):
            start = getattr(space, "start", np.zeros_like(space.nvec))
            return start, start + space.nvec - 1
        return np.zeros((), np.int8), np.ones((), np.int8)


class Layout:
    """The leaf table of a space."""

    def __init__(self, space: Space):
        self.space = space
        self.leaves: tuple[Leaf, ...] = tuple(_walk(space, ()))
        self.single = isinstance(space, (gs.Box, gs.Discrete, gs.MultiDiscrete, gs.MultiBinary))

    def flatten(self, tree: Any) -> list[Any]:
        return [tree] if self.single else list(_flatten(self.space, tree))

    def unflatten(self, leaves: list[Any]) -> Any:
        return leaves[0] if self.single else _unflatten(self.space, iter(leaves))

    def arrays(self, tree: Any) -> list[Array]:
        """Leaves of one value, as new arrays of their dtypes."""
        return [np.array(value, leaf.dtype) for leaf, value in zip(self.leaves, self.flatten(tree), strict=True)]

    def stack(self, values: Sequence[Any]) -> Any:
        """Several values as one batch."""
        return self.unflatten([np.stack(leaf) for leaf in zip(*map(self.flatten, values), strict=True)])

    def empty(self, *lead: int) -> list[Array]:
        """Uninitialised arrays, one per leaf, with the given leading sizes."""
        return [np.empty((*lead, *leaf.shape), leaf.dtype) for leaf in self.leaves]

    def problem(self, tree: Any, what: str = "observation") -> str | None:
        try:
            values = self.flatten(tree)
        except (KeyError, IndexError, TypeError):
            return f"{what} {_short(tree)} does not have the structure of its space {self.space}"
        for leaf, value in zip(self.leaves, values, strict=True):
            try:
                array = np.asarray(value)
                array.dtype.type(0) if array.dtype != object else float(value)
            except (TypeError, ValueError):
                return f"{what} leaf '{leaf.name}' is {_short(value)}, not an array for {leaf.space}"
            if found := leaf.problem(array, what):
                return found
        return None

    @cached_property
    def discrete(self) -> list[tuple[int, Leaf]]:
        """The leaves with discrete values, and their places."""
        return [(k, leaf) for k, leaf in enumerate(self.leaves) if leaf.is_discrete]

    def outside(self, leaves: Sequence[Array]) -> Array | None:
        """Rows of a batch that have a discrete value outside its space, None if none has."""
        bad = [leaf.outside(leaves[k]) for k, leaf in self.discrete if not leaf.in_range(leaves[k])]
        return np.logical_or.reduce(bad) if bad else None

    def range_problem(self, leaves: Sequence[Array]) -> str | None:
        """What is wrong with the discrete values of one row, or None."""
        return next((text for k, leaf in self.discrete if (text := leaf.problem(leaves[k], "observation"))), None)

    def batch(self, tree: Any, n: int, what: str = "action") -> list[Array]:
        """Leaves of a batch of `n` values as arrays of the right dtype; UserError if they do not fit. Discrete values
        are checked against their range because native environments index memory with them.
        """
        if self.single:
            return [_batch_leaf(self.leaves[0], tree, n, what)]
        values = self.columns(tree, what)
        return [_batch_leaf(leaf, v, n, what) for leaf, v in zip(self.leaves, values, strict=True)]

    def columns(self, tree: Any, what: str = "action") -> list[Any]:
        """Leaves of a batch of values, or of a list with one value for each environment; not checked further."""
        if self.single:
            return [tree]
        try:
            if isinstance(tree, list) or (isinstance(tree, tuple) and not isinstance(self.space, gs.Tuple)):
                tree = self.stack(tree)
            return self.flatten(tree)
        except (KeyError, IndexError, TypeError, ValueError):
            raise UserError(f"{what} does not have the structure of its space {self.space}") from None

    def to_json(self) -> dict[str, Any]:
        return _to_json(self.space)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Layout:
        return cls(_from_json(data))

    @property
    def digest(self) -> str:
        """Hash of the space's structure, dtypes, shapes and bounds; equal for equal spaces in any process."""
        text = json.dumps(self.to_json(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Layout) and self.to_json() == other.to_json()

    def __hash__(self) -> int:
        return hash(self.digest)

    def __repr__(self) -> str:
        return f"Layout({self.space})"


def _walk(space: Space, path: tuple[str | int, ...]) -> Iterator[Leaf]:
    if isinstance(space, gs.Dict):
        for key, sub in space.spaces.items():
            yield from _walk(sub, (*path, key))
    elif isinstance(space, gs.Tuple):
        for index, sub in enumerate(space.spaces):
            yield from _walk(sub, (*path, index))
    elif isinstance(space, (gs.Box, gs.Discrete, gs.MultiDiscrete, gs.MultiBinary)):
        dtype = np.dtype(space.dtype) if space.dtype is not None else np.dtype(np.int64)
        if dtype == np.dtype(dtype.type):  # the canonical dtype object, so that `is` suffices
            dtype = np.dtype(dtype.type)
        yield Leaf(path, dtype, tuple(space.shape or ()), space)
    else:
        kind = type(space).__name__
        where = f" at '{'.'.join(map(str, path))}'" if path else ""
        why = "have no fixed size and " if kind in _ADVICE else ""
        advice = _ADVICE.get(kind, "use Box, Discrete, MultiDiscrete, MultiBinary, Dict or Tuple")
        if path:
            advice += (
                ", or leave it out by a wrapper (gymnasium.wrappers.FilterObservation; for MiniGrid "
                "minigrid.wrappers.ImgObsWrapper) in a function of your own, `--env my_env:make` (docs/environments.md)"
            )
        raise UserError(f"{kind} spaces{where} {why}are not supported: {advice}.")


def _flatten(space: Space, tree: Any) -> Iterator[Any]:
    if isinstance(space, gs.Dict):
        if len(tree) != len(space.spaces):
            raise KeyError(f"expected keys {list(space.spaces)}")
        for key, sub in space.spaces.items():
            yield from _flatten(sub, tree[key])
    elif isinstance(space, gs.Tuple):
        if len(tree) != len(space.spaces):
            raise IndexError(f"expected {len(space.spaces)} entries")
        for sub, value in zip(space.spaces, tree, strict=True):
            yield from _flatten(sub, value)
    else:
        yield tree


def _unflatten(space: Space, leaves: Iterator[Any]) -> Any:
    if isinstance(space, gs.Dict):
        return {key: _unflatten(sub, leaves) for key, sub in space.spaces.items()}
    if isinstance(space, gs.Tuple):
        return tuple(_unflatten(sub, leaves) for sub in space.spaces)
    return next(leaves)


def _batch_leaf(leaf: Leaf, value: Any, n: int, what: str) -> Array:
    if type(value) is not np.ndarray:
        if hasattr(value, "detach"):  # a torch tensor, without importing torch
            value = value.detach().cpu().numpy()
        value = np.asarray(value)
    array: Array = value
    if array.shape != (n, *leaf.shape):
        raise UserError(
            f"{what} leaf '{leaf.name}' has shape {array.shape}, expected {(n, *leaf.shape)}: "
            f"one row for each of the {n} environments sent to, each a member of {leaf.space}."
        )
    if array.dtype != leaf.dtype:
        if not leaf.takes(array):
            values = f" and values in [{array.min()}, {array.max()}]" if array.dtype.kind in "iu" else ""
            raise UserError(
                f"{what} leaf '{leaf.name}' has dtype {array.dtype}{values}, which {leaf.dtype} cannot hold; "
                f"expected values of {leaf.space}."
            )
        array = array.astype(leaf.dtype)
    if leaf.dtype.kind == "f":
        if np.count_nonzero(np.isfinite(array)) != array.size:
            bad = np.flatnonzero(~np.isfinite(array.reshape(n, -1)).all(axis=1)).tolist()
            raise UserError(f"{what} leaf '{leaf.name}' is NaN or infinite in rows {bad[:8]}; check the policy.")
    elif leaf.is_discrete and not leaf.in_range(array):
        raise UserError(
            f"{what} leaf '{leaf.name}' has values in [{array.min()}, {array.max()}], outside {leaf.space}."
        )
    return array


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _numbers(array: Array) -> Any:
    """JSON form of a bounds array: one number where all are equal, strings for infinities."""
    if array.size and (array == array.flat[0]).all():
        array = array.reshape(-1)[:1]
        return _number(array.tolist()[0])
    return [_number(x) for x in array.reshape(-1).tolist()]


def _number(x: float) -> float | str:
    return str(x) if isinstance(x, float) and not np.isfinite(x) else x


def _array(data: Any, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Array:
    if not isinstance(data, list):
        return np.full(shape, _bound(data, dtype), dtype)
    return np.array([_bound(each, dtype) for each in data], dtype).reshape(shape)


def _bound(value: Any, dtype: np.dtype[Any]) -> Any:
    """One number of a description; of integers, an infinite bound is the lowest or highest that the dtype has."""
    number = float(value) if isinstance(value, str) else value
    if dtype.kind not in "iu" or not isinstance(number, float):
        return number
    limits = np.iinfo(dtype)
    if math.isinf(number):
        return limits.min if number < 0 else limits.max
    if not limits.min <= number <= limits.max:
        raise UserError(f"{value!r} is no bound of {dtype.name}: give one from {limits.min} to {limits.max}.")
    return int(number)


def _to_json(space: Space) -> dict[str, Any]:
    if isinstance(space, gs.Dict):
        return {"type": "dict", "spaces": [[key, _to_json(sub)] for key, sub in space.spaces.items()]}
    if isinstance(space, gs.Tuple):
        return {"type": "tuple", "spaces": [_to_json(sub) for sub in space.spaces]}
    if isinstance(space, gs.Box):
        return {
            "type": "box",
            "dtype": np.dtype(space.dtype).name,
            "shape": list(space.shape),
            "low": _numbers(space.low),
            "high": _numbers(space.high),
        }
    if isinstance(space, gs.Discrete):
        return {"type": "discrete", "n": int(space.n), "start": int(space.start), "dtype": np.dtype(space.dtype).name}
    if isinstance(space, gs.MultiDiscrete):
        start = getattr(space, "start", np.zeros_like(space.nvec))
        return {
            "type": "multi_discrete",
            "dtype": np.dtype(space.dtype).name,
            "shape": list(space.nvec.shape),
            "nvec": space.nvec.reshape(-1).tolist(),
            "start": start.reshape(-1).tolist(),
        }
    if isinstance(space, gs.MultiBinary):
        return {"type": "multi_binary", "n": space.n if isinstance(space.n, int) else [int(k) for k in space.n]}
    raise AssertionError(f"{space} passed _walk but has no JSON form")


def _from_json(data: Mapping[str, Any]) -> Space:
    kind = data.get("type")
    if kind == "dict":
        return gs.Dict([(key, _from_json(sub)) for key, sub in data["spaces"]])
    if kind == "tuple":
        return gs.Tuple([_from_json(sub) for sub in data["spaces"]])
    if kind == "box":
        dtype, shape = np.dtype(data["dtype"]), tuple(data["shape"])
        return gs.Box(_array(data["low"], dtype, shape), _array(data["high"], dtype, shape), shape, dtype.type)
    if kind == "discrete":
        # Old Gymnasium knows int64 only, and takes no dtype.
        kind = {} if data["dtype"] == "int64" else {"dtype": np.dtype(data["dtype"]).type}
        return gs.Discrete(data["n"], start=data["start"], **kind)
    if kind == "multi_discrete":
        dtype, shape = np.dtype(data["dtype"]), tuple(data["shape"])
        return gs.MultiDiscrete(
            _array(data["nvec"], dtype, shape), dtype=dtype.type, start=_array(data["start"], dtype, shape)
        )
    if kind == "multi_binary":
        return gs.MultiBinary(data["n"])
    raise UserError(f"Unknown space type {kind!r} in a space description; known: box, discrete, "
                    "multi_discrete, multi_binary, dict, tuple.")  # fmt: skip
