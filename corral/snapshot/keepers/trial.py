"""Trials before a keeper is used: the same steps must follow a state, whatever other instances do meanwhile.

A planner steps a scratch environment between the steps of the live one. If both use a class attribute, a global of
their module or the default client of a library, planning would change the live environment without a word.

A planner also reseeds the RNGs that Corral finds. Numbers from elsewhere, such as a generator that the environment has
written itself, would be foreseen. Such draws cannot be seen, but what they do: resets that look alike continue
differently for another seed, and reseeding does not. A hidden map does the same, and is foreseen as well.
"""

from __future__ import annotations

import contextlib
import copy
import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import gymnasium
import numpy as np

from corral.core.errors import UserError
from corral.core.gym_env import legal
from corral.core.spaces import Layout
from corral.snapshot.find_rng import RngFinder, unshare
from corral.snapshot.keeper import CannotSave, Env, StateKeeper
from corral.snapshot.keepers.fields import FieldsKeeper
from corral.snapshot.rng import put_back

log = logging.getLogger("corral.envs")

_STEPS = 12  # state that is first used after some steps would be missed by fewer
_SEEDS = 8  # resets among which two that look alike are searched
_BEGIN_AT, _CLOSE_AT = 6, 10  # when the other instance begins again, and when it is closed
_HIDDEN = "its steps depend on the seed of reset(), and reseeding does not change them"


class SharedState(UserError):
    """Instances of an environment share state of the process, so that planning would change the live one."""


class Trial:
    """Walks of an environment, which has been reset, from one state with the same actions.

    The state is loaded by `keeper`, and with `seed` reseeded; without a keeper, it is a reset with a seed.
    """

    def __init__(self, env: Env, keeper: StateKeeper | None, seed: int | None = None):
        self._env, self._keeper, self._seed, self._layout = env, keeper, seed, Layout(env.observation_space)
        self._actions, self._finder, self._drew = _sample(env, 0), RngFinder(), False
        self._wrappers = FieldsKeeper(base=False) if keeper is None and isinstance(env, gymnasium.Wrapper) else None
        self._kept: Any = None
        if keeper is not None:
            self._kept = keeper.save(env)
        elif self._wrappers is not None:
            try:
                self._kept = self._wrappers.save(env)
            except CannotSave:
                self._wrappers = None

    def repeats(self) -> bool:
        """Whether a second walk equals the first."""
        # Replays differ if they draw from the global RNGs; that is refused elsewhere, by its name.
        restore = put_back if self._keeper is None else contextlib.nullcontext
        with restore():
            self._alone = self._walk()
        with restore():
            return self._walk() == self._alone

    def require_isolated(self, make: Callable[[], Env], *, foresight: bool = False) -> str:
        """SharedState if another instance, from `make`, changes the walk. With `foresight`: returns a sentence if
        planners would foresee random numbers.
        """
        name, foreseen, built = type(self._env.unwrapped).__name__, "", None
        with put_back():
            try:
                built = make()
                with contextlib.suppress(Exception):  # what fails there fails in a search as well, with a message
                    foreseen = self._find_foreseen(built) if foresight else ""
                other = _Other(built, self._keeper, self._kept)
            except Exception as error:  # some simulators allow only a few instances
                log.warning("A second %s for planning cannot be built, so none tests its isolation: %r.", name, error)
                if built is not None:
                    built.close()
                return ""
        try:
            same = self._walk(other) == self._alone
        finally:
            other.close()
        if not same:
            raise SharedState(
                f"Instances of {name} share state of this process (a class attribute, a global, or a library's default "
                "client), so planning would change the environment that acts: keep all state in the instance, with "
                "PyBullet in a BulletClient of its own."
            )
        return foreseen and (
            f"A planner foresees what {name} does not show: {foreseen}; draw random numbers from self.np_random, or "
            "write reseed(seed) beside state_dict()."
        )

    def close(self) -> None:
        """Leave the environment in the state that the walks began from."""
        self._start()
        if self._keeper is not None:
            self._keeper.drop(self._kept)

    def _start(self) -> None:
        if self._keeper is not None:
            self._keeper.load(self._env, self._kept)
            if self._seed is not None:
                self._keeper.reseed(self._env, self._seed)
            return
        if self._wrappers is not None:
            self._wrappers.load(self._env, self._kept)
        self._env.reset(seed=0)
        if self._seed is not None:
            self._finder.reseed(self._env, self._seed)

    def _rng_state(self) -> Any:
        return self._finder.read(self._env) if self._keeper is None else self._keeper.rng_state(self._env)

    def _find_foreseen(self, other: Env) -> str:
        """Why planners would foresee random numbers, if they would; `other` is another instance to try resets with."""
        if self._drew:
            same = self._reseeded(1, self._rng_state) == self._reseeded(2, self._rng_state)
            return "its steps draw from generators that its keeper does not reseed" if same else ""
        seen: dict[bytes, int] = {}
        for seed in range(_SEEDS):
            shown = b"".join(np.asarray(leaf).tobytes() for leaf in self._layout.flatten(other.reset(seed=seed)[0]))
            if shown in seen:
                if self._walk_from(other, seed) == self._walk_from(other, seen[shown]):
                    return ""
                seeds = np.random.default_rng(0).integers(2**63, size=4).tolist()
                first, *others = (self._reseeded(each, self._walk) for each in seeds)
                return _HIDDEN if all(one == first for one in others) else ""
            seen[shown] = seed
        return ""

    def _reseeded(self, seed: int, look: Callable[[], Any]) -> Any:
        """What `look` returns if the state is reseeded by `seed`."""
        before, self._seed = self._seed, seed
        try:
            self._start()
            return look()
        finally:
            self._seed = before

    def _walk_from(self, env: Env, seed: int) -> list[Any]:
        """The results of all steps of another instance after this reset, to the end of its episode."""
        _, info = env.reset(seed=seed)
        seen: list[Any] = []
        for action in self._actions:
            *result, info = env.step(legal(action, info))
            seen.append(self._read(*result))
            if result[2] or result[3]:
                break
        return seen

    def _read(self, obs: Any, reward: Any, terminated: Any, truncated: Any) -> tuple[Any, ...]:
        leaves = [np.asarray(leaf).tobytes() for leaf in self._layout.flatten(obs)]
        return *leaves, float(np.asarray(reward).reshape(())), bool(terminated), bool(truncated)

    def _walk(self, other: _Other | None = None) -> list[Any]:
        """The results of all steps; after the end of an episode, or an error, the walk begins again and goes on."""
        seen: list[Any] = []
        begin, info, before, step = True, {}, None, self._env.step
        if self._keeper is not None:
            step = partial(self._keeper.step, self._env)
        for action in self._actions:
            if begin:
                self._start()
                info, before = _mask(self._env), self._rng_state()
            if other is not None:
                other.act()
            try:
                *result, info = step(legal(action, info))
                seen.append(self._read(*result))
                begin, self._drew = seen[-1][-2] or seen[-1][-1], self._drew or self._rng_state() != before
            except Exception as error:  # reported when a planner steps from a state
                begin = True
                seen.append(type(error))
        return seen


class _Other:
    """Another instance: each `act` does with it what a planner does, and nothing else."""

    def __init__(self, env: Env, keeper: StateKeeper | None, kept: Any):
        self._env, self._keeper, self._kept = env, keeper, kept
        self._actions, self._acts, self._over, self._closed = _sample(env, 1), 0, True, False
        self._info: dict[str, Any] = {}
        env.reset(seed=1)  # all were built with seed 0
        unshare(env)

    def act(self) -> None:
        turn, self._acts = self._acts, self._acts + 1
        with put_back(), contextlib.suppress(Exception):  # what fails here fails in a search as well, with a message
            if turn >= _CLOSE_AT:
                self.close()
            elif self._over or turn == _BEGIN_AT:
                self._begin(turn)
                self._over, self._info = False, _mask(self._env)
            else:
                self._over, action = True, legal(self._actions[turn], self._info)
                step = self._env.step if self._keeper is None else partial(self._keeper.step, self._env)
                *_, terminated, truncated, self._info = step(action)
                self._over = bool(terminated or truncated)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._env.close()

    def _begin(self, turn: int) -> None:
        if self._keeper is None:
            self._env.reset(seed=turn + 1)
        else:
            self._keeper.load(self._env, self._kept)


def _sample(env: Env, seed: int) -> list[Any]:
    space = copy.deepcopy(env.action_space)
    space.seed(seed)
    return [space.sample() for _ in range(_STEPS)]


def _mask(env: Env) -> dict[str, Any]:
    """The legal moves of a game, as in `info`."""
    base: Any = env.unwrapped
    return {"action_mask": base.view()[1]} if getattr(base, "players", 1) > 1 else {}
