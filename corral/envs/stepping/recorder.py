"""Restoring environments in another process: by replaying their actions, or by the state they declare.

A simulator's state cannot be copied in general, but its history can be repeated. A `Recorder` records how each
environment's current game began (the seed, or the state of its RNGs) and every action since. It repeats them in a new
environment and checks that the result is the same bit for bit.

- While an environment has made few steps since it was seeded, everything since then is replayed, so state that it keeps
  between episodes is restored as well. Later, only the current game is replayed.
- If an environment has `state_dict()` and `load_state_dict(state)`, of arrays, numbers, strings, and dicts and lists of
  them, these are used instead: those of the outermost wrapper, or of the environment inside if it has only Gymnasium's
  time limit and checks around it. This also restores what no observation shows.
- Anything else (randomness from the clock or a global RNG, a very long game) is detected and not restored.
"""

from __future__ import annotations

import logging
import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from corral.core.gym_env import Env
from corral.core.types import Array
from corral.envs.stepping.id_set import IdSet, SetCache
from corral.envs.stepping.rows import EnvRows
from corral.snapshot.keeper import CannotSave, EpisodeStart
from corral.snapshot.keepers.declared import declares, read_declared, write_declared
from corral.snapshot.live_env import GAME_STEPS, SINCE_SEED_STEPS, same_observation
from corral.snapshot.rng import (
    Generators,
    State,
    find_generators,
    find_space_generators,
    read_generators,
    same_state,
    write_generators,
)

log = logging.getLogger("corral.envs")

_BOUND_EVERY = 1024  # calls


class _History:
    """The history of one environment: how it began, and the bytes of every action since."""

    def __init__(self, record: int):
        self._record = record  # bytes of an action
        self.actions = bytearray()
        self.begin(None, {})
        self.known = False  # whether the beginning is known; not if recording starts in the middle of a game

    @property
    def steps(self) -> int:
        return len(self.actions) // self._record

    def begin(self, seed: int | None, generators: State) -> None:
        """Start a new history with a reset, seeded or not, with the RNGs in these states."""
        self.known, self.seed, self.generators = True, seed, generators
        self.game: tuple[int, State] | None = None  # the step at which the current game began, if later, and how
        self.actions.clear()

    def begin_game(self, generators: State) -> None:
        """Record a reset that starts another game; discard earlier games that are no longer needed."""
        if not self.known:
            self.begin(None, generators)
            return
        self.game = self.steps, generators
        if self.seed is None or self.steps > SINCE_SEED_STEPS:
            self._forget_past_games()

    def bound(self) -> None:
        if self.steps > GAME_STEPS:
            self._forget_past_games()
        self.known = self.known and self.steps <= GAME_STEPS
        if not self.known:
            self.actions.clear()

    def _forget_past_games(self) -> None:
        if self.game is not None:
            (at, self.generators), self.seed, self.game = self.game, None, None
            del self.actions[: at * self._record]


class Recorder:
    """The histories of some environments."""

    def __init__(self, rows: EnvRows):
        self._rows = rows
        self._sizes = [leaf.dtype.itemsize * math.prod(leaf.shape) for leaf in rows.spec.action.leaves]
        self._record = max(1, sum(self._sizes))
        self._histories: defaultdict[int, _History] = defaultdict(lambda: _History(self._record))
        self._of = SetCache[list[_History]](rows.num_envs)
        self._generators: dict[int, Generators] = {}  # searched once after each seed
        self._calls = 0

    def seeded(self, env_id: int, env: Env, seed: int) -> None:
        """Call before a seeded reset."""
        self._generators.pop(env_id, None)
        self._histories[env_id].begin(seed, read_generators(find_generators(env)))

    def next_game(self, env_id: int, env: Env) -> None:
        """Call before a reset without a seed that starts a new game."""
        found = self._generators.get(env_id)
        if found is None:
            found = self._generators[env_id] = find_generators(env)
        self._histories[env_id].begin_game(read_generators(found))

    def acted(self, chosen: IdSet) -> None:
        """Call before the actions in these rows are taken."""
        histories = self._of.get(chosen)
        if histories is None:
            histories = self._of[chosen] = [self._histories[env_id] for env_id in chosen.numbers]
        data, size, start = self._bytes(chosen), self._record, 0
        for history in histories:
            history.actions += data[start : start + size]
            start += size
        self._calls += 1
        if self._calls % _BOUND_EVERY == 0:
            for history in self._histories.values():
                history.bound()

    def forget(self, env_id: int) -> None:
        history = self._histories[env_id]
        history.begin(None, {})
        history.known = False

    def save(self, env_id: int, env: Env) -> State | None:
        if declares(env):
            return self._declared(env_id, env)
        history = self._histories[env_id]
        history.bound()
        if not history.known:
            return None
        return {
            "kind": "replay",
            "seed": history.seed,
            "generators": history.generators,
            "game": None if history.game is None else {"at": history.game[0], "generators": history.game[1]},
            "actions": np.frombuffer(bytes(history.actions), np.uint8).reshape(-1, self._record),
            "generators_now": read_generators(find_generators(env)),
        }

    def restore(self, env_id: int, env: Env, state: State | None, alive: Callable[[], None]) -> bool:
        """Bring a new environment to a saved state, whose observation is in its row; returns success."""
        if state is None:
            return False
        history, seed = self._histories[env_id], int(self._rows.seed[env_id])
        try:
            if state["kind"] == "declared":
                write_declared(env, state, seed)
                return True
            _, steps = self._replay(env, state, seed, self._rows.last_obs(env_id), alive)
            if steps != self._rows.step[env_id]:
                return False
        except (Exception, SystemExit):  # on any error, a new episode starts
            return False
        history.begin(state["seed"], state["generators"])
        history.actions += state["actions"].tobytes()
        history.game = None if state["game"] is None else (state["game"]["at"], state["game"]["generators"])
        return True

    def episode_start(self, env_id: int, env: Env) -> EpisodeStart | None:
        """How to bring another environment to the same state; None if that is not recorded."""
        state, seed = self.save(env_id, env), int(self._rows.seed[env_id])
        if state is None or state["kind"] != "replay":
            return None
        last_obs = [view.copy() for view in self._rows.last_obs(env_id)]

        def repeat(other: Env) -> Any:
            return self._replay(other, state, seed, last_obs, lambda: None)[0]

        return EpisodeStart(repeat, 1000 + int(state["actions"].nbytes))

    def _replay(
        self, env: Env, state: State, seed: int, last_obs: list[Array], alive: Callable[[], None]
    ) -> tuple[Any, int]:
        """Repeat a recording in a new environment; returns its observation, and the steps of its episode. `seed` is the
        last one that the environment got; `alive` is called at every step. CannotSave if the observation or the RNGs
        differ from those saved.
        """
        if state["seed"] is None:
            env.reset(seed=seed)  # builds what only a first reset builds
        write_generators(find_generators(env), state["generators"])
        obs, _ = env.reset(seed=state["seed"]) if state["seed"] is not None else env.reset()
        steps = 0
        for action in self._actions(state):
            alive()
            obs, _, terminated, truncated, _ = env.step(action)
            steps += 1
            if terminated or truncated:
                obs, _ = env.reset()
                steps = 0
        # An environment may make new spaces, with generators seeded by the system, in every reset (highway-env does).
        write_generators(find_space_generators(env), state["generators_now"])
        same = same_state(read_generators(find_generators(env)), state["generators_now"])
        if not (same and same_observation(self._rows.spec.observation, obs, last_obs)):
            raise CannotSave("replaying its actions led to a different state: it is not deterministic")
        return obs, steps

    def _actions(self, state: State) -> Iterator[Any]:
        """The actions of a saved state, one by one, each a copy that an environment may keep."""
        layout, data, start = self._rows.spec.action, state["actions"], 0
        columns = []
        for leaf, size in zip(layout.leaves, self._sizes, strict=True):
            column = np.ascontiguousarray(data[:, start : start + size]).view(np.uint8)
            columns.append(np.frombuffer(column.tobytes(), leaf.dtype).reshape(len(data), *leaf.shape))
            start += size
        for t in range(len(data)):
            yield layout.unflatten([column[t].copy() for column in columns])

    def _bytes(self, chosen: IdSet) -> bytes:
        leaves = [rows[chosen.index] for rows in self._rows.action]
        if len(leaves) == 1:
            return leaves[0].tobytes()
        flat = [np.ascontiguousarray(leaf).view(np.uint8).reshape(len(chosen), -1) for leaf in leaves if leaf.size]
        return np.concatenate(flat, axis=1).tobytes()

    def _declared(self, env_id: int, env: Env) -> State | None:
        try:
            state = read_declared(env)
            problem = _not_plain(state)
        except Exception as error:
            state, problem = {}, repr(error)
        if problem is None:
            return {"kind": "declared", **state}
        log.warning("environment %d cannot be saved, so a resumed run restarts its episode: %s", env_id, problem)
        return None


def _not_plain(state: Any, name: str = "its state_dict()") -> str | None:
    """Names the value in a state that cannot be written to a file, or None."""
    if isinstance(state, dict):
        odd = [key for key in state if not isinstance(key, str)]
        if odd:
            return f"{name} has the key {odd[0]!r}, which is not a string"
        return next((p for key, value in state.items() if (p := _not_plain(value, f"{name}[{key!r}]"))), None)
    if isinstance(state, list):
        return next((p for k, value in enumerate(state) if (p := _not_plain(value, f"{name}[{k}]"))), None)
    if isinstance(state, (np.ndarray, np.generic)):
        return None if state.dtype.kind in "biuf" else f"{name} is an array of {state.dtype}"
    plain = state is None or isinstance(state, (bool, int, float, str))
    return None if plain else f"{name} is a {type(state).__name__}"
