"""A game as an environment: self-play, or an agent against an opponent."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np

from corral.core.errors import UserError
from corral.core.gym_env import require_legal
from corral.core.types import Array
from corral.envs.backends.local import LocalVecEnv
from corral.envs.backends.simulators.vec_env import LinkVecEnv
from corral.envs.suites.games.game import Game
from corral.envs.suites.games.players import Player, make_player
from corral.envs.vec_env import VecEnv

_CELL, _RADIUS = 48, 19
_BACK = np.array((32, 78, 156), np.uint8)
_COLOURS = np.array([(226, 232, 240), (214, 48, 49), (250, 196, 40)], np.uint8)  # empty, the first player, the second
_SIGNS = ".XO"


def as_picture(board: Array) -> Array:
    """A board, of each square's player, as an RGB image [height, width, 3] with a disc per square."""
    offset = np.arange(_CELL) - (_CELL - 1) / 2
    disc = offset[:, None] ** 2 + offset[None, :] ** 2 <= _RADIUS**2
    squares = np.where(disc[..., None], _COLOURS[board][:, :, None, None], _BACK)  # [rows, columns, y, x, 3]
    rows, columns = board.shape
    picture: Array = squares.transpose(0, 2, 1, 3, 4).reshape(rows * _CELL, columns * _CELL, 3)
    return picture


class BoardEnv(gymnasium.Env[Array, np.int64]):
    """Plays a game; observations are those of the player to move.

    Without an opponent, a step is a move of the player to move, who gets the reward: 1 for a win, else 0. With one, a
    step includes the opponent's reply, the first player alternates between episodes, and rewards are the agent's: 1 for
    a win, -1 for a loss, else 0.

    The legal moves are in `action_mask()` and in `info["action_mask"]`. Others raise ValueError: a search never makes
    them, but algorithms that ignore masks, such as plain PPO, do.

    Args:
        game: its rules.
        opponent: a Player, or one by name: `random`, `mcts:1000`, `perfect`, `module:name`; None: self-play.
        render_mode: `ansi` or `rgb_array`.
    """

    players = 2
    needs_masks = True
    metadata = {"render_modes": ["ansi", "rgb_array"], "render_fps": 2}  # noqa: RUF012 - as Gymnasium has it

    def __init__(self, game: Game, opponent: str | Player | None = None, render_mode: str | None = None):
        if render_mode is not None and render_mode not in self.metadata["render_modes"]:
            raise UserError(f"{game.name} cannot be shown with render_mode={render_mode!r}: use ansi or rgb_array.")
        self.game, self.render_mode = game, render_mode
        self.rows = game  # the model of `row`, so that states of this environment are `ArrayStates`
        self.observation_space, self.action_space = game.observation_space, game.action_space
        self.to_play = 0  # the player to move: 0, who made the first move, or 1
        self._opponent = None if opponent is None else make_player(game, opponent)
        self.answered = opponent is not None
        self._agent = 0  # the agent's player number
        self.row = game.start(1)[0]

    @property
    def row(self) -> Array:
        """The position; only positions of unfinished games may be set."""
        row: Array = self._states[0]
        return row

    @row.setter
    def row(self, row: Array) -> None:
        self._states, self.over = np.array(row, np.int64)[None], False

    def action_mask(self) -> Array:
        """1 where a move is legal, as `Discrete.sample(mask)` takes it; all 0 when the game is over."""
        return self._observe()[1]

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Array, dict[str, Any]]:
        """Start a game; agent and opponent alternate at making the first move, and a seed draws who begins."""
        super().reset(seed=seed)
        self.row, self.to_play = self.game.start(1)[0], 0
        if self._opponent is not None:
            self._agent = int(self.np_random.integers(2)) if seed is not None else 1 - self._agent
            if self._agent == 1:
                self._reply(self._opponent)
        obs, mask = self._observe()
        return obs, {"action_mask": mask}

    def step(self, action: np.int64 | int) -> tuple[Array, float, bool, bool, dict[str, Any]]:
        _, mask = self._observe()
        move = int(action)
        require_legal(self.game.name, move, mask)
        reward = self._move(move)
        if self._opponent is not None and not self.over:
            reward = 0.0 - self._reply(self._opponent)
        obs, mask = self._observe()
        return obs, reward, self.over, False, {"action_mask": mask}

    def render(self) -> Any:
        if self.render_mode is None:
            return None
        first, second = self._observe()[0].astype(np.int64)[:: -1 if self.to_play else 1]
        board = (first + 2 * second)[:: -1 if self.game.row_0_below else 1]
        if self.render_mode == "rgb_array":
            return as_picture(board)
        return "\n".join(" ".join(_SIGNS[player] for player in row) for row in board.tolist())

    def state_dict(self) -> dict[str, Any]:
        return {
            "position": self.row.copy(),
            "to_play": self.to_play,
            "over": self.over,
            "agent": self._agent,
            "generator": dict(self.np_random.bit_generator.state),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.row, self.to_play = state["position"], int(state["to_play"])
        self.over, self._agent = bool(state["over"]), int(state["agent"])
        self.np_random.bit_generator.state = state["generator"]

    def _observe(self) -> tuple[Array, Array]:
        obs, legal = self.game.look(self._states)
        return obs[0], (legal[0] & (not self.over)).astype(np.int8)

    def _move(self, action: int) -> float:
        reward, over = self.game.move(self._states, np.array([action]))
        self.to_play, self.over = 1 - self.to_play, bool(over[0])
        return float(reward[0])

    def _reply(self, opponent: Player) -> float:
        return self._move(int(opponent(self._states.copy(), self.np_random)[0]))


def is_self_play(vec: VecEnv) -> bool:
    """Whether these are self-play games, whose returns only count how often either player wins."""
    if isinstance(vec, LinkVecEnv):
        return vec.fleet.players > 1
    return isinstance(vec, LocalVecEnv) and getattr(vec.environment(0).unwrapped, "answered", None) is False


def game_of(vec: VecEnv) -> Game | None:
    """The game that these environments play, if any."""
    game = getattr(vec.environment(0).unwrapped, "game", None) if isinstance(vec, LocalVecEnv) else None
    return game if isinstance(game, Game) else None
