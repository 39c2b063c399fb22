"""PettingZoo games as environments: two players who move in turn, with action masks."""

from __future__ import annotations

import copy
import difflib
import importlib
import pkgutil
import tracemalloc
import warnings
import weakref
from typing import Any

import gymnasium
import numpy as np

from corral.core.errors import UserError
from corral.core.gym_env import require_legal
from corral.core.imports import import_named
from corral.core.types import Array
from corral.snapshot.keeper import CannotSave, Env, FindStart, StateKeeper

_IN_THE_EXTRA = ("pettingzoo", "pygame", "chess")
_HIDDEN_CARDS = ("pettingzoo.classic.rlcard_envs", "pettingzoo.classic.hanabi")
_TRIED_MOVES = 4


def make_aec(game: str, **kwargs: Any) -> Any:
    """Make an AEC environment: one of `pettingzoo.classic`, such as connect_four_v3, or your own `module:function`."""
    module, colon, name = game.partition(":")
    try:
        importlib.import_module("pettingzoo")
        if colon:
            return getattr(import_named(module), name)(**kwargs)
        classic = importlib.import_module("pettingzoo.classic")
        names = [found.name for found in pkgutil.iter_modules(classic.__path__) if not found.ispkg]
        if game not in names:
            close = ", ".join(difflib.get_close_matches(game, names, 3)) or ", ".join(names)
            raise UserError(f"pettingzoo.classic has no {game!r}: choose {close}, or pass your own module:function.")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # from a registry that older releases do not have
            return importlib.import_module(f"pettingzoo.classic.{game}").env(**kwargs)
    except ImportError as error:
        raise UserError(f"{game} needs a package that is not installed ({error}): {_how_to_install(error)}.") from error


def _how_to_install(error: ImportError) -> str:
    missing = (error.name or "").partition(".")[0]
    if missing in _IN_THE_EXTRA:
        return "pip install 'corral-rl[games]'"
    return f"pip install {missing or 'the one that it names'}"  # card games need packages that the extra leaves out


class AecEnv(gymnasium.Env[Array, np.int64]):
    """Self-play, with observations, rewards, action masks and errors as in `BoardEnv`."""

    players = 2
    needs_masks = True
    answered = False  # self-play: no opponent replies

    def __init__(self, aec: Any):
        self.aec = aec
        self.name = str(aec.metadata.get("name", aec))
        self.metadata, self.render_mode = aec.metadata, aec.render_mode
        if len(aec.possible_agents) != 2:
            raise UserError(f"{self.name} is for {len(aec.possible_agents)} players: choose a two-player game.")
        first, second = aec.possible_agents
        for what in ("observation_space", "action_space"):
            if getattr(aec, what)(first) != getattr(aec, what)(second):
                raise UserError(f"{self.name} has a different {what} for each player; a policy for both needs one.")
        seen, self.action_space = aec.observation_space(first), aec.action_space(first)
        if isinstance(seen, gymnasium.spaces.Dict) and "observation" in seen.spaces:
            seen = seen["observation"]
        self.observation_space = seen
        aec.reset(seed=0)
        self.view()  # raises now if the game has no action masks

    @property
    def to_play(self) -> int:
        return int(self.aec.possible_agents.index(self.aec.agent_selection))

    def view(self) -> tuple[Array, Array]:
        """The observation of the player to move, and a mask of the legal moves, all 0 when the game is over."""
        aec, agent = self.aec, self.aec.agent_selection
        seen = aec.observe(agent)
        parts = seen if isinstance(seen, dict) else {}
        mask = parts.get("action_mask", aec.infos.get(agent, {}).get("action_mask"))
        if mask is None:
            raise UserError(
                f"{self.name} has no mask of legal moves: let observe() return a dict of 'observation' and "
                "'action_mask', or put 'action_mask' into its infos."
            )
        over = any(self.ends())
        return np.array(parts.get("observation", seen)), np.array(mask, np.int8) * np.int8(not over)

    def ends(self) -> tuple[bool, bool]:
        return any(self.aec.terminations.values()), any(self.aec.truncations.values())

    def move(self, action: int) -> float:
        mover = self.aec.agent_selection
        self.aec.step(action)
        return float(self.aec.rewards[mover])

    def state_keeper(self) -> AecKeeper:
        """A keeper for such games; UserError if a search would see hidden cards."""
        if type(self.aec.unwrapped).__module__.startswith(_HIDDEN_CARDS):
            raise UserError(f"{self.name} has hidden cards, which a search would reveal: train without search.")
        return AecKeeper()

    def __deepcopy__(self, memo: dict[int, Any]) -> AecEnv:
        made = memo[id(self)] = copy.copy(self)
        made.aec = copy_aec(self.aec)
        return made

    def action_mask(self) -> Array:
        return self.view()[1]

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Array, dict[str, Any]]:
        super().reset(seed=seed)
        self.aec.reset(seed=int(self.np_random.integers(2**31)) if seed is None else seed, options=options)
        obs, mask = self.view()
        return obs, {"action_mask": mask}

    def step(self, action: np.int64 | int) -> tuple[Array, float, bool, bool, dict[str, Any]]:
        _, mask = self.view()
        move = int(action)
        require_legal(self.name, move, mask)
        reward = self.move(move)
        obs, mask = self.view()
        return obs, reward, *self.ends(), {"action_mask": mask}

    def render(self) -> Any:
        return self.aec.render()

    def close(self) -> None:
        self.aec.close()


class AecKeeper(StateKeeper):
    """Keeps copies of games. A loaded game is shared with its state, and copied before the next step."""

    level = 2
    capabilities = ("rng_in_state",)
    players = 2

    def __init__(self) -> None:
        self._shared: weakref.WeakSet[Env] = weakref.WeakSet()  # environments whose game is also a state
        self._nbytes = 0  # of a copy; 0 until one has been tested

    def save(self, env: Env, find_start: FindStart | None = None) -> Any:
        base = _aec_env(env)
        if find_start is None:
            self._shared.add(env)
            return base.aec
        if not self._nbytes:
            self._nbytes = _try_out(base)
        return copy_aec(base.aec)

    def load(self, env: Env, kept: Any) -> None:
        _aec_env(env).aec = kept
        self._shared.add(env)

    def release(self, env: Env) -> None:
        base = _aec_env(env)
        base.aec = copy_aec(base.aec)
        self._shared.discard(env)

    def step(self, env: Env, action: Any) -> Any:
        """Make a legal move without checking it again."""
        base = _aec_env(env)
        if env in self._shared:
            self.release(env)
        reward = base.move(int(action))
        obs, mask = base.view()
        return obs, reward, *base.ends(), {"action_mask": mask}

    def reseed(self, env: Env, seed: int) -> None:
        """Does nothing: moves draw no random numbers."""

    def rng_state(self, env: Env) -> None:
        return None

    def nbytes(self, kept: Any) -> int:
        return self._nbytes


def _aec_env(env: Env) -> AecEnv:
    base = env.unwrapped
    assert isinstance(base, AecEnv)
    return base


def _try_out(env: AecEnv) -> int:
    """Check that copies of a game continue like it and do not affect it; returns the bytes of one."""
    before, twin = _shown(env), copy.copy(env)
    tracing = tracemalloc.is_tracing()
    tracemalloc.start()
    start = tracemalloc.get_traced_memory()[0]
    one, other = copy_aec(env.aec), copy_aec(env.aec)
    size = (tracemalloc.get_traced_memory()[0] - start) // 2
    if not tracing:
        tracemalloc.stop()
    twin.aec = one
    same = _shown(twin) == before
    for _ in range(_TRIED_MOVES):
        twin.aec = one
        legal = np.flatnonzero(twin.view()[1])
        if not (same and len(legal)):
            break
        shown = []
        for twin.aec in (one, other):
            twin.move(int(legal[0]))
            shown.append(_shown(twin))
        same = shown[0] == shown[1] and _shown(env) == before
    if not same:
        raise CannotSave(
            f"{env.name} cannot be copied: a copy differs from the original, or changes it; keep its whole state in "
            "its own attributes"
        )
    return max(size, 1)


def _shown(env: AecEnv) -> tuple[bytes, bytes, int, Any]:
    obs, mask = env.view()
    return obs.tobytes(), mask.tobytes(), env.to_play, env.ends()


def copy_aec(aec: Any) -> Any:
    """A copy of a game that continues independently. `copy.deepcopy` would build a new game from its constructor
    arguments (gymnasium's EzPickle), so it is copied attribute by attribute; spaces and pygame objects are shared.
    """
    layers = [aec]
    while layers[-1] is not aec.unwrapped:
        layers.append(layers[-1].env)
    memo: dict[int, Any] = {}
    new: Any = None
    for layer in reversed(layers):
        memo.update((id(value), value) for value in vars(layer).values() if _is_shared(value))
        new = memo[id(layer)] = object.__new__(type(layer))
        vars(new).update((name, copy.deepcopy(value, memo)) for name, value in vars(layer).items())
    return new


def _is_shared(value: Any) -> bool:
    """Whether it is a space, or a pygame object, which cannot be copied; or a dict of those."""
    if isinstance(value, dict):
        return bool(value) and all(map(_is_shared, value.values()))
    return isinstance(value, gymnasium.Space) or type(value).__module__.partition(".")[0] == "pygame"
