"""Fragments into transitions of up to n steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from corral.spaces import Layout
from corral.types import Array


@dataclass
class Steps:
    """A fragment for replay: [T, B], observations by number."""

    obs: Array  # int64
    next_obs: Array  # int64, the true successor
    action: list[Array]  # leaves
    reward: Array
    terminated: Array
    done: Array
    faulty: Array
    priority: Array  # float64, NaN where none is known yet


@dataclass
class Windows:
    """`m` transitions of one or more steps each, observations by number."""

    obs: Array
    next_obs: Array
    action: list[Array]
    reward: Array  # float32
    discount: Array  # float32
    priority: Array

    def take(self, rows: Array) -> Windows:
        """Some of them, by mask."""
        action = [leaf[rows] for leaf in self.action]
        kept = (x[rows] for x in (self.reward, self.discount, self.priority))
        return Windows(self.obs[rows], self.next_obs[rows], action, *kept)


class NStep:
    """Makes a transition of every step: the discounted sum of up to `n` rewards of its episode.

    With m <= n steps: reward = r[t] + ... + gamma^(m - 1) r[t + m - 1], discount = gamma^m (0 if the last step
    terminated), next_obs = the true successor of the last step. m < n where the episode ends, before a faulty row
    (as if truncated there), and where an environment does not go on from its last fragment. A transition comes
    out once its last step is known, so the last n - 1 steps of an environment wait for its next fragment.
    """

    def __init__(self, n: int, gamma: float, num_envs: int, action: Layout):
        self._n, self._gamma = n, gamma
        wait = n - 1, num_envs
        self._no = np.zeros(wait, np.bool_)  # steps that wait are neither an end nor faulty
        self._waiting = np.zeros(wait, np.bool_)
        self._obs, self._next_obs = np.zeros(wait, np.int64), np.zeros(wait, np.int64)
        self._reward, self._priority = np.zeros(wait, np.float64), np.zeros(wait, np.float64)
        self._action = [np.zeros((*wait, *leaf.shape), leaf.dtype) for leaf in action.leaves]

    def add(self, steps: Steps, env_ids: Array, goes_on: Array) -> Windows:
        """Take a fragment in, and give the transitions that are complete."""
        n, wait = self._n, self._n - 1
        length = wait + len(steps.reward)

        def after(kept: Array, new: Array) -> Array:
            return np.concatenate([kept[:, env_ids], new]) if wait else new

        obs, next_obs = after(self._obs, steps.obs), after(self._next_obs, steps.next_obs)
        reward, priority = after(self._reward, steps.reward), after(self._priority, steps.priority)
        action = [after(kept, new) for kept, new in zip(self._action, steps.action, strict=True)]
        terminated, faulty = after(self._no, steps.terminated), after(self._no, steps.faulty)
        ends = np.concatenate([self._no[:, env_ids], steps.done])
        ends[:-1] |= faulty[1:]
        if wait:
            ends[wait - 1] |= ~goes_on
        start = ~faulty
        start[:wait] = self._waiting[:, env_ids]

        total, last = np.zeros(reward.shape, np.float64), np.zeros(reward.shape, np.int64)
        complete, reaches = np.zeros_like(start), start.copy()
        for j in range(min(n, length)):  # windows that reach their j-th step
            rows = length - j
            here = reaches[:rows]
            total[:rows] += self._gamma**j * np.where(here, reward[j:], 0)
            last[:rows] += here
            complete[:rows] |= here & ends[j:] if j + 1 < n else here
            reaches[:rows] &= ~ends[j:]
        if wait:
            left = (start & ~complete)[length - wait :]
            self._keep(env_ids, left, (obs, next_obs, reward, priority, *action), length - wait)

        at, column = np.nonzero(complete)
        steps_taken = last[at, column]
        end = at + steps_taken - 1
        discount = self._gamma**steps_taken * ~terminated[end, column]
        return Windows(
            obs[at, column],
            next_obs[end, column],
            [leaf[at, column] for leaf in action],
            total[at, column].astype(np.float32),
            discount.astype(np.float32),
            priority[at, column],
        )

    def _keep(self, env_ids: Array, left: Array, columns: tuple[Array, ...], start: int) -> None:
        self._waiting[:, env_ids] = left
        for kept, new in zip(
            (self._obs, self._next_obs, self._reward, self._priority, *self._action), columns, strict=True
        ):
            kept[:, env_ids] = new[start:]

    def state_dict(self) -> dict[str, Any]:
        """The steps that wait for their successors."""
        return {
            "waiting": self._waiting,
            "obs": self._obs,
            "next_obs": self._next_obs,
            "reward": self._reward,
            "priority": self._priority,
            "action": {str(i): leaf for i, leaf in enumerate(self._action)},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from this state, of a store with the same settings."""
        for name in ("waiting", "obs", "next_obs", "reward", "priority"):
            getattr(self, f"_{name}")[:] = state[name]
        for i, leaf in enumerate(self._action):
            leaf[:] = state["action"][str(i)]
