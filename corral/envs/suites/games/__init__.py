"""Board games: rules as array functions of many positions, and environments, by factory or by id."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import gymnasium

if TYPE_CHECKING:
    from corral.envs.suites.games.board_env import BoardEnv
    from corral.envs.suites.games.pettingzoo import AecEnv
    from corral.envs.suites.games.players import Player

__all__ = ["Connect4", "PettingZoo", "TicTacToe"]


def Connect4(opponent: str | Player | None = None, render_mode: str | None = None) -> BoardEnv:
    """Connect Four, also as `corral/Connect4-v0`. See `BoardEnv`."""
    from corral.envs.suites.games.board_env import BoardEnv
    from corral.envs.suites.games.connect4 import CONNECT4

    return BoardEnv(CONNECT4, opponent, render_mode)


def TicTacToe(opponent: str | Player | None = None, render_mode: str | None = None) -> BoardEnv:
    """Tic-tac-toe, also as `corral/TicTacToe-v0`. See `BoardEnv`."""
    from corral.envs.suites.games.board_env import BoardEnv
    from corral.envs.suites.games.tictactoe import TICTACTOE

    return BoardEnv(TICTACTOE, opponent, render_mode)


def PettingZoo(game: str, **kwargs: Any) -> AecEnv:
    """A PettingZoo game: a classic one, such as connect_four_v3, or your own `module:function`."""
    from corral.envs.suites.games.pettingzoo import AecEnv, make_aec

    return AecEnv(make_aec(game, **kwargs))


for _name in ("Connect4", "TicTacToe"):
    gymnasium.register(f"corral/{_name}-v0", f"{__name__}:{_name}")
