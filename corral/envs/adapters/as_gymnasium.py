"""A Corral VecEnv behind Gymnasium's vector interface."""

from __future__ import annotations

import multiprocessing
import operator
from typing import TYPE_CHECKING, Any

import gymnasium
import numpy as np
from gymnasium.error import AlreadyPendingCallError, ClosedEnvironmentError, NoAsyncCallError, ResetNeeded
from gymnasium.spaces import Discrete
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_space

from corral.core.errors import UserError
from corral.core.types import Array, StepBatch, Tree, stack_infos
from corral.envs.adapters import env_calls

if TYPE_CHECKING:
    from corral.envs.vec_env import VecEnv


INFOS = ("raw_reward", "game_over", "faulty")
Results = tuple[Tree, Array, Array, Array, dict[str, Any]]
_MODES = {mode.name.lower(): mode for mode in AutoresetMode}


class ResetSeeds:
    """Seeds of successive resets, shared by the adapters to Gymnasium and SB3. A given seed is used. Without one, the
    first reset gets `first` (the seed of `make_vec`) and each later one a fresh seed from an RNG seeded with the last
    given seed: runs repeat exactly, and every reset plays new episodes.
    """

    def __init__(self, first: int):
        self._waiting: int | None = first
        self._fresh = np.random.default_rng(first)

    def next(self, seed: Any = None) -> int:
        if seed is not None:
            self.plan(seed)
        planned, self._waiting = self._waiting, None
        return int(self._fresh.integers(2**31)) if planned is None else planned

    def plan(self, seed: Any) -> None:
        try:
            chosen = operator.index(seed)
            self._fresh, self._waiting = np.random.default_rng(chosen), chosen
        except (TypeError, ValueError):
            raise UserError(
                f"seed must be one non-negative integer, from which Corral derives one for each environment, or a list "
                f"with one for each; got {seed!r}."
            ) from None


def autoreset_mode(name: str | AutoresetMode) -> AutoresetMode:
    """An autoreset mode by name, or by Gymnasium's enumeration or its values."""
    try:
        return _MODES.get(str(name)) or AutoresetMode(name)
    except ValueError:
        raise UserError(f"autoreset={name!r} is not one of {', '.join(_MODES)}.") from None


def make_gymnasium_env(vec: VecEnv, autoreset: str | AutoresetMode | None) -> AsGymnasium:
    """The adapter for an autoreset mode."""
    mode = autoreset_mode(autoreset or AutoresetMode.SAME_STEP)
    return AsGymnasium(vec) if mode is AutoresetMode.SAME_STEP else HeldRows(vec, mode)


class AsGymnasium(gymnasium.vector.VectorEnv[Any, Any, Any]):
    """All environments of a VecEnv, stepped together, with same-step autoreset.

    Where an episode ended, `obs` is the next episode's first observation, and `infos` has the last one in Gymnasium's
    format: `final_obs`, an object array with None in the other rows, and the mask `_final_obs`. Of the environments'
    infos, those of `make_vec(info=...)` are there, with their masks; in `final_info` where an episode ended. Every
    step's `infos` also has three arrays:

    - `raw_reward`: the unclipped, unscaled reward.
    - `game_over`: the game ended; under `EpisodicLife` a row terminates at each life lost.
    - `faulty`: the step never happened because its environment failed and was restarted. Such a row is truncated, with
      reward 0: keep it out of losses and statistics.

    `reset(seed=7)` reseeds every environment from that one number, `reset(seed=[3, 4])` each with its own. Without a
    seed, the first reset uses the seed of `make_vec`, and later ones use fresh seeds.

    Gymnasium's vector wrappers of rewards, actions and statistics work on top. Those of observations refuse same-step
    vector environments, because they do not transform `final_obs`: use `as_gymnasium(autoreset="next_step")`.
    """

    _takes_masks = False  # of environments to reset

    def __init__(self, vec: VecEnv, mode: AutoresetMode = AutoresetMode.SAME_STEP):
        self.vec, self.num_envs = vec, vec.num_envs
        self._all_ids = np.arange(self.num_envs)
        self.render_mode, metadata, self.spec = env_calls.describe(vec, self._all_ids[:1])
        self.metadata = {**metadata, "autoreset_mode": mode}
        self.single_observation_space = vec.spec.observation_space
        self.single_action_space = vec.spec.action_space
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        self.action_space = batch_space(self.single_action_space, self.num_envs)
        self._seeds = ResetSeeds(vec.seed)
        self._started = False
        self._pending: str | None = None  # the call whose results were not fetched yet

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> tuple[Tree, dict[str, Any]]:
        self.reset_async(seed, options)
        return self.reset_wait()

    def step(self, actions: Tree) -> Results:
        self.step_async(actions)
        return self.step_wait()

    def reset_async(self, seed: Any = None, options: dict[str, Any] | None = None) -> None:
        self._require_free("reset_async")
        options = dict(options or {})
        mask = _checked_mask(options.pop("reset_mask"), self.num_envs) if "reset_mask" in options else None
        if mask is not None and mask.all() and not (self._started and self._takes_masks):
            mask = None
        if isinstance(seed, (list, tuple, np.ndarray)):
            seed = self._checked_seeds(list(seed))
        self._begin(seed, options or None, mask)
        self._pending = "reset"

    def reset_wait(self, timeout: float | None = None) -> tuple[Tree, dict[str, Any]]:
        self._finish("reset", timeout)
        self._started = True
        return self._fetch_reset()

    def step_async(self, actions: Tree) -> None:
        self._require_free("step_async")
        if not self._started:
            raise ResetNeeded("Call reset() first: it returns the first observations.")
        try:
            self._send(actions)
        except UserError as error:
            if np.isscalar(actions):
                raise TypeError(str(error)) from None
            raise
        self._pending = "step"

    def step_wait(self, timeout: float | None = None) -> Results:
        self._finish("step", timeout)
        return self._fetch_step()

    def call(self, name: str, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Call a method of every environment, or read an attribute; what it changes is lost when an environment fails
        and is rebuilt.
        """
        self._require_free("call")
        return tuple(env_calls.call(self.vec, name, args, kwargs, self._all_ids))

    def get_attr(self, name: str) -> tuple[Any, ...]:
        self._require_free("get_attr")
        return tuple(env_calls.get_attr(self.vec, name, self._all_ids))

    def set_attr(self, name: str, values: Any) -> None:
        """Set an attribute of every environment: a list or tuple has one value for each."""
        self._require_free("set_attr")
        each = list(values) if isinstance(values, (list, tuple)) else [values] * self.num_envs
        if len(each) != self.num_envs:
            raise UserError(
                f"set_attr({name!r}) got {len(each)} values for {self.num_envs} environments: pass one value, or a "
                "list with one for each."
            )
        env_calls.set_attr(self.vec, name, each, self._all_ids)

    def render(self) -> tuple[Any, ...]:
        """The picture of every environment, by its own `render()`."""
        self._require_free("render")
        return tuple(env_calls.render(self.vec, self._all_ids))

    @property
    def np_random_seed(self) -> Any:
        """The environments' own seeds, where the backend gives access to them."""
        return self.get_attr("np_random_seed") if self.vec.gives_access else super().np_random_seed

    def close_extras(self, timeout: float | None = None, terminate: bool = False) -> None:
        """Both arguments are Gymnasium's: the VecEnv ends what runs, within a bounded time."""
        if self._pending:
            gymnasium.logger.warn(f"Calling `close` while waiting for a pending call to `{self._pending}` to complete.")
        self.vec.close()

    def _begin(self, seed: Any, options: dict[str, Any] | None, mask: Array | None) -> None:
        """Start the episodes of a reset."""
        if mask is not None:
            raise UserError("options['reset_mask'] needs as_gymnasium(autoreset='disabled') or 'next_step'.")
        if isinstance(seed, list):
            self.vec.begin_episodes(self._all_ids, seed, [options] * self.num_envs)
            return
        chosen = self._seeds.next(seed)
        super().reset(seed=chosen)  # seeds np_random, which wrappers may use
        if options is None:
            self.vec.reset(chosen)
        else:
            self.vec.begin_episodes(self._all_ids, chosen, [options] * self.num_envs)

    def _fetch_reset(self) -> tuple[Tree, dict[str, Any]]:
        batch = self.vec.recv()
        self._all_ids = batch.env_ids  # recognised by identity when sent back
        return batch.obs, batch.info

    def _send(self, actions: Tree) -> None:
        self.vec.send(self._all_ids, actions)

    def _fetch_step(self) -> Results:
        batch = self.vec.recv()
        return batch.obs, batch.reward, batch.terminated, batch.truncated, self._infos(batch)

    def _infos(self, batch: StepBatch) -> dict[str, Any]:
        infos: dict[str, Any] = {}
        ended = batch.terminated | batch.truncated
        if batch.infos is not None and batch.first_infos is not None:
            rows = zip(batch.infos, batch.first_infos, ended.tolist(), strict=True)
            infos = stack_infos([first if over else info for info, first, over in rows])
        for name in INFOS:
            infos[name] = getattr(batch, name)
            infos[f"_{name}"] = np.ones(self.num_envs, np.bool_)
        if batch.final_obs is not None:
            infos["final_obs"] = self._final_obs(batch.final_obs, ended)
            infos["_final_obs"] = ended
            last = [info if over else {} for info, over in zip(batch.infos or [], ended.tolist(), strict=False)]
            infos["final_info"] = stack_infos(last)
            infos["_final_info"] = ended.copy()
        return infos

    def _final_obs(self, final: Tree, ended: Array) -> Array:
        layout = self.vec.spec.observation
        leaves = list(zip(layout.leaves, layout.flatten(final), strict=True))
        result = np.full(self.num_envs, None, dtype=object)
        for row in np.flatnonzero(ended).tolist():
            # Copied, so that keeping one observation does not keep the whole batch. Environments return an int where
            # the space is Discrete.
            own = [int(x[row]) if isinstance(leaf.space, Discrete) else x[row].copy() for leaf, x in leaves]
            result[row] = layout.unflatten(own)
        return result

    def _require_free(self, name: str) -> None:
        if self.closed:
            raise ClosedEnvironmentError(f"Trying to call {name}() of a closed {type(self).__name__}: make a new one.")
        if self._pending:
            raise AlreadyPendingCallError(
                f"Calling `{name}` while waiting for a pending call to `{self._pending}` to complete: call "
                f"{self._pending}_wait() first.",
                self._pending,
            )

    def _finish(self, name: str, timeout: float | None) -> None:
        """The call `name` is awaited now; TimeoutError if it takes longer, after which it may be awaited again."""
        if self._pending != name:
            raise NoAsyncCallError(f"Calling `{name}_wait` without any prior call to `{name}_async`.", name)
        if timeout is not None and not self.vec.linger(self._num_sent(), timeout):
            raise multiprocessing.TimeoutError(f"The call to `{name}_wait` has timed out after {timeout} second(s).")
        self._pending = None

    def _num_sent(self) -> int:
        return self.num_envs

    def _checked_seeds(self, seeds: list[Any]) -> list[int | None]:
        if len(seeds) != self.num_envs:
            raise UserError(
                f"seed must be one non-negative integer or a list of num_envs={self.num_envs}, got {len(seeds)} seeds."
            )
        for seed in seeds:
            if seed is not None:
                ResetSeeds(0).plan(seed)
        return [None if seed is None else operator.index(seed) for seed in seeds]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.vec.spec.name}, num_envs={self.num_envs})"


class HeldRows(AsGymnasium):
    """A VecEnv without same-step autoreset: the step that ends an episode returns its true last observation, and the
    next episode's first observation is held back.

    With next-step autoreset, the next step ignores the row's action and returns it, with reward 0. With autoreset
    disabled, `reset(options={"reset_mask": ended})` does. `infos` has `raw_reward`, `game_over` and `faulty` of each
    step (see `AsGymnasium`), and the chosen infos of the step or of the reset.
    """

    _takes_masks = True

    def __init__(self, vec: VecEnv, mode: AutoresetMode = AutoresetMode.NEXT_STEP):
        super().__init__(vec, mode)
        self._resets_itself = mode is AutoresetMode.NEXT_STEP
        self._ended = np.zeros(self.num_envs, np.bool_)
        self._due = self._all_ids  # of a reset or step under way
        self._mask: Array | None = None  # of a reset under way, None: all
        self._firsts: list[dict[str, Any]] = [{}] * self.num_envs  # infos of the episodes that are held back

    def _begin(self, seed: Any, options: dict[str, Any] | None, mask: Array | None) -> None:
        self._mask, self._due = mask, self._all_ids
        if mask is None:
            super()._begin(seed, options, None)
            return
        if not self._started:
            raise ResetNeeded("The first reset must be of all environments: call it without reset_mask first.")
        # An episode that ended has its successor already, unless this reset asks for another.
        fresh = mask if options is not None or seed is not None else mask & ~self._ended
        self._due = np.flatnonzero(fresh)
        if len(self._due):
            each = [seed[i] for i in self._due] if isinstance(seed, list) else seed
            seeds = [None] * len(self._due) if each is None else each
            self.vec.begin_episodes(self._due, seeds, [options] * len(self._due))

    def _fetch_reset(self) -> tuple[Tree, dict[str, Any]]:
        layout = self.vec.spec.observation
        if self._mask is None:
            obs, infos = super()._fetch_reset()
            self._waiting = layout.flatten(obs)
            self._shown = [leaf.copy() for leaf in self._waiting]
            self._ended[:] = False
            return layout.unflatten([leaf.copy() for leaf in self._waiting]), infos
        if len(self._due):
            self._hold(self.vec.recv(env_ids=self._due))
        infos = stack_infos(
            [first if row else {} for first, row in zip(self._firsts, self._mask.tolist(), strict=True)]
        )
        for shown, waiting in zip(self._shown, self._waiting, strict=True):
            shown[self._mask] = waiting[self._mask]
        self._ended &= ~self._mask
        return layout.unflatten([leaf.copy() for leaf in self._shown]), infos

    def _send(self, actions: Tree) -> None:
        if self._ended.any() and not self._resets_itself:
            raise ResetNeeded(
                f"The episodes of environments {np.flatnonzero(self._ended).tolist()} are over: call "
                "reset(options={'reset_mask': terminations | truncations}) first."
            )
        if not self._ended.any():
            self._due = self._all_ids
            self.vec.send(self._due, actions)
            return
        layout, due = self.vec.spec.action, np.flatnonzero(~self._ended)
        leaves = [leaf if hasattr(leaf, "shape") else np.asarray(leaf) for leaf in layout.columns(actions)]
        if any(leaf.shape[:1] != (self.num_envs,) for leaf in leaves):
            layout.batch(actions, self.num_envs)  # raises the error that says so
        self._due = due
        if len(due):
            self.vec.send(due, layout.unflatten([leaf[due] for leaf in leaves]))

    def _fetch_step(self) -> Results:
        due, n = self._due, self.num_envs
        self._shown = [leaf.copy() for leaf in self._waiting]
        reward = np.zeros(n)
        terminated, truncated = np.zeros((2, n), np.bool_)
        own: dict[str, Any] = {name: np.zeros(n, np.bool_) for name in INFOS}
        own["raw_reward"] = np.zeros(n)
        rows = [first if over else {} for first, over in zip(self._firsts, self._ended.tolist(), strict=True)]
        if len(due):
            batch = self.vec.recv(env_ids=due)
            for shown, leaf in zip(self._shown, self.vec.spec.observation.flatten(batch.next_obs), strict=True):
                shown[due] = leaf
            self._hold(batch)
            reward[due], terminated[due], truncated[due] = batch.reward, batch.terminated, batch.truncated
            for name in INFOS:
                own[name][due] = getattr(batch, name)
            for env_id, info in zip(due.tolist(), batch.infos or [], strict=False):
                rows[env_id] = info
        self._ended = terminated | truncated
        infos = stack_infos(rows) | own | {f"_{name}": np.ones(n, np.bool_) for name in INFOS}
        obs = self.vec.spec.observation.unflatten([leaf.copy() for leaf in self._shown])
        return obs, reward, terminated, truncated, infos

    def _num_sent(self) -> int:
        return len(self._due)

    def _hold(self, batch: StepBatch) -> None:
        for waiting, leaf in zip(self._waiting, self.vec.spec.observation.flatten(batch.obs), strict=True):
            waiting[batch.env_ids] = leaf
        for env_id, first in zip(batch.env_ids.tolist(), batch.first_infos or [], strict=False):
            self._firsts[env_id] = first


def _checked_mask(mask: Any, num_envs: int) -> Array:
    """A reset mask; errors are those of Gymnasium's own vector environments."""
    if not isinstance(mask, np.ndarray):
        raise TypeError(f"`options['reset_mask']` must be a numpy array, got {type(mask)}")
    if mask.shape != (num_envs,):
        raise UserError(f"`options['reset_mask']` must have shape `({num_envs},)`, got {mask.shape}")
    if mask.dtype != np.bool_:
        raise TypeError(f"`options['reset_mask']` must have `dtype=np.bool_`, got {mask.dtype}")
    if not mask.any():
        raise UserError(
            f"`options['reset_mask']` must contain a boolean array with at least one True value, got reset_mask={mask}"
        )
    return mask
