"""Environments in a few words, as states: what a step leads to is a function."""

import numpy as np
from gymnasium import spaces

from corral.core.types import EnvSpec
from corral.snapshot.states import Expansion, Level, Rollouts, States, Views


class ScriptedStates(States):
    """`step(place, action, rng) -> (place, reward, terminated, truncated)`; `shown(place)` is the number that is seen.

    `legal(place)` are the actions that are, `turn(place)` is who acts. Without seeds the dice are always the same.
    """

    level = Level.MEMORY

    def __init__(
        self, step, actions, *, stochastic=False, players=1, legal=None, turn=lambda place: 0, shown=lambda place: place
    ):
        self.spec = EnvSpec(spaces.Box(-np.inf, np.inf, (1,), np.float32), spaces.Discrete(actions), "Scripted")
        self.stochastic, self.players = stochastic, players
        self._step, self._actions, self._legal, self._turn, self._shown = step, actions, legal, turn, shown
        self.kept, self._next = {}, 1

    def new_ids(self, count):
        self._next += count
        return np.arange(self._next - count, self._next)

    def put(self, places):
        ids = self.new_ids(len(places))
        self.kept.update(zip(ids.tolist(), places, strict=True))
        return ids

    def save(self, env_ids):
        return self.put([0] * len(env_ids))

    def load(self, ids, env_ids):
        return self.look(ids)

    def look(self, ids):
        return Views(*self._see([self.kept[i] for i in ids.tolist()]))

    def drop(self, ids):
        for i in ids.tolist():
            self.kept.pop(i, None)

    def expand(self, parents, actions, children, seeds=None):
        dice = [7] * len(parents) if seeds is None else seeds.tolist()
        rows = [
            self._step(self.kept[parent], action, np.random.default_rng(seed))
            for parent, action, seed in zip(parents.tolist(), np.asarray(actions).tolist(), dice, strict=True)
        ]
        places, reward, terminated, truncated = zip(*rows, strict=True)
        self.kept.update(zip(children.tolist(), places, strict=True))
        obs, legal, turn = self._see(places)
        ends = np.array(terminated, np.bool_), np.array(truncated, np.bool_)
        return Expansion(children, obs, np.array(reward, np.float64), *ends, legal, turn)

    def rollout(self, parents, actions, seeds=None):
        reward, length = np.zeros(actions.shape[:2]), np.zeros(len(parents), np.int64)
        ends, places = np.zeros((2, len(parents)), np.bool_), []
        for i, parent in enumerate(parents.tolist()):
            place, rng = self.kept[parent], np.random.default_rng(7 if seeds is None else seeds[i])
            for t, action in enumerate(np.asarray(actions[i]).tolist()):
                place, reward[i, t], *end = self._step(place, action, rng)
                length[i], ends[:, i] = t + 1, end
                if any(end):
                    break
            places.append(place)
        return Rollouts(reward, length, self._see(places)[0], *ends)

    def close(self):
        self.kept.clear()

    def _see(self, places):
        legal = None
        if self._legal is not None:
            legal = np.zeros((len(places), self._actions), np.bool_)
            for row, place in zip(legal, places, strict=True):
                row[list(self._legal(place))] = True
        turns = np.array([self._turn(place) for place in places], np.int8)
        return np.array([self._shown(place) for place in places], np.float32)[:, None], legal, turns
