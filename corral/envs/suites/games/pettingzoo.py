"""Games of PettingZoo as environments: two players who move in turn, and masks that say which moves are legal."""

from __future__ import annotations

import difflib
import importlib
import pkgutil
import warnings
from typing import Any

import gymnasium
import numpy as np

from corral.core.errors import UserError
from corral.core.gym_env import require_legal
from corral.core.types import Array

_INSTALL = "pip install 'corral-rl[games]'"


def make_aec(game: str, **kwargs: Any) -> Any:
    """An AEC environment: one of `pettingzoo.classic`, such as connect_four_v3, or `module:function` of your own."""
    module, colon, name = game.partition(":")
    try:
        importlib.import_module("pettingzoo")
        if colon:
            return getattr(importlib.import_module(module), name)(**kwargs)
        classic = importlib.import_module("pettingzoo.classic")
        names = [found.name for found in pkgutil.iter_modules(classic.__path__) if not found.ispkg]
        if game not in names:
            close = ", ".join(difflib.get_close_matches(game, names, 3)) or ", ".join(names)
            raise UserError(f"pettingzoo.classic has no {game!r}: choose {close}, or give module:function of your own.")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of a registry that older releases do not have
            return importlib.import_module(f"pettingzoo.classic.{game}").env(**kwargs)
    except ImportError as error:
        raise UserError(f"{game} needs a package that is not there ({error}): {_INSTALL}.") from error


class AecEnv(gymnasium.Env[Array, np.int64]):
    """One player against itself, as `BoardEnv`: a step is a move of whoever is to move, its reward the mover's.

    Observations are what who is to move sees. Moves that are not legal raise ValueError; which are is in
    `action_mask()` and `info["action_mask"]`.
    """

    answered = False
    """Nobody but the agent moves."""

    def __init__(self, aec: Any):
        self.aec = aec
        self.name = str(aec.metadata.get("name", aec))
        self.metadata, self.render_mode = aec.metadata, aec.render_mode
        if len(aec.possible_agents) != 2:
            raise UserError(f"{self.name} is for {len(aec.possible_agents)} players: take a game for two.")
        first, second = aec.possible_agents
        for what in ("observation_space", "action_space"):
            if getattr(aec, what)(first) != getattr(aec, what)(second):
                raise UserError(f"{self.name} has another {what} for each player: a policy for both needs the same.")
        seen, self.action_space = aec.observation_space(first), aec.action_space(first)
        if isinstance(seen, gymnasium.spaces.Dict) and "observation" in seen.spaces:
            seen = seen["observation"]
        self.observation_space = seen
        aec.reset(seed=0)
        self.view()  # so that a game without masks is refused now

    @property
    def to_play(self) -> int:
        """Who is to move: 0 or 1, in PettingZoo's order."""
        return int(self.aec.possible_agents.index(self.aec.agent_selection))

    def view(self) -> tuple[Array, Array]:
        """What who is to move sees, and a mask of what is legal, all 0 when the game is over."""
        aec, agent = self.aec, self.aec.agent_selection
        seen = aec.observe(agent)
        parts = seen if isinstance(seen, dict) else {}
        mask = parts.get("action_mask", aec.infos.get(agent, {}).get("action_mask"))
        if mask is None:
            raise UserError(
                f"{self.name} does not say which moves are legal: let observe() return a dict of 'observation' and "
                "'action_mask', or put 'action_mask' into its infos."
            )
        over = any(self.ends())
        return np.array(parts.get("observation", seen)), np.array(mask, np.int8) * np.int8(not over)

    def ends(self) -> tuple[bool, bool]:
        """Whether the game is terminated, and whether it is truncated."""
        return any(self.aec.terminations.values()), any(self.aec.truncations.values())

    def move(self, action: int) -> float:
        """Make a legal move; the mover's reward."""
        mover = self.aec.agent_selection
        self.aec.step(action)
        return float(self.aec.rewards[mover])

    def action_mask(self) -> Array:
        """1 where a move is legal, as `Discrete.sample(mask)` takes it; all 0 when the game is over."""
        return self.view()[1]

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Array, dict[str, Any]]:
        """Begin a game; what it draws without a seed follows from the last one."""
        super().reset(seed=seed)
        self.aec.reset(seed=int(self.np_random.integers(2**31)) if seed is None else seed, options=options)
        obs, mask = self.view()
        return obs, {"action_mask": mask}

    def step(self, action: np.int64 | int) -> tuple[Array, float, bool, bool, dict[str, Any]]:
        """Make a move."""
        _, mask = self.view()
        move = int(action)
        require_legal(self.name, move, mask)
        reward = self.move(move)
        obs, mask = self.view()
        return obs, reward, *self.ends(), {"action_mask": mask}

    def render(self) -> Any:
        """As PettingZoo draws it."""
        return self.aec.render()

    def close(self) -> None:
        """Close it."""
        self.aec.close()
