"""The data that all of Corral exchanges: environment specs, step batches, trajectories."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from corral.core.errors import UserError
from corral.core.spaces import Layout, Space

Array = NDArray[Any]
Tree = Any
"""An array, or nested dicts and tuples of arrays with the structure of a space."""


def tree_map(fn: Callable[..., Any], tree: Tree, *rest: Tree) -> Tree:
    """Apply `fn` to every leaf; further trees must have the first one's structure."""
    if isinstance(tree, dict):
        return {key: tree_map(fn, value, *(r[key] for r in rest)) for key, value in tree.items()}
    if isinstance(tree, tuple):
        return tuple(tree_map(fn, value, *(r[i] for r in rest)) for i, value in enumerate(tree))
    return fn(tree, *rest)


def stack_infos(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The infos of `n` environments in Gymnasium's format: per key an array of `n` values, zeros or None where an
    environment has none, and the mask `_key` of those that have one. Dicts become dicts of such arrays. A key that no
    environment has is missing.
    """
    stacked: dict[str, Any] = {}
    for key in dict.fromkeys(name for row in rows for name in row):
        has = np.array([key in row for row in rows])
        values = [row[key] for row in rows if key in row]
        if isinstance(values[0], Mapping):
            stacked[key] = stack_infos([row.get(key, {}) for row in rows])
        else:
            stacked[key] = _column(values, has)
        stacked[f"_{key}"] = has
    return stacked


def unstack_infos(infos: Mapping[str, Any], num_envs: int) -> list[dict[str, Any]]:
    """The infos of each environment, from Gymnasium's format (see `stack_infos`)."""
    rows: list[dict[str, Any]] = [{} for _ in range(num_envs)]
    for key, values in infos.items():
        if key.startswith("_") and key[1:] in infos:
            continue
        by_row = unstack_infos(values, num_envs) if isinstance(values, Mapping) else values
        if not isinstance(by_row, (list, tuple, np.ndarray)) or len(by_row) != num_envs:
            raise UserError(f"The info {key!r} of a vector environment must have {num_envs} rows, got {by_row!r}.")
        for i in np.flatnonzero(infos.get(f"_{key}", np.ones(num_envs, np.bool_))).tolist():
            rows[i][key] = by_row[i]
    return rows


def _column(values: list[Any], has: Array) -> Array:
    plain = all(isinstance(value, (bool, int, float, np.generic, np.ndarray)) for value in values)
    if plain and len({np.shape(value) for value in values}) == 1:
        found = np.asarray(values)
        column = np.zeros((len(has), *found.shape[1:]), found.dtype)
        column[has] = found
    else:
        column = np.full(len(has), None, dtype=object)
        for row, value in zip(np.flatnonzero(has).tolist(), values, strict=True):
            column[row] = value
    return column


@dataclass(frozen=True)
class EnvSpec:
    """Spaces, name and time limit of an environment."""

    observation_space: Space
    action_space: Space
    name: str = "environment"
    max_episode_steps: int | None = None
    needs_masks: bool = field(default=False, compare=False)  # earlier versions did not save it
    """Whether an action that its mask excludes is an error."""

    @cached_property
    def observation(self) -> Layout:
        return Layout(self.observation_space)

    @cached_property
    def action(self) -> Layout:
        return Layout(self.action_space)

    def to_json(self) -> dict[str, Any]:
        return {
            "observation": self.observation.to_json(),
            "action": self.action.to_json(),
            "name": self.name,
            "max_episode_steps": self.max_episode_steps,
            **({"needs_masks": True} if self.needs_masks else {}),
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> EnvSpec:
        observation, action = (Layout.from_json(data[name]).space for name in ("observation", "action"))
        return cls(observation, action, data["name"], data["max_episode_steps"], data.get("needs_masks", False))


@dataclass(slots=True)
class StepBatch:
    """Results of one step of `n` environments, with same-step autoreset. The receiver owns all arrays.

    Where an episode ended, `obs` is already the next episode's first observation and `first` is true, while `final_obs`
    holds the last observation of the ended episode. `final_obs` is None when no episode ended; otherwise its other rows
    equal `obs`, so `next_obs` is the true successor in every row.

    A `faulty` row is a step that never happened because the environment failed: its episode is truncated, its reward is
    0 and its `final_obs` is the last good observation. Keep it out of losses and statistics. `game_over` means that the
    game ended: a life lost under `EpisodicLife` terminates the row without it.

    `infos` has, per row, the values that `make_vec(info=...)` asked for, of the step, or of the reset in a row that no
    step led to; `first_infos` those of the reset where a new episode began. Both are None if none were asked for.
    """

    env_ids: Array  # [n] int64
    obs: Tree  # [n, ...]
    reward: Array  # [n] float64, used for training
    raw_reward: Array  # [n] float64, before clipping or scaling
    terminated: Array  # [n] bool
    truncated: Array  # [n] bool
    final_obs: Tree | None  # [n, ...]
    first: Array  # [n] bool, obs starts an episode
    faulty: Array  # [n] bool
    game_over: Array  # [n] bool
    infos: list[dict[str, Any]] | None = None  # [n]
    first_infos: list[dict[str, Any]] | None = None  # [n]

    @property
    def info(self) -> dict[str, Any]:
        """`infos` as arrays (see `stack_infos`); of an episode's end they belong to its last step."""
        return stack_infos(self.infos or [])

    @property
    def next_obs(self) -> Tree:
        return self.obs if self.final_obs is None else self.final_obs

    def take(self, rows: Array) -> StepBatch:
        ended = (self.terminated | self.truncated)[rows]
        final = None if self.final_obs is None or not ended.any() else self.final_obs
        chosen = np.arange(len(self))[rows].tolist()
        return StepBatch(
            self.env_ids[rows],
            tree_map(lambda leaf: leaf[rows], self.obs),
            self.reward[rows],
            self.raw_reward[rows],
            self.terminated[rows],
            self.truncated[rows],
            None if final is None else tree_map(lambda leaf: leaf[rows], final),
            self.first[rows],
            self.faulty[rows],
            self.game_over[rows],
            None if self.infos is None else [self.infos[i] for i in chosen],
            None if self.first_infos is None else [self.first_infos[i] for i in chosen],
        )

    def __len__(self) -> int:
        return len(self.env_ids)


@dataclass
class Trajectory:
    """`T` steps of `B` environments, time-major. Row `t` of `action` was chosen on row `t` of `obs`.

    `obs[t + 1]` is what the policy sees next: after the end of an episode, the next episode's first observation.
    `next_obs()` gives the true successors. `final_obs` holds the last observations of ended episodes once each, at the
    places in `final_at`.
    """

    obs: Tree  # [T + 1, B, ...]
    action: Tree  # [T, B, ...]
    reward: Array  # [T, B] float32
    raw_reward: Array  # [T, B] float64
    terminated: Array  # [T, B] bool
    truncated: Array  # [T, B] bool
    faulty: Array  # [T, B] bool
    first: Array  # [T + 1, B] bool
    env_id: Array  # [B] int64
    final_at: Array  # [K, 2] int64, the (t, b) of each ended episode
    final_obs: Tree  # [K, ...]
    version: Array = field(default_factory=lambda: np.zeros((), np.int64))  # policy version that acted
    extras: dict[str, Array] = field(default_factory=dict)  # [T, B, ...] what the policy recorded

    def next_obs(self) -> Tree:
        """True successor of every row, [T, B, ...]."""
        t, b = self.final_at[:, 0], self.final_at[:, 1]

        def successors(obs: Array, final: Array) -> Array:
            result = obs[1:].copy()
            result[t, b] = final
            return result

        return tree_map(successors, self.obs, self.final_obs)

    @property
    def done(self) -> Array:
        return self.terminated | self.truncated

    @property
    def valid(self) -> Array:
        """Rows that really happened; the others are faults without information, [T, B]."""
        return ~self.faulty

    @property
    def shape(self) -> tuple[int, int]:
        return self.reward.shape[0], self.reward.shape[1]


@dataclass(frozen=True)
class DataSpec:
    """The data an algorithm needs; the only place where it configures sampling, storage and policy lag."""

    unit: Literal["transition", "sequence", "episode"]
    length: int  # of a sequence in steps, or n of an n-step transition; sequences carry one observation more
    batch_size: int  # transitions, sequences or episodes in a batch
    reuse: Literal["once", "replay"]
    extras: tuple[str, ...] = ()  # what acting must record
    max_lag: int | None = None  # in versions; 0: on-policy, None: unbounded (off-policy or corrected)
    samples_per_insert: float = 1.0  # with replay: how often a transition is drawn on average
    prioritised: bool = False
    priority_alpha: float = 0.6  # prioritised: exponent of priorities
    priority_beta: float = 0.4  # exponent of importance weights at the start; it rises to 1 with the run's progress
    priority_eps: float = 1e-6  # added to priorities
    capacity: int = 0  # with replay: transitions kept; with `replayed`: sequences
    min_size: int = 1  # with replay: transitions before the first batch
    gamma: float = 1.0  # with transitions: discount of the n-step sum
    replayed: float = 0.0  # with sequences used once: fraction of a batch that is sampled from earlier ones


@dataclass
class LossOutput:
    """Loss and metrics of one minibatch for one parameter group. `priorities` are [n], for replay. `loss` is a scalar
    tensor, or a number with a function `backward` that adds its gradient to that of the weights. `stop` and `rows` may
    be scalar tensors, which the learner reads from the device together with the rest.
    """

    loss: Any
    metrics: dict[str, Any]  # names -> scalar tensors or numbers
    priorities: Any = None
    stop: Any = False  # skip this minibatch and the following ones (target KL)
    rows: Any = 1  # number of rows the loss averages, its weight when averaging over learners; 0: the loss is a sum
    backward: Callable[[], None] | None = None
    group: str = ""  # name of the parameter group to step


@dataclass
class Transitions:
    """`n` transitions of one or more steps each: `reward` is their discounted sum.

    The target of a value is `reward + discount * V(next_obs)`; `discount` is `gamma ** steps`, or 0 where the episode
    terminated. A truncated episode bootstraps from `next_obs`, its true last observation.
    """

    obs: Tree  # [n, ...]
    action: Tree  # [n, ...]
    reward: Array  # [n] float32
    discount: Array  # [n] float32
    next_obs: Tree  # [n, ...]
    weight: Array  # [n] float32, importance weights, 1 where sampling is uniform
    extras: dict[str, Array] = field(default_factory=dict)  # [n, ...], what acting recorded at the first step


@dataclass
class Positions:
    """`n` steps sampled from complete episodes (AlphaZero positions)."""

    obs: Tree  # [n, ...]
    outcome: Array  # [n] float32, the return to the episode's end, for the acting player
    extras: dict[str, Array]  # [n, ...], what acting recorded


@dataclass
class Sample:
    """A batch from a store. `keys` identify its transitions for `feedback`; None if there is no feedback."""

    batch: Trajectory | Transitions | Positions
    keys: Array | None = None


def cat(parts: Sequence[Trajectory]) -> Trajectory:
    """Concatenate trajectories of the same length along the environment axis."""
    if len({p.shape[0] for p in parts}) != 1:
        raise ValueError(f"cat needs trajectories of one length, got {[p.shape[0] for p in parts]}")
    offsets = np.cumsum([0] + [p.shape[1] for p in parts[:-1]])
    joined: dict[str, Any] = {}
    for f in fields(Trajectory):
        values = [getattr(p, f.name) for p in parts]
        if f.name == "final_at":
            joined[f.name] = np.concatenate([v + np.array([0, o]) for v, o in zip(values, offsets, strict=True)])
        elif f.name == "version":
            joined[f.name] = np.concatenate(
                [np.broadcast_to(v, p.shape[1]) for v, p in zip(values, parts, strict=True)]
            )
        else:
            axis = 0 if f.name in ("env_id", "final_obs") else 1
            joined[f.name] = tree_map(lambda *xs, a=axis: np.concatenate(xs, a), *values)
    return Trajectory(**joined)


def slice_envs(traj: Trajectory, columns: Array) -> Trajectory:
    """Some environments of a trajectory, in the order given."""
    columns = np.asarray(columns)
    place = np.full(traj.shape[1], -1)
    place[columns] = np.arange(len(columns))
    kept = place[traj.final_at[:, 1]] >= 0
    final_at = traj.final_at[kept].copy()
    final_at[:, 1] = place[final_at[:, 1]]
    changes: dict[str, Any] = {
        f.name: tree_map(lambda x: x[:, columns], getattr(traj, f.name))
        for f in fields(Trajectory)
        if f.name not in ("env_id", "final_at", "final_obs", "version")
    }
    final_obs = tree_map(lambda x: x[kept], traj.final_obs)
    version = traj.version if traj.version.ndim == 0 else traj.version[..., columns]
    env_id = traj.env_id[columns]
    return replace(traj, **changes, env_id=env_id, final_at=final_at, final_obs=final_obs, version=version)
