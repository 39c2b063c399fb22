"""States of a game, by row: the cheapest that can be, a copy of some words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from corral.core.errors import UserError
from corral.core.types import Array, EnvSpec, Tree
from corral.envs.suites.games.game import Game
from corral.snapshot.shelf import StateIndex
from corral.snapshot.states import Expansion, Level, Rollouts, States, Views


class Board(Protocol):
    """An environment that plays a game."""

    position: Array
    """Its words, as the game has them."""
    to_play: int
    """Who is to move, 0 or 1."""
    over: bool
    """Whether the game has ended."""


class GameStates(States):
    """Positions of a game; an id is a row. `boards` are the environments that `save` is about, if there are any."""

    level = Level.MEMORY
    players = 2

    def __init__(self, game: Game, boards: Sequence[Board] = (), memory_mb: float = 1024.0):
        self.game, self._boards = game, boards
        self.spec = EnvSpec(game.observation_space, game.action_space, game.name)
        self._shelf = StateIndex((), memory_mb * 16 / (16 + 8 * game.words + 1), game.name)
        self.rows, self._over = game.start(0), np.zeros(0, np.bool_)

    def new_ids(self, count: int) -> Array:
        """Rows that nothing is in."""
        ids, room = self._shelf.new_ids(count), len(self._shelf.home)
        if len(self.rows) < room:
            rows, over = self.game.start(room), np.zeros(room, np.bool_)
            rows[: len(self.rows)], over[: len(self.rows)] = self.rows, self._over
            self.rows, self._over = rows, over
        return ids

    def put(self, positions: Array, to_play: Array | int = 0) -> Array:
        """Keep positions that are not over; returns their ids."""
        ids = self.new_ids(len(positions))
        self.rows[ids], self._shelf.turn[ids], self._over[ids] = positions, to_play, False
        return ids

    def save(self, env_ids: Array) -> Array:
        """Keep what is on these boards."""
        boards = [self._boards[i] for i in env_ids.tolist()]
        ids = self.put(np.stack([board.position for board in boards]), np.array([board.to_play for board in boards]))
        self._over[ids] = [board.over for board in boards]
        return ids

    def load(self, ids: Array, env_ids: Array) -> Views:
        """Put positions on these boards."""
        scene = self.look(ids)
        for i, row, turn in zip(env_ids.tolist(), ids.tolist(), scene.to_play.tolist(), strict=True):
            board = self._boards[i]
            board.position, board.to_play, board.over = self.rows[row].copy(), turn, bool(self._over[row])
        return scene

    def look(self, ids: Array) -> Views:
        """What who is to move sees there."""
        self._shelf.require_given(ids)
        obs, legal = self._see(ids)
        return Views(obs, legal, self._shelf.turn[ids])

    def drop(self, ids: Array) -> None:
        """Give rows back."""
        self._shelf.release(ids)

    def expand(self, parents: Array, actions: Tree, children: Array, seeds: Array | None = None) -> Expansion:
        """Copy the parents' rows, and move there. Actions must be legal; there are no dice."""
        batch, turns = len(parents), self._shelf.turn
        self._require_going_on(parents)
        self._shelf.require_given(children)
        self.rows[children] = self.rows[parents]
        turns[children] = turn = 1 - turns[parents]
        reward, over = np.zeros(batch), np.zeros(batch, np.bool_)
        self.game.play(self.rows, children, actions, reward, over)
        self._over[children] = over
        obs, legal = self._see(children)
        return Expansion(children, obs, reward, over, np.zeros(batch, np.bool_), legal, turn)

    def rollout(self, parents: Array, actions: Tree, seeds: Array | None = None) -> Rollouts:
        """Play on from each position. Actions must be legal; rewards are of who moved."""
        self._require_going_on(parents)
        boards, count = self.rows[parents], actions.shape[1]
        reward, length = np.zeros((len(parents), count)), np.zeros(len(parents), np.int64)
        over, playing = np.zeros(len(parents), np.bool_), np.arange(len(parents))
        for t in range(count):
            states = boards[playing]
            reward[playing, t], over[playing] = self.game.move(states, actions[playing, t])
            boards[playing] = states
            length[playing] += 1
            playing = playing[~over[playing]]
        obs, _ = self.game.look(boards)
        return Rollouts(reward, length, obs, over, np.zeros_like(over))

    def close(self) -> None:
        """Forget everything."""
        self.drop(np.arange(len(self.rows)))

    def _require_going_on(self, ids: Array) -> None:
        self._shelf.require_given(ids)
        if self._over[ids].any():
            raise UserError(f"State {ids[self._over[ids]][0]} is the end of a game, from which there is no move.")

    def _see(self, ids: Array) -> tuple[Array, Array]:
        game = self.game
        obs, legal = np.zeros((len(ids), *game.shape), np.float32), np.zeros((len(ids), game.actions), np.bool_)
        game.observe(self.rows, ids, obs, legal)
        legal[self._over[ids]] = False
        return obs, legal
