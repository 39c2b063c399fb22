"""Evaluation of leaves: which actions are thought to be good, and what a position is worth to who is to move."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from corral.envs.suites.games.game import Game
from corral.planning.mcts.forest import NOT_THERE
from corral.types import Array, Tree


class Evaluate(Protocol):
    """Rows of observations, legal actions and states' ids -> priors [B, actions], -1 where illegal, and values [B]."""

    def __call__(self, obs: Tree, legal: Array, ids: Array) -> tuple[Array, Array]:
        """Called once for all leaves of a wave."""


def uniform(legal: Array) -> Array:
    """The same prior for every legal action."""
    share = np.float32(1) / np.maximum(np.count_nonzero(legal, axis=1, keepdims=True), 1).astype(np.float32)
    return np.where(legal, share, np.float32(NOT_THERE))


def know_nothing(obs: Tree, legal: Array, ids: Array) -> tuple[Array, Array]:
    """Uniform priors, and values of 0: what is left is what the tree itself finds."""
    return uniform(legal), np.zeros(len(legal), np.float32)


class RandomGames:
    """Uniform priors, and the mean result of games in which both sides move at random."""

    def __init__(self, game: Game, states: Array, seed: int, games: int = 1):
        """`states` are the positions that ids are rows of."""
        self._game, self._states, self._games = game, states, games
        self._rng = np.random.default_rng(seed)

    def __call__(self, obs: Tree, legal: Array, ids: Array) -> tuple[Array, Array]:
        """Play on from each position."""
        boards = np.repeat(self._states[ids], self._games, axis=0)
        results = self._play_on(boards, np.repeat(legal.any(axis=1), self._games))
        return uniform(legal), results.reshape(len(legal), self._games).mean(axis=1).astype(np.float32)

    def _play_on(self, boards: Array, playing: Array) -> Array:
        """Results to who is to move in each of these positions at first; 0 where nobody plays."""
        results, sign = np.zeros(len(boards)), 1.0
        rows = np.flatnonzero(playing)
        boards = boards[rows]
        while len(rows):
            _, legal = self._game.look(boards)
            chosen = np.argmax(legal * self._rng.random(legal.shape), axis=1)
            reward, over = self._game.move(boards, chosen)
            results[rows] += sign * reward
            rows, boards, sign = rows[~over], boards[~over], -sign
        return results
