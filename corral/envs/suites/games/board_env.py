"""A game as an environment: one player against itself, or an agent against an opponent."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np

from corral.core.errors import UserError
from corral.core.gym_env import require_legal
from corral.core.types import Array
from corral.envs.backends.local import LocalVecEnv
from corral.envs.suites.games.game import Game
from corral.envs.suites.games.players import Player, make_player
from corral.envs.vec_env import VecEnv

# Boards as text and as pictures.


_CELL, _RADIUS = 48, 19
_BACK = np.array((32, 78, 156), np.uint8)
_COLOURS = np.array([(226, 232, 240), (214, 48, 49), (250, 196, 40)], np.uint8)  # nobody, who began, the other
_SIGNS = ".XO"


def owners(game: Game, obs: Array, to_play: int) -> Array:
    """Whose square each is, [rows, columns] as drawn: 1 of who began, 2 of the other, 0 of nobody."""
    began, other = (obs[0], obs[1]) if to_play == 0 else (obs[1], obs[0])
    board: Array = began.astype(np.int64) + 2 * other.astype(np.int64)
    return board[::-1] if game.row_0_below else board


def as_text(board: Array) -> str:
    """A line for every row."""
    return "\n".join(" ".join(_SIGNS[owner] for owner in row) for row in board.tolist())


def as_picture(board: Array) -> Array:
    """Bytes [height, width, 3], a disc for every square."""
    offset = np.arange(_CELL) - (_CELL - 1) / 2
    disc = offset[:, None] ** 2 + offset[None, :] ** 2 <= _RADIUS**2
    squares = np.where(disc[..., None], _COLOURS[board][:, :, None, None], _BACK)  # [rows, columns, y, x, 3]
    rows, columns = board.shape
    picture: Array = squares.transpose(0, 2, 1, 3, 4).reshape(rows * _CELL, columns * _CELL, 3)
    return picture


class BoardEnv(gymnasium.Env[Array, np.int64]):
    """Plays a game; observations are the view of who is to move.

    Without an opponent, a step is a move of whoever is to move, and its reward the mover's: 1 for a win, else 0. With
    one, the opponent's moves are part of the steps, who begins changes from episode to episode, and rewards are the
    agent's: 1 for a win, -1 for a loss, 0 else.

    Which moves are legal is in `action_mask()` and in `info["action_mask"]`. Others raise ValueError: a search never
    makes them, but algorithms that do not look at masks, such as plain PPO, do.

    Args:
        game: what is played.
        opponent: a Player, or one by name: `random`, `mcts:1000`, `perfect`, `module:name`; None: the agent itself.
        render_mode: `ansi` or `rgb_array`.
    """

    metadata = {"render_modes": ["ansi", "rgb_array"], "render_fps": 2}  # noqa: RUF012 - as Gymnasium has it

    def __init__(self, game: Game, opponent: str | Player | None = None, render_mode: str | None = None):
        if render_mode is not None and render_mode not in self.metadata["render_modes"]:
            raise UserError(f"{game.name} cannot be shown with render_mode={render_mode!r}: use ansi or rgb_array.")
        self.game, self.render_mode = game, render_mode
        self.observation_space, self.action_space = game.observation_space, game.action_space
        self.to_play = 0
        """Who is to move: 0, who began, or 1."""
        self._opponent = None if opponent is None else make_player(game, opponent)
        self._agent = 0  # which of both it is
        self.position = game.start(1)[0]

    @property
    def position(self) -> Array:
        """The game's words. A position that is put on the board is one to play on from."""
        words: Array = self._states[0]
        return words

    @position.setter
    def position(self, words: Array) -> None:
        self._states, self.over = np.array(words, np.int64)[None], False

    @property
    def answered(self) -> bool:
        """Whether steps have an opponent's answers in them."""
        return self._opponent is not None

    def action_mask(self) -> Array:
        """1 where a move is legal, as `Discrete.sample(mask)` takes it; all 0 when the game is over."""
        return self._look()[1]

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Array, dict[str, Any]]:
        """Begin a game, the agent or its opponent in turn; a seed draws who is first."""
        super().reset(seed=seed)
        self.position, self.to_play = self.game.start(1)[0], 0
        if self._opponent is not None:
            self._agent = int(self.np_random.integers(2)) if seed is not None else 1 - self._agent
            if self._agent == 1:
                self._reply(self._opponent)
        obs, mask = self._look()
        return obs, {"action_mask": mask}

    def step(self, action: np.int64 | int) -> tuple[Array, float, bool, bool, dict[str, Any]]:
        """Make a move, and let the opponent answer it."""
        _, mask = self._look()
        move = int(action)
        require_legal(self.game.name, move, mask)
        reward = self._move(move)
        if self._opponent is not None and not self.over:
            reward = 0.0 - self._reply(self._opponent)
        obs, mask = self._look()
        return obs, reward, self.over, False, {"action_mask": mask}

    def render(self) -> Any:
        """The board, as text or as a picture."""
        if self.render_mode is None:
            return None
        board = owners(self.game, self._look()[0], self.to_play)
        return as_text(board) if self.render_mode == "ansi" else as_picture(board)

    def state_dict(self) -> dict[str, Any]:
        """All there is to it."""
        return {
            "position": self.position.copy(),
            "to_play": self.to_play,
            "over": self.over,
            "agent": self._agent,
            "generator": dict(self.np_random.bit_generator.state),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was called."""
        self.position, self.to_play = state["position"], int(state["to_play"])
        self.over, self._agent = bool(state["over"]), int(state["agent"])
        self.np_random.bit_generator.state = state["generator"]

    def _look(self) -> tuple[Array, Array]:
        obs, legal = self.game.look(self._states)
        return obs[0], (legal[0] & (not self.over)).astype(np.int8)

    def _move(self, action: int) -> float:
        """The mover's reward."""
        reward, over = self.game.move(self._states, np.array([action]))
        self.to_play, self.over = 1 - self.to_play, bool(over[0])
        return float(reward[0])

    def _reply(self, opponent: Player) -> float:
        return self._move(int(opponent(self._states.copy(), self.np_random)[0]))


# Who plays in an environment of a game: the agent for both sides, or against somebody.


def has_both_sides(vec: VecEnv) -> bool:
    """Whether an agent plays against itself there, so that its returns say only how often somebody wins."""
    return isinstance(vec, LocalVecEnv) and getattr(vec.environment(0).unwrapped, "answered", None) is False
