"""Atari games as in the literature: skipped and pooled frames, 84 x 84 gray, four stacked.

`atari("Pong")` is one description for two implementations with identical results: the wrappers below, which run on any
backend, and ALE's vector environment, which `make_vec` prefers because it is several times faster.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from typing import Any

import gymnasium
from gymnasium.wrappers import ResizeObservation, TimeLimit

from corral.core.errors import UserError
from corral.envs import wrappers

_NAME = re.compile(r"(?:ALE/)?(?P<game>\w+?)(?:NoFrameskip|Deterministic)?(?:-v\d+)?")
_NEEDS_TWO_PLAYERS = {"combat", "joust", "maze_craze", "warlords"}


@dataclass(frozen=True)
class AtariSuite:
    """The standard Atari stack for one game. Call it to build one environment, or pass it to `make_vec`. A lost life
    ends an episode (`episodic_life`) but not the game: statistics are of whole games, in unclipped reward. FIRE
    (`fire_reset`) is pressed when a game starts.
    """

    game: str  # ALE's name, such as ms_pacman
    frame_skip: int = 4
    stack: int = 4
    size: int = 84
    episodic_life: bool = True
    clip_reward: bool = True
    fire_reset: bool = True
    noop_max: int = 30
    sticky: float = 0.0  # probability that the console repeats the last action instead
    max_frames: int = 108_000

    @property
    def name(self) -> str:
        return self.game.title().replace("_", "")

    def __call__(self, render_mode: str | None = None) -> gymnasium.Env[Any, Any]:
        env: Any = _console(self.game, self.sticky, render_mode)
        pressed = 0
        if self.fire_reset:
            env = wrappers.FireReset(env)
            pressed = int(env.fire is not None)
        env = wrappers.NoopReset(env, self.noop_max, pressed)
        env = TimeLimit(env, self.max_frames)  # outside the no-ops, which do not count
        env = wrappers.MaxAndSkip(env, self.frame_skip)
        if self.episodic_life:
            env = wrappers.EpisodicLife(env)
        if self.clip_reward:
            env = wrappers.ClipReward(env)
        env = ResizeObservation(env, (self.size, self.size))
        return wrappers.FrameStack(env, self.stack)


def atari(game: str = "Pong", **options: Any) -> AtariSuite:
    """The standard Atari stack for a game, named as `Pong`, `PongNoFrameskip-v4` or `ALE/Pong-v5`. The options are the
    fields of `AtariSuite`: `frame_skip`, `stack`, `size`, `episodic_life`, `clip_reward`, `fire_reset`, `noop_max`,
    `sticky` and `max_frames`.
    """
    try:
        suite = AtariSuite(find_game(game), **options)
    except TypeError:
        known = [name for name in AtariSuite.__dataclass_fields__ if name != "game"]
        wrong = [name for name in options if name not in known]
        raise UserError(f"atari() has no option {', '.join(wrong)}; it has {', '.join(known)}.") from None
    for name, least in (("frame_skip", 1), ("stack", 1), ("size", 1), ("noop_max", 0), ("max_frames", 1)):
        value = getattr(suite, name)
        if not isinstance(value, int) or value < least:
            raise UserError(f"atari({name}) must be an integer of at least {least}, got {value!r}.")
    if not 0.0 <= suite.sticky < 1.0:
        raise UserError(f"atari(sticky) is a probability below 1, got {suite.sticky!r}.")
    return suite


def is_atari_id(name: str) -> bool:
    """Whether an id is unambiguously an Atari id."""
    return name.startswith("ALE/") or "NoFrameskip-v" in name


def find_game(name: str) -> str:
    """ALE's name for a game; UserError names the closest ones if there is none."""
    roms = import_ale().roms
    games = {game.replace("_", ""): game for game in roms.get_all_rom_ids() if game not in _NEEDS_TWO_PLAYERS}
    match = _NAME.fullmatch(name)
    key = match["game"].replace("_", "").lower() if match else name.lower()
    if key not in games:
        close = [games[k].title().replace("_", "") for k in difflib.get_close_matches(key, games, 3, 0.5)]
        hint = f" Close: {', '.join(close)}." if close else ""
        raise UserError(f"No Atari game {name!r}.{hint} Games are named as in 'Pong' or 'ALE/Pong-v5'.")
    found: str = games[key]
    return found


def _console(game: str, sticky: float, render_mode: Any) -> gymnasium.Env[Any, Any]:
    """One game, frame by frame, in gray, with ALE's own seed as in the vector environment."""
    import_ale()
    from ale_py.env import AtariEnv

    class Console(AtariEnv):
        def seed_game(self, seed: int | None = None) -> tuple[int, int]:
            seeds: tuple[int, int] = super().seed_game(seed)
            if seed is not None:
                self.ale.setInt("random_seed", seed)
            return seeds

    options: dict[str, Any] = {"obs_type": "grayscale", "frameskip": 1, "repeat_action_probability": sticky}
    return Console(game, render_mode=render_mode, **options)


def import_ale() -> Any:
    """The ale_py module with its messages silenced; UserError explains how to install it."""
    try:
        import ale_py
        import cv2  # noqa: F401 - the wrappers resize with it
    except ImportError as error:
        raise UserError(
            f"Atari needs ALE and OpenCV ({error.name} is missing): pip install 'corral-rl[atari]'."
        ) from error
    ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)
    return ale_py
