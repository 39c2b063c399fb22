"""Trials before a keeper is used: the same steps must follow a state, whatever other instances do meanwhile.

A planner steps a scratch environment between the steps of the live one. If both use a class attribute, a global of
their module or the default client of a library, planning would change the live environment without a word.

A planner also reseeds the RNGs that Corral finds; numbers from a generator of the environment's own would be foreseen.
These draws cannot be seen, but what they do: resets that look alike continue differently for another seed, and
reseeding changes nothing. A hidden map does the same, and is foreseen as well.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Generator, Iterator
from functools import partial
from typing import Any

import gymnasium
import numpy as np

from corral.core.errors import UserError
from corral.core.gym_env import legal, sample_actions
from corral.core.spaces import Layout
from corral.snapshot.find_rng import RngFinder, unshare
from corral.snapshot.keeper import CannotSave, Env, StateKeeper
from corral.snapshot.keepers.fields import FieldsKeeper
from corral.snapshot.rng import put_back

log = logging.getLogger("corral.envs")

_STEPS = 12  # state that is first used after some steps would be missed by fewer
_SEEDS = 8  # resets among which two that look alike are searched
_BEGIN_AT, _CLOSE_AT = 6, 10  # when the other instance begins again, and when it is closed


class SharedState(UserError):
    """Instances of an environment share state of the process, so that planning would change the live one."""


class Trial:
    """Walks of an environment, which has been reset, from one state with the same actions.

    The state is loaded by `keeper`; without one, it is a reset with the seed `reset_seed`. With `seed` it is reseeded.
    """

    def __init__(self, env: Env, keeper: StateKeeper | None, seed: int | None = None, reset_seed: int = 0):
        self._env, self._keeper, self._seed, self._reset_seed = env, keeper, seed, reset_seed
        self._layout, self._actions = Layout(env.observation_space), sample_actions(env, _STEPS, 0)
        self._finder, self._drew = RngFinder(), False
        self._wrappers, self._kept = FieldsKeeper(base=False), None if keeper is None else keeper.save(env)
        if keeper is None and isinstance(env, gymnasium.Wrapper):
            with contextlib.suppress(CannotSave):
                self._kept = self._wrappers.save(env)

    def repeats(self) -> bool:
        """Whether a second walk equals the first."""
        # Replays differ if they draw from the global RNGs; that is refused elsewhere, by its name.
        restore = put_back if self._keeper is None else contextlib.nullcontext
        with restore():
            self._alone = self.walk()
        with restore():
            return self.walk() == self._alone

    def require_isolated(self, make: Callable[[], Env], *, foresight: bool = False) -> str:
        """SharedState if another instance, from `make`, changes the walk. With `foresight`: returns a sentence if
        planners would foresee random numbers.
        """
        name, foreseen = type(self._env.unwrapped).__name__, ""
        with put_back():
            try:
                built = make()
                with contextlib.suppress(Exception):  # what fails there fails in a search as well, with a message
                    foreseen = self._find_foreseen(built) if foresight else ""
                other = _planner_acts(built, self._keeper, self._kept)
                next(other)
            except Exception as error:  # some simulators allow only a few instances
                log.warning("A second %s for planning cannot be built, so none tests its isolation: %r.", name, error)
                return ""
        try:
            same = self.walk(other) == self._alone
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

    def walk(self, other: Iterator[None] | None = None) -> list[Any]:
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
                next(other, None)
            try:
                obs, reward, terminated, truncated, info = step(legal(action, info))
                begin = bool(terminated or truncated)
                seen.append((self._shown(obs), float(np.asarray(reward).reshape(())), bool(terminated), begin))
                self._drew |= self._rng_state() != before
            except Exception as error:  # reported when a planner steps from a state
                begin = True
                seen.append(type(error))
        return seen

    def close(self) -> None:
        """Leave the environment in the state that the walks began from."""
        self._start()
        if self._keeper is not None:
            self._keeper.drop(self._kept)

    def _start(self) -> None:
        if self._keeper is not None:
            self._keeper.load(self._env, self._kept)
        else:
            if self._kept is not None:
                self._wrappers.load(self._env, self._kept)
            self._env.reset(seed=self._reset_seed)
        if self._seed is not None:
            (self._keeper or self._finder).reseed(self._env, self._seed)

    def _shown(self, obs: Any) -> bytes:
        return b"".join(np.asarray(leaf).tobytes() for leaf in self._layout.flatten(obs))

    def _rng_state(self) -> Any:
        return self._finder.read(self._env) if self._keeper is None else self._keeper.rng_state(self._env)

    def _find_foreseen(self, other: Env) -> str:
        """Why planners would foresee random numbers, if they would; `other` is another instance to try resets with."""
        if self._drew:
            same = self._same_if_reseeded(self._rng_state)
            return "its steps draw from generators that its keeper does not reseed" if same else ""
        seen: dict[bytes, int] = {}
        for seed in range(_SEEDS):
            alike = seen.setdefault(self._shown(other.reset(seed=seed)[0]), seed)
            if alike == seed:
                continue
            differ = Trial(other, None, reset_seed=seed).walk() != Trial(other, None, reset_seed=alike).walk()
            if differ and self._same_if_reseeded(self.walk):
                return "its steps depend on the seed of reset(), and reseeding does not change them"
            break
        return ""

    def _same_if_reseeded(self, look: Callable[[], Any]) -> bool:
        """Whether `look` returns the same after several seeds."""
        before, found = self._seed, []
        try:
            for self._seed in np.random.default_rng(0).integers(2**63, size=4).tolist():
                self._start()
                found.append(look())
        finally:
            self._seed = before
        return all(one == found[0] for one in found)


def _planner_acts(env: Env, keeper: StateKeeper | None, kept: Any) -> Generator[None]:
    """Does with another instance what a planner does, and nothing else, at each `next` after the first."""
    over, info = True, dict[str, Any]()
    step = env.step if keeper is None else partial(keeper.step, env)
    try:
        env.reset(seed=1)  # all were built with seed 0
        unshare(env)
        for turn, action in enumerate(sample_actions(env, _CLOSE_AT, 1)):
            yield
            with (
                put_back(),
                contextlib.suppress(Exception),
            ):  # what fails fails in a search as well, with a message
                if not over and turn != _BEGIN_AT:
                    over = True  # if it raises
                    *_, terminated, truncated, info = step(legal(action, info))
                    over = bool(terminated or truncated)
                    continue
                if keeper is None:
                    env.reset(seed=turn + 1)
                else:
                    keeper.load(env, kept)
                over, info = False, _mask(env)
        yield
    finally:
        with put_back(), contextlib.suppress(Exception):
            env.close()


def _mask(env: Env) -> dict[str, Any]:
    """The legal moves of a game, as in `info`."""
    base: Any = env.unwrapped
    return {"action_mask": base.view()[1]} if getattr(base, "players", 1) > 1 else {}
