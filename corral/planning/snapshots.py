"""`corral.Snapshots`: save, load and step from the states of an environment."""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

import gymnasium
import numpy as np

from corral.core.errors import UserError
from corral.core.gym_env import build_env, claim, release, spec_of
from corral.core.types import Array, Tree, tree_map
from corral.envs.backends.simulators.options import is_url
from corral.envs.make import make_vec
from corral.envs.resolve import EnvLike, resolve
from corral.envs.vec_env import VecEnv
from corral.snapshot.keepers.choose import make_scratch, scratch_like
from corral.snapshot.live_env import WatchedEnv
from corral.snapshot.make_states import make_states
from corral.snapshot.states import Expansion, Level, States


class Snapshots:
    """States of an environment by id: save, load, and step from them without touching the environment.

    ```python
    with corral.Snapshots("CartPole-v1") as snapshots:
        here = snapshots.save()
        steps = snapshots.expand([here, here], [0, 1])  # one step with each action
        snapshots.load(here)
    ```

    Args:
        env: an environment that you step yourself; a Gymnasium id, module:Class or factory, from which one is built and
            reset (see `env`); a VecEnv; or a URL of simulators.
        rng: `planning` reseeds every `expand` step, so a planner cannot foresee the environment's random numbers;
            `replay` uses those of the state, so that the result is what the environment will do.
        memory_mb: limit for all states; when it is used up, `save` and `expand` raise UserError.
        seed: seed of `planning`, and of an environment that is built here.
    """

    def __init__(
        self,
        env: gymnasium.Env[Any, Any] | VecEnv | EnvLike,
        *,
        rng: Literal["planning", "replay"] = "planning",
        memory_mb: float = 1024.0,
        seed: int = 0,
    ):
        if rng not in ("planning", "replay"):
            raise UserError(f"rng={rng!r} is not one of planning, replay.")
        if not memory_mb > 0:
            raise UserError(f"memory_mb must be above 0, got {memory_mb}.")
        self._rng = np.random.default_rng(seed) if rng == "planning" else None
        self._watched: WatchedEnv | None = None
        self.env, self._own = env, False
        if is_url(env):
            self.env, self._own = make_vec(env, 1, seed=seed), True  # type: ignore[arg-type]
        elif not isinstance(env, (gymnasium.Env, VecEnv)):
            resolved = resolve(env)
            self.env, self._own = build_env(resolved.factory, resolved.name)[0], True
        try:
            self._states: States = self._open(env, memory_mb)
            if self._own:
                self.env.reset(seed=seed)  # type: ignore[union-attr]
                if isinstance(self.env, VecEnv):
                    self.env.recv()
        except BaseException:
            self._close_own()
            raise

    @property
    def level(self) -> Level:
        return self._states.level

    @property
    def stochastic(self) -> bool:
        """Whether a step has drawn random numbers so far."""
        return self._states.stochastic

    @property
    def num_envs(self) -> int:
        return self.env.num_envs if isinstance(self.env, VecEnv) else 1

    @property
    def states(self) -> States:
        return self._states

    def set_obs(self, obs: Tree) -> None:
        """Pass the last observation of your own environment, if it was reset or stepped before it was passed in."""
        if self._watched is None:
            return
        layout = self._states.spec.observation
        try:
            shapes = [np.shape(value) for value in layout.flatten(obs)]
        except (KeyError, TypeError, ValueError, IndexError, UserError) as error:
            raise UserError(f"This is not an observation of {self._states.spec.name}: {error!r}.") from error
        if shapes != [leaf.shape for leaf in layout.leaves]:
            wanted = ", ".join(str(leaf.shape) for leaf in layout.leaves)
            raise UserError(
                f"{self._states.spec.name} has observations of shape {wanted}, got {', '.join(map(str, shapes))}: pass "
                "the observation that its reset or step returned."
            )
        self._watched.set_obs(obs)

    def mark(self) -> None:
        """Start of the steps that `stepped_only_with` checks."""
        if self._watched is not None:
            self._watched.mark()

    def stepped_only_with(self, action: Tree) -> bool:
        """Whether your own environment took this step since `mark` and nothing else; False if unknown."""
        if self._watched is None:
            return False
        done, flatten = self._watched.took(1), self._states.spec.action.flatten
        return done is not None and all(map(np.array_equal, flatten(done[0]), flatten(action)))

    def save(self, env_ids: Array | None = None) -> Any:
        """Save the current state; returns its id, or with `env_ids` ids [n]."""
        ids = self._states.save(self._places(env_ids))
        return int(ids[0]) if env_ids is None else ids

    def load(self, ids: Any, env_ids: Array | None = None) -> Tree:
        """Load a state including its random generators; returns its observation, None if unknown. It stays saved."""
        rows, places = _rows(ids), self._places(env_ids)
        if len(rows) != len(places):
            raise UserError(f"load() needs one state per environment, got {len(rows)} states for {len(places)}.")
        views = self._states.load(rows, places)
        return tree_map(lambda leaf: leaf[0], views.obs) if env_ids is None and views.obs is not None else views.obs

    def drop(self, ids: Any) -> None:
        """Drop one state or several; unknown ids are ignored."""
        self._states.drop(_rows(ids))

    def expand(self, parents: Any, actions: Any, children: Any = None) -> Expansion:
        """Step from each state and save the results under new ids, or over the states named by `children`.

        One id and one action give one row; a sequence of ids takes a sequence of actions.
        """
        ids, layout = _rows(parents), self._states.spec.action
        if np.ndim(parents) == 0:
            actions = tree_map(lambda leaf: np.asarray(leaf)[None], actions)
        elif not layout.single and isinstance(actions, (list, tuple)) and len(actions) == len(ids):
            actions = layout.stack(actions)
        actions = layout.unflatten(layout.batch(tree_map(np.asarray, actions), len(ids)))
        if self._states.players > 1:
            self._require_legal(ids, actions)
        given = self._states.new_ids(len(ids)) if children is None else _rows(children)
        if len(given) != len(ids):
            raise UserError(f"expand() needs one child id per parent, got {len(given)} for {len(ids)}.")
        seeds = None if self._rng is None else self._rng.integers(2**64, size=len(ids), dtype=np.uint64)
        try:
            return self._states.expand(ids, actions, given, seeds)
        except BaseException:
            if children is None:
                self._states.drop(given)
            raise

    def close(self) -> None:
        """Drop all states and close an environment that was built here; any other is left as it was."""
        self._states.close()
        self._close_own()

    def __enter__(self) -> Snapshots:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _open(self, given: Any, memory_mb: float) -> States:
        env = self.env
        if isinstance(env, VecEnv):
            return env.states(memory_mb)
        assert isinstance(env, gymnasium.Env)
        name = given if isinstance(given, str) else type(env.unwrapped).__name__
        spec = spec_of(env, name)
        if self._own:
            claim(env, self)
        make = partial(make_scratch, resolve(given).factory) if self._own else partial(scratch_like, env)
        self._watched = WatchedEnv(env, spec.observation)
        try:
            return make_states(spec, [self._watched], [make], memory_mb)
        except BaseException:
            self._watched.release()
            raise

    def _places(self, env_ids: Any) -> Array:
        """The given environments, by default the only one."""
        places = np.zeros(1, np.int64) if env_ids is None else _rows(env_ids)
        if ((places < 0) | (places >= self.num_envs)).any():
            raise UserError(f"env_ids must be within environments 0 to {self.num_envs - 1}, got {places.tolist()}.")
        return places

    def _require_legal(self, ids: Array, actions: Any) -> None:
        legal = self._states.look(ids).legal
        if legal is None:
            return
        bad = np.flatnonzero(~legal[np.arange(len(ids)), actions])
        if len(bad):
            can = ", ".join(map(str, np.flatnonzero(legal[bad[0]]))) or "none, the game is over there"
            raise UserError(f"{actions[bad[0]]} is not a legal move in state {ids[bad[0]]}; legal: {can}.")

    def _close_own(self) -> None:
        if self._own:
            if isinstance(self.env, gymnasium.Env):
                release(self.env)
            self.env.close()  # type: ignore[union-attr]
            self._own = False


def _rows(ids: Any) -> Array:
    rows = np.atleast_1d(np.asarray(ids))
    if rows.dtype.kind not in "iu" and rows.size:
        raise UserError(f"Ids of states and environments must be integers, got {ids!r}.")
    return rows.astype(np.int64)
