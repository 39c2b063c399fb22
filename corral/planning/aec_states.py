"""States of PettingZoo's games: copies of them, in memory.

`copy.deepcopy` alone is not enough: PettingZoo's environments tell it to build a new one from the arguments of the old
one (gymnasium's EzPickle). So they are copied attribute by attribute, without spaces and what draws, which they share.
The first copy proves itself: it must look and go on like the original, and leave it as it was.
"""

from __future__ import annotations

import copy
import tracemalloc
from collections.abc import Sequence
from typing import Any

import gymnasium
import numpy as np

from corral.core.errors import UserError
from corral.core.types import Array, EnvSpec, Tree
from corral.envs.suites.games.pettingzoo import AecEnv
from corral.snapshot.states import Expansion, Level, Rollouts, States, Views

_PROOF_MOVES = 4
_HIDDEN = ("pettingzoo.classic.rlcard_envs", "pettingzoo.classic.hanabi")


class AecStates(States):
    """Copies of the games that these environments play, by id."""

    level = Level.MEMORY
    players = 2

    def __init__(self, envs: Sequence[AecEnv], memory_mb: float = 1024.0):
        if type(envs[0].aec.unwrapped).__module__.startswith(_HIDDEN):
            raise UserError(f"{envs[0].name} has hidden cards, which a search would see: train without one.")
        self._envs = envs
        self.spec = EnvSpec(envs[0].observation_space, envs[0].action_space, envs[0].name)
        self._eye = copy.copy(envs[0])  # what looks at copies, and moves in them
        self._kept: dict[int, Any] = {}
        self._next = 1
        self._memory = memory_mb * 1e6
        self._most: int | None = None  # states; known after the first copy

    def new_ids(self, count: int) -> Array:
        """Numbers that were never given out before."""
        self._next += count
        return np.arange(self._next - count, self._next)

    def save(self, env_ids: Array) -> Array:
        """Copy the games."""
        ids = self.new_ids(len(env_ids))
        for env_id, key in zip(env_ids.tolist(), ids.tolist(), strict=True):
            if self._most is None:
                self._most = int(self._memory / self._prove(self._envs[env_id].aec))
            self._keep(key, copy_aec(self._envs[env_id].aec))
        return ids

    def load(self, ids: Array, env_ids: Array) -> Views:
        """Let environments go on from copies."""
        for key, env_id in zip(ids.tolist(), env_ids.tolist(), strict=True):
            self._envs[env_id].aec = copy_aec(self._get(key))
        return self.look(ids)

    def look(self, ids: Array) -> Views:
        """What who is to move sees there."""
        views, turns = [], []
        for key in ids.tolist():
            self._eye.aec = self._get(key)
            views.append(self._eye.view())
            turns.append(self._eye.to_play)
        return Views(_stack(views, 0), _stack(views, 1).astype(np.bool_), np.array(turns, np.int8))

    def drop(self, ids: Array) -> None:
        """Forget copies."""
        for key in ids.tolist():
            self._kept.pop(key, None)

    def expand(self, parents: Array, actions: Tree, children: Array, seeds: Array | None = None) -> Expansion:
        """Copy the parents, and move there. Actions must be legal; nobody throws dice."""
        if not ((children > 0) & (children < self._next)).all():
            raise UserError(f"Not all of {children.tolist()} were given out: take what save and expand have given.")
        rewards, ends = np.zeros(len(parents)), np.zeros((len(parents), 2), np.bool_)
        games = [self._going_on(parent) for parent in parents.tolist()]  # a child may take the place of a parent
        for i, (game, action, child) in enumerate(zip(games, actions, children.tolist(), strict=True)):
            self._eye.aec = copy_aec(game)
            rewards[i], ends[i] = self._eye.move(int(action)), self._eye.ends()
            self._keep(child, self._eye.aec)
        scene = self.look(children)
        return Expansion(children, scene.obs, rewards, ends[:, 0], ends[:, 1], scene.legal, scene.to_play)

    def rollout(self, parents: Array, actions: Tree, seeds: Array | None = None) -> Rollouts:
        """Play on in copies. Actions must be legal; rewards are of who moved."""
        count = actions.shape[1]
        rewards, length = np.zeros((len(parents), count)), np.zeros(len(parents), np.int64)
        ends, views = np.zeros((len(parents), 2), np.bool_), []
        for i, parent in enumerate(parents.tolist()):
            self._eye.aec = copy_aec(self._going_on(parent))
            while length[i] < count and not ends[i].any():
                rewards[i, length[i]] = self._eye.move(int(actions[i, length[i]]))
                ends[i] = self._eye.ends()
                length[i] += 1
            views.append(self._eye.view())
        return Rollouts(rewards, length, _stack(views, 0), ends[:, 0], ends[:, 1])

    def close(self) -> None:
        """Forget everything."""
        self._kept.clear()

    def _get(self, key: int) -> Any:
        if key not in self._kept:
            raise UserError(f"There is no state {key}: it was dropped, or never saved.")
        return self._kept[key]

    def _going_on(self, key: int) -> Any:
        """A game that is not over."""
        game = self._eye.aec = self._get(key)
        if any(self._eye.ends()):
            raise UserError(f"State {key} is the end of a game, from which there is no move.")
        return game

    def _keep(self, key: int, aec: Any) -> None:
        if self._most is not None and len(self._kept) >= self._most and key not in self._kept:
            raise UserError(
                f"A search of {self.spec.name} keeps {self._most:,} games and has room for no more: use fewer "
                "simulations or trees, or give it more memory_mb."
            )
        self._kept[key] = aec

    def _prove(self, aec: Any) -> int:
        """See that copies are what they must be; returns how many bytes one takes."""
        before, eye = self._shown(aec), self._eye
        tracing = tracemalloc.is_tracing()
        tracemalloc.start()
        start = tracemalloc.get_traced_memory()[0]
        one, other = copy_aec(aec), copy_aec(aec)
        size = (tracemalloc.get_traced_memory()[0] - start) // 2
        if not tracing:
            tracemalloc.stop()
        same = self._shown(one) == before
        for _ in range(_PROOF_MOVES):
            eye.aec = one
            legal = np.flatnonzero(eye.view()[1])
            if not (same and len(legal)):
                break
            for copied in (one, other):
                eye.aec = copied
                eye.move(int(legal[0]))
            same = self._shown(one) == self._shown(other) and self._shown(aec) == before
        if not same:
            raise UserError(
                f"{self.spec.name} cannot be copied: a copy of it is another game, or changes this one; let it keep "
                "its whole state in attributes of its own, so that it can be searched."
            )
        return max(size, 1)

    def _shown(self, aec: Any) -> tuple[bytes, bytes, int, Any]:
        self._eye.aec = aec
        obs, mask = self._eye.view()
        return obs.tobytes(), mask.tobytes(), self._eye.to_play, self._eye.ends()


def copy_aec(aec: Any) -> Any:
    """A game that goes on from here by itself."""
    layers = [aec]
    while layers[-1] is not aec.unwrapped:
        layers.append(layers[-1].env)
    memo: dict[int, Any] = {}
    new: Any = None
    for layer in reversed(layers):
        memo.update((id(value), value) for value in vars(layer).values() if _shared(value))
        new = memo[id(layer)] = object.__new__(type(layer))
        vars(new).update((name, copy.deepcopy(value, memo)) for name, value in vars(layer).items())
    return new


def _shared(value: Any) -> bool:
    """Spaces, and what draws, which cannot be copied; and dicts of them."""
    if isinstance(value, dict):
        return bool(value) and all(map(_shared, value.values()))
    return isinstance(value, gymnasium.Space) or type(value).__module__.partition(".")[0] == "pygame"


def _stack(views: list[tuple[Array, Array]], part: int) -> Array:
    return np.stack([view[part] for view in views])
