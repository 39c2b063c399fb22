"""Evaluation of leaves: which actions are thought to be good, and what a position is worth to who is to move."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np

from corral.core.types import Array, Tree
from corral.planning.game_states import GameStates
from corral.planning.mcts.forest import NOT_THERE


class Verdict(NamedTuple):
    """What an evaluation says of rows; `actions` are those that edges stand for, where they are sampled."""

    priors: Array  # [B, edges] float32, -1 where there is no such edge
    values: Array  # [B] float32
    actions: Array | None = None  # [B, edges, ...]


class Evaluate(Protocol):
    """Rows of observations, legal actions and states' ids, 0 where the episode has ended -> a Verdict."""

    def __call__(self, obs: Tree, legal: Array, ids: Array) -> Verdict:
        """Called once for all leaves of a wave."""


def uniform(legal: Array) -> Array:
    """The same prior for every legal action."""
    share = np.float32(1) / np.maximum(np.count_nonzero(legal, axis=1, keepdims=True), 1).astype(np.float32)
    return np.where(legal, share, np.float32(NOT_THERE))


def know_nothing(obs: Tree, legal: Array, ids: Array) -> Verdict:
    """Uniform priors, and values of 0: what is left is what the tree itself finds."""
    return Verdict(uniform(legal), np.zeros(len(legal), np.float32))


class RandomGames:
    """Uniform priors, and the result of a game in which both sides move at random.

    What `RolloutEvaluation` finds with a horizon as long as the game, three times as fast: positions need no ids here.
    """

    def __init__(self, states: GameStates, seed: int):
        self._states, self._rng = states, np.random.default_rng(seed)

    def __call__(self, obs: Tree, legal: Array, ids: Array) -> Verdict:
        """Play on from each position."""
        return Verdict(uniform(legal), self._play_on(self._states.rows[ids], ids > 0).astype(np.float32))

    def _play_on(self, boards: Array, playing: Array) -> Array:
        """Results to who is to move in each of these positions at first; 0 where nobody plays."""
        game = self._states.game
        results, sign = np.zeros(len(boards)), 1.0
        rows = np.flatnonzero(playing)
        boards = boards[rows]
        while len(rows):
            _, legal = game.look(boards)
            chosen = np.argmax(legal * self._rng.random(legal.shape), axis=1)
            reward, over = game.move(boards, chosen)
            results[rows] += sign * reward
            rows, boards, sign = rows[~over], boards[~over], -sign
        return results
