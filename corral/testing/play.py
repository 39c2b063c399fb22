"""Play a VecEnv and keep every row per environment; play one environment, note its problems, and compare two plays."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import gymnasium
import numpy as np

from corral.core.gym_env import OLD_GYM, legal
from corral.core.spaces import Layout
from corral.core.types import Array, StepBatch, Tree, tree_map
from corral.envs.vec_env import VecEnv


@dataclass
class Row:
    """One environment's row of a StepBatch, with the observation its action was chosen on."""

    obs: Tree
    action: Tree
    reward: float
    raw_reward: float
    terminated: bool
    truncated: bool
    next_obs: Tree
    following: Tree  # what the policy saw next: next_obs, or the next episode's first observation
    faulty: bool
    game_over: bool

    @property
    def done(self) -> bool:
        return self.terminated or self.truncated


def random_actions(vec: VecEnv, seed: int = 0) -> Callable[[StepBatch], Tree]:
    """A policy that draws from the action space."""
    vec.spec.action_space.seed(seed)

    def act(batch: StepBatch) -> Tree:
        return vec.spec.action.stack([vec.spec.action_space.sample() for _ in range(len(batch))])

    return act


def play(
    vec: VecEnv, rows_each: int, *, act: Callable[[StepBatch], Tree] | None = None, min_ready: int | None = None
) -> list[list[Row]]:
    """Play until every environment has delivered `rows_each` rows; returns them per environment."""
    act = act or random_actions(vec)
    rows: list[list[Row]] = [[] for _ in range(vec.num_envs)]
    latest: dict[int, Tree] = {}
    chosen: dict[int, Tree] = {}
    batch = vec.recv()
    _remember(latest, batch.env_ids, batch.obs)
    while min(map(len, rows)) < rows_each:
        actions = act(batch)
        _remember(chosen, batch.env_ids, actions)
        vec.send(batch.env_ids, actions)
        batch = vec.recv(min_ready)
        for k, env_id in enumerate(batch.env_ids.tolist()):
            rows[env_id].append(_row(batch, k, latest[env_id], chosen[env_id]))
        _remember(latest, batch.env_ids, batch.obs)
    return [r[:rows_each] for r in rows]


def _row(batch: StepBatch, k: int, obs: Tree, action: Tree) -> Row:
    return Row(
        obs, action, float(batch.reward[k]), float(batch.raw_reward[k]), bool(batch.terminated[k]),
        bool(batch.truncated[k]), _at(batch.next_obs, k), _at(batch.obs, k), bool(batch.faulty[k]),
        bool(batch.game_over[k]),
    )  # fmt: skip


def _at(tree: Tree, k: int) -> Tree:
    return tree_map(lambda leaf: np.array(leaf[k]), tree)


def _remember(store: dict[int, Any], ids: Array, tree: Tree) -> None:
    for k, env_id in enumerate(ids.tolist()):
        store[env_id] = _at(tree, k)


Env = gymnasium.Env[Any, Any]

_PLAY_S = 10.0  # a slow simulator gets fewer steps rather than a long wait


@dataclass(frozen=True)
class Step:
    """What one step or reset returned, and when."""

    when: str
    obs: Any
    reward: Any = 0.0
    ends: tuple[bool, bool] = (False, False)
    action: Any = None  # None: a reset


@dataclass
class RandomPlay:
    """Results of some random steps. Each `*_problem` describes the first one of its kind."""

    steps: int = 0
    seconds: float = 0.0
    lengths: list[int] = field(default_factory=list)
    terminated: int = 0
    truncated: int = 0
    both: int = 0
    reward_low: float = math.inf
    reward_high: float = -math.inf
    step_problem: str = ""  # ends the play
    obs_problem: str = ""
    reward_problem: str = ""
    odd_dtype: str = ""
    odd_reward: str = ""
    odd_flags: str = ""
    overwrites: bool = False
    masked: bool = False  # whether it provides action masks


def play_at_random(play: RandomPlay, env: Env, layout: Layout, steps: int, seed: int) -> None:
    """Take random steps, starting new episodes as they end, and record the results in `play`."""
    obs, info = env.reset(seed=seed)
    env.action_space.seed(seed)
    play.masked = "action_mask" in info
    length, start = 0, time.perf_counter()
    while play.steps < steps and play.seconds < _PLAY_S:
        kept = copy.deepcopy(obs)
        result: Any = env.step(legal(env.action_space.sample(), info))
        play.steps += 1
        length += 1
        if not (isinstance(result, tuple) and len(result) == 5):
            size = f" of {len(result)}" if isinstance(result, tuple) else ""
            got = f"{type(result).__name__}{size}" + (f"; {OLD_GYM}" if size == " of 4" else "")
            play.step_problem = f"step() must return (obs, reward, terminated, truncated, info), got a {got}"
            return
        if not play.overwrites:
            play.overwrites = first_difference([Step("", obs)], [Step("", kept)], layout) is not None
        obs, reward, terminated, truncated, info = result
        _note_obs(play, obs, layout)
        _note_reward(play, reward)
        if not isinstance(info, dict):
            play.step_problem = f"the info of step() must be a dict, got {type(info).__name__}"
            return
        if _note_ends(play, terminated, truncated):
            play.lengths.append(length)
            length = 0
            obs, info = env.reset()
            _note_obs(play, obs, layout)
        play.seconds = time.perf_counter() - start


def rollout(env: Env, seed: int, actions: Sequence[Any]) -> list[Step]:
    """A seeded reset, then these actions; later episodes start without a seed, as in Corral. An illegal action is
    replaced by a legal one, which is recorded.
    """
    obs, info = env.reset(seed=seed)
    played = [Step("the first observation", copy.deepcopy(obs))]
    for number, action in enumerate(actions, 1):
        action = legal(action, info)
        obs, reward, terminated, truncated, info = env.step(action)
        ends = bool(terminated), bool(truncated)
        played.append(Step(f"step {number}", copy.deepcopy(obs), copy.deepcopy(reward), ends, action))
        if terminated or truncated:
            obs, info = env.reset()
            played.append(Step(f"the reset after step {number}", copy.deepcopy(obs)))
    return played


def first_difference(a: Sequence[Step], b: Sequence[Step], layout: Layout) -> str | None:
    """Describes where two plays differ, or None."""
    for x, y in zip(a, b, strict=False):
        for leaf, left, right in zip(layout.leaves, layout.flatten(x.obs), layout.flatten(y.obs), strict=True):
            if not _same(left, right):
                return x.when + (f" (leaf '{leaf.name}')" if len(layout.leaves) > 1 else "")
        if x.ends != y.ends:
            return f"{x.when} (terminated or truncated)"
        if not _same(x.reward, y.reward):
            return f"{x.when} (reward)"
    return None


def _same(a: Any, b: Any) -> bool:
    left, right = np.asarray(a), np.asarray(b)
    return np.array_equal(left, right, equal_nan=left.dtype.kind == right.dtype.kind == "f")


def _note_obs(play: RandomPlay, obs: Any, layout: Layout) -> None:
    if play.obs_problem:
        return
    if found := layout.problem(obs):
        play.obs_problem = f"at step {play.steps}, {found}"
        return
    for leaf, value in zip(layout.leaves, layout.flatten(obs), strict=True):
        array = np.asarray(value)
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            play.obs_problem = f"at step {play.steps}, observation leaf '{leaf.name}' is not finite"
        elif array.dtype != leaf.dtype and isinstance(value, np.ndarray) and not play.odd_dtype:
            play.odd_dtype = f"observation leaf '{leaf.name}' has dtype {array.dtype}, its space says {leaf.dtype}"


def _note_reward(play: RandomPlay, reward: Any) -> None:
    array = np.asarray(reward)
    if array.size != 1 or array.dtype.kind not in "fiub":
        play.reward_problem = play.reward_problem or f"at step {play.steps}, the reward is {reward!r}, not a number"
        return
    value = float(array.reshape(()))
    if not math.isfinite(value):
        play.reward_problem = play.reward_problem or f"at step {play.steps}, the reward is {value}"
    if array.shape:
        play.odd_reward = f"an array of shape {array.shape}"
    play.reward_low, play.reward_high = min(play.reward_low, value), max(play.reward_high, value)


def _note_ends(play: RandomPlay, terminated: Any, truncated: Any) -> bool:
    for flag in (terminated, truncated):
        if not isinstance(flag, (bool, np.bool_)):
            play.odd_flags = type(flag).__name__
    play.terminated += bool(terminated)
    play.truncated += bool(truncated)
    play.both += bool(terminated and truncated)
    return bool(terminated or truncated)
