"""Environments that go on where they were, in another process: by what they were told, or by what they declare.

A simulator's state cannot be copied in general, but what led to it can be repeated. A `Recorder` notes of every
environment how its current game began (the seed, or the state of its generators) and every action since.
`replay` does the same to a fresh environment and looks whether the same came out, bit by bit.

- While an environment has made few steps since it was seeded, everything since then is repeated, so whatever it
  keeps from one episode to the next is right as well. Later, only the current game is.
- An environment that has `state_dict()` and `load_state_dict(state)`, of arrays, numbers, strings, and dicts and
  lists of them, is asked instead: the outermost wrapper, or the environment inside where nothing but Gymnasium's
  time limit and checks is around it. This also restores what no observation shows.
- Anything else (randomness from the clock or a global generator, a very long game) is not restored, and found out.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from corral.core.gym_env import Env
from corral.core.spaces import Layout
from corral.core.types import Array
from corral.envs.stepping.id_set import IdSet
from corral.envs.stepping.rows import EnvRows
from corral.snapshot.keeper import CannotSave, EpisodeStart
from corral.snapshot.keepers.declared import declares, read_declared, write_declared
from corral.snapshot.rng import (
    Generators,
    State,
    find_generators,
    read_generators,
    same_state,
    write_generators,
)

log = logging.getLogger("corral.envs")

_SINCE_SEED_STEPS = 10_000  # repeated from the seed on up to here, so that a resume takes seconds
_GAME_STEPS = 50_000
_BOUND_EVERY = 1024  # calls
_MAX_SETS = 1024


class NotRestored(Exception):
    """What came out is not what was saved, or it could not be tried."""


class _Tape:
    """How one environment came to be where it is: a beginning, and the bytes of every action since."""

    def __init__(self, record: int):
        self._record = record  # bytes of an action
        self.actions = bytearray()
        self.begin(None, {})
        self.known = False  # the beginning, if recording starts in the middle of a game

    @property
    def steps(self) -> int:
        return len(self.actions) // self._record

    def begin(self, seed: int | None, generators: State) -> None:
        """Start anew with a reset, seeded or not, that finds the generators in these states."""
        self.known, self.seed, self.generators = True, seed, generators
        self.game: tuple[int, State] | None = None  # at which step the current game began, if later, and how
        self.actions.clear()

    def begin_game(self, generators: State) -> None:
        """Note a reset that starts another game; forget those before when they are no use any more."""
        if not self.known:
            self.begin(None, generators)
            return
        self.game = self.steps, generators
        if self.seed is None or self.steps > _SINCE_SEED_STEPS:
            self._forget_past_games()

    def bound(self) -> None:
        """Give up what has become too long."""
        if self.steps > _GAME_STEPS:
            self._forget_past_games()
        self.known = self.known and self.steps <= _GAME_STEPS
        if not self.known:
            self.actions.clear()

    def _forget_past_games(self) -> None:
        if self.game is not None:
            (at, self.generators), self.seed, self.game = self.game, None, None
            del self.actions[: at * self._record]


class Recorder:
    """The tapes of some environments."""

    def __init__(self, rows: EnvRows):
        self.rows = rows
        self._sizes = [leaf.dtype.itemsize * math.prod(leaf.shape) for leaf in rows.spec.action.leaves]
        self._record = max(1, sum(self._sizes))
        self._tapes: dict[int, _Tape] = {}
        self._of: dict[IdSet, list[_Tape]] = {}  # tapes of the sets in use
        self._generators: dict[int, Generators] = {}  # looked for once after each seed
        self._calls = 0

    def seeded(self, env_id: int, env: Env, seed: int) -> None:
        """A seeded reset is about to happen."""
        self._generators.pop(env_id, None)
        self._tape(env_id).begin(seed, read_generators(find_generators(env)))

    def next_game(self, env_id: int, env: Env) -> None:
        """A reset without a seed is about to start a new game."""
        found = self._generators.get(env_id)
        if found is None:
            found = self._generators[env_id] = find_generators(env)
        self._tape(env_id).begin_game(read_generators(found))

    def acted(self, chosen: IdSet) -> None:
        """The actions in these rows are about to be taken."""
        tapes = self._of.get(chosen)
        if tapes is None:
            if len(self._of) >= _MAX_SETS:
                self._of.clear()
            tapes = self._of[chosen] = [self._tape(env_id) for env_id in chosen.numbers]
        data, size, start = self._bytes(chosen), self._record, 0
        for tape in tapes:
            tape.actions += data[start : start + size]
            start += size
        self._calls += 1
        if self._calls % _BOUND_EVERY == 0:
            self._bound()

    def forget(self, env_id: int) -> None:
        """What was recorded of the current game is not how this environment came to be where it is."""
        tape = self._tape(env_id)
        tape.begin(None, {})
        tape.known = False

    def save(self, env_id: int, env: Env) -> State | None:
        """What restores this environment; None when nothing does."""
        if declares(env):
            return self._declared(env_id, env)
        tape = self._tape(env_id)
        tape.bound()
        if not tape.known:
            return None
        return {
            "kind": "replay",
            "seed": tape.seed,
            "generators": tape.generators,
            "game": None if tape.game is None else {"at": tape.game[0], "generators": tape.game[1]},
            "actions": np.frombuffer(bytes(tape.actions), np.uint8).reshape(-1, self._record),
            "generators_now": read_generators(find_generators(env)),
        }

    def load(self, env_id: int, state: State) -> None:
        """Go on recording where `save` was called."""
        if state["kind"] == "replay":
            tape = self._tape(env_id)
            tape.begin(state["seed"], state["generators"])
            tape.actions += state["actions"].tobytes()
            tape.game = None if state["game"] is None else (state["game"]["at"], state["game"]["generators"])

    def actions(self, state: State) -> Iterator[Any]:
        """The actions of a saved state, one by one, each a copy that an environment may keep."""
        layout, data, start = self.rows.spec.action, state["actions"], 0
        columns = []
        for leaf, size in zip(layout.leaves, self._sizes, strict=True):
            column = np.ascontiguousarray(data[:, start : start + size]).view(np.uint8)
            columns.append(np.frombuffer(column.tobytes(), leaf.dtype).reshape(len(data), *leaf.shape))
            start += size
        for t in range(len(data)):
            yield layout.unflatten([column[t].copy() for column in columns])

    def _tape(self, env_id: int) -> _Tape:
        tape = self._tapes.get(env_id)
        if tape is None:
            tape = self._tapes[env_id] = _Tape(self._record)
        return tape

    def _bytes(self, chosen: IdSet) -> bytes:
        """The actions in these rows, one after the other."""
        leaves = [rows[chosen.index] for rows in self.rows.action]
        if len(leaves) == 1:
            return leaves[0].tobytes()
        flat = [np.ascontiguousarray(leaf).view(np.uint8).reshape(len(chosen), -1) for leaf in leaves if leaf.size]
        return np.concatenate(flat, axis=1).tobytes()

    def _bound(self) -> None:
        for tape in self._tapes.values():
            tape.bound()

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


def restore(
    recorder: Recorder, env_id: int, env: Env, state: State | None, obs: list[Array], alive: Callable[[], None]
) -> bool:
    """Bring a fresh environment to a saved state; whether it is there. `obs` are the leaves it showed last."""
    rows = recorder.rows
    seed = int(rows.seed[env_id])
    try:
        if state is None:
            return False
        if state["kind"] == "declared":
            write_declared(env, state, seed)
        else:
            shown, steps = replay(env, state, seed, recorder.actions(state), alive)
            if steps != rows.step[env_id] or not same_observation(rows.spec.observation, shown, obs):
                return False
    except (Exception, SystemExit):  # whatever it is, a new episode is the answer
        return False
    recorder.load(env_id, state)
    return True


def replay(env: Env, state: State, seed: int, actions: Iterator[Any], alive: Callable[[], None]) -> tuple[Any, int]:
    """Repeat what was recorded on a fresh environment; its observation, and the steps of its episode.

    `seed` is the one that the environment got last; `alive` is called at every step. NotRestored when the
    environment's generators are not where they were when it was saved.
    """
    if state["seed"] is None:
        env.reset(seed=seed)  # builds what only a first reset builds
    write_generators(find_generators(env), state["generators"])
    obs, _ = env.reset(seed=state["seed"]) if state["seed"] is not None else env.reset()
    steps = 0
    for action in actions:
        alive()
        obs, _, terminated, truncated, _ = env.step(action)
        steps += 1
        if terminated or truncated:
            obs, _ = env.reset()
            steps = 0
    if not same_state(read_generators(find_generators(env)), state["generators_now"]):
        raise NotRestored
    return obs, steps


def same_observation(layout: Layout, obs: Any, saved: list[Array]) -> bool:
    """Whether an observation is the saved one, bit by bit."""
    return all(
        np.asarray(value, leaf.dtype).tobytes() == kept.tobytes()
        for leaf, value, kept in zip(layout.leaves, layout.flatten(obs), saved, strict=True)
    )


def _not_plain(state: Any, name: str = "its state_dict()") -> str | None:
    """What in a state could not be written to a file, or None."""
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


def episode_start(
    recorder: Recorder, env_id: int, env: Env, seed: int, layout: Layout, last_obs: list[Array]
) -> EpisodeStart | None:
    """What leads another environment to where this one is; None where that is not recorded."""
    state, expected = recorder.save(env_id, env), [view.copy() for view in last_obs]
    if state is None or state["kind"] != "replay":
        return None

    def repeat(other: Env) -> Any:
        try:
            obs, _ = replay(other, state, seed, recorder.actions(state), lambda: None)
        except NotRestored:
            obs = None
        if obs is None or not same_observation(layout, obs, expected):
            raise CannotSave("repeating its actions led elsewhere: it is not deterministic")
        return obs

    return EpisodeStart(repeat, 1000 + int(state["actions"].nbytes))
