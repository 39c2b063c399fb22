"""Converts fragments to n-step transitions."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from corral.core.jit import compiled
from corral.core.spaces import Layout
from corral.core.types import Array, Trajectory


@dataclass
class NStepWindows:
    """`m` transitions of one or more steps each, observations by number."""

    obs: Array
    next_obs: Array
    action: list[Array]
    reward: Array  # float32
    discount: Array  # float32
    priority: Array
    extras: dict[str, Array]  # of their first steps

    def take(self, rows: Array) -> NStepWindows:
        action = [leaf[rows] for leaf in self.action]
        extras = {name: column[rows] for name, column in self.extras.items()}
        reward, discount, priority = (x[rows] for x in (self.reward, self.discount, self.priority))
        return NStepWindows(self.obs[rows], self.next_obs[rows], action, reward, discount, priority, extras)


class NStep:
    """Makes one transition per step: the discounted sum of up to `n` rewards of its episode.

    With m <= n steps: reward = r[t] + ... + gamma^(m - 1) r[t + m - 1], discount = gamma^m (0 if the last step
    terminated), next_obs = the true successor of the last step. m < n at the end of an episode, before a faulty row (as
    if truncated there), and where an environment does not continue its last fragment. A transition is returned once its
    last step is known, so the last n - 1 steps of an environment wait for its next fragment.
    """

    def __init__(self, n: int, gamma: float, num_envs: int, action: Layout):
        self._wait, self._layout = n - 1, action
        self._powers = np.array([gamma**j for j in range(n + 1)])
        wait = n - 1, num_envs
        self._waiting = np.zeros(wait, np.bool_)
        self._obs, self._next_obs = np.zeros(wait, np.int64), np.zeros(wait, np.int64)
        self._reward, self._priority = np.zeros(wait, np.float64), np.zeros(wait, np.float64)
        self._action = [np.zeros((*wait, *leaf.shape), leaf.dtype) for leaf in action.leaves]
        self._extras: dict[str, Array] = {}  # allocated when the first arrive

    def add(
        self, traj: Trajectory, obs: Array, next_obs: Array, priority: Array, extras: dict[str, Array], continues: Array
    ) -> NStepWindows:
        """Add a fragment, with its observations and their true successors by number [T, B].

        `priority` is float64 [T, B], NaN where unknown; `continues` the environments [B] whose last episode goes on.
        """
        length, width = traj.shape
        most = (self._wait + length) * width
        first, last, row = (np.empty(most, np.int64) for _ in range(3))
        reward, discount = np.empty(most, np.float32), np.empty(most, np.float32)
        priorities = np.empty(most, np.float64)
        count = _compiled_assemble()(
            self._powers, traj.env_id, continues,
            (self._waiting, self._obs, self._next_obs, self._reward, self._priority),
            (obs, next_obs, traj.reward, priority, traj.terminated, traj.done, traj.faulty),
            (first, last, reward, discount, priorities, row),
        )  # fmt: skip
        for name, column in extras.items():
            if name not in self._extras:
                self._extras[name] = np.zeros((*self._waiting.shape, *column.shape[2:]), column.dtype)
        row, actions = row[:count], self._layout.flatten(traj.action)
        return NStepWindows(
            first[:count],
            last[:count],
            [self._column(*pair, traj.env_id, row) for pair in zip(self._action, actions, strict=True)],
            reward[:count],
            discount[:count],
            priorities[:count],
            {name: self._column(self._extras[name], new, traj.env_id, row) for name, new in extras.items()},
        )

    def _column(self, pending: Array, new: Array, env_ids: Array, row: Array) -> Array:
        """Index into pending steps followed by new ones; update the pending steps."""
        joined = np.concatenate([pending[:, env_ids], new]) if self._wait else new
        found: Array = joined.reshape(-1, *joined.shape[2:]).take(row, axis=0)
        if self._wait:
            pending[:, env_ids] = joined[len(joined) - self._wait :]
        return found

    def state_dict(self) -> dict[str, Any]:
        """The steps that wait for their successors."""
        return {
            "waiting": self._waiting,
            "obs": self._obs,
            "next_obs": self._next_obs,
            "reward": self._reward,
            "priority": self._priority,
            "action": {str(i): leaf for i, leaf in enumerate(self._action)},
            **({"extras": self._extras} if self._extras else {}),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name in ("waiting", "obs", "next_obs", "reward", "priority"):
            getattr(self, f"_{name}")[:] = state[name]
        for i, leaf in enumerate(self._action):
            leaf[:] = state["action"][str(i)]
        self._extras = {name: np.array(column) for name, column in state.get("extras", {}).items()}


def _assemble(
    powers: Array,
    env_ids: Array,
    continues: Array,
    pending: tuple[Array, ...],
    new: tuple[Array, ...],
    out: tuple[Array, ...],
) -> int:
    """Write the complete transitions to `out`, ordered by time and environment; returns their number.

    Rows 0 to n - 2 are the waiting steps, the others are new. The steps that wait afterwards replace the former.
    """
    waiting, pending_obs, pending_next, pending_reward, pending_priority = pending
    obs, next_obs, reward, priority, terminated, done, faulty = new
    out_obs, out_next, out_reward, out_discount, out_priority, out_row = out
    n, wait, steps, width = len(powers) - 1, len(powers) - 2, reward.shape[0], reward.shape[1]
    length, count = wait + steps, 0
    complete = np.zeros((length, width), np.bool_)
    for t in range(length):
        for b in range(width):
            i = env_ids[b]
            if not waiting[t, i] if t < wait else faulty[t - wait, b]:
                continue
            total = 0.0
            for j in range(min(n, length - t)):
                new_t = t + j - wait  # index among the new steps; negative for waiting steps, which did not end or fail
                total += powers[j] * (pending_reward[t + j, i] if new_t < 0 else reward[new_t, b])
                ends = (new_t == -1 and not continues[b]) or (new_t >= 0 and done[new_t, b])
                if ends or j + 1 == n or (-1 <= new_t < steps - 1 and faulty[new_t + 1, b]):
                    over = new_t >= 0 and terminated[new_t, b]
                    out_obs[count] = pending_obs[t, i] if t < wait else obs[t - wait, b]
                    out_next[count] = pending_next[t + j, i] if new_t < 0 else next_obs[new_t, b]
                    out_reward[count] = total
                    out_discount[count] = 0.0 if over else powers[j + 1]
                    out_priority[count] = pending_priority[t, i] if t < wait else priority[t - wait, b]
                    out_row[count] = t * width + b
                    complete[t, b] = True
                    count += 1
                    break
    for k in range(wait):  # ascending: row k is filled from a later row
        t = steps + k
        for b in range(width):
            i = env_ids[b]
            if t < wait:
                waiting[k, i] = waiting[t, i] and not complete[t, b]
                pending_obs[k, i], pending_next[k, i] = pending_obs[t, i], pending_next[t, i]
                pending_reward[k, i], pending_priority[k, i] = pending_reward[t, i], pending_priority[t, i]
            else:
                new_t = t - wait
                waiting[k, i] = not faulty[new_t, b] and not complete[t, b]
                pending_obs[k, i], pending_next[k, i] = obs[new_t, b], next_obs[new_t, b]
                pending_reward[k, i], pending_priority[k, i] = reward[new_t, b], priority[new_t, b]
    return count


_compiled_assemble = cache(lambda: compiled(_assemble))  # numba is imported on first use
