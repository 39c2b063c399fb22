"""Running normalisation of observations and rewards, with statistics that can be saved.

The statistics are part of a policy: evaluate it with the same ones, frozen.

```python
vec = NormalizedVecEnv(corral.make_vec("Pendulum-v1"))
...
vec.statistics.save("statistics.safetensors")
test = NormalizedVecEnv(corral.make_vec("Pendulum-v1", role="eval"), frozen=True)
test.statistics.load("statistics.safetensors")
```
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from gymnasium import spaces

from corral.core.errors import UserError
from corral.core.spaces import Layout, Space
from corral.core.types import Array, EnvSpec, StepBatch, Tree
from corral.envs.vec_env import VecEnv
from corral.snapshot.states import States

_EPSILON = 1e-8


class RunningMoments:
    """Mean and variance of all rows so far, merged batch by batch (Chan et al.), in float64."""

    def __init__(self, shape: tuple[int, ...] = ()):
        self.count = 0
        self.mean: Array = np.zeros(shape)
        self._squares: Array = np.zeros(shape)  # sum of squared deviations from the mean

    @property
    def var(self) -> Array:
        """Population variance; ones before the first row."""
        return self._squares / self.count if self.count else np.ones_like(self.mean)

    @property
    def std(self) -> Array:
        std: Array = np.sqrt(self.var + _EPSILON)
        return std

    def update(self, rows: Array) -> None:
        if len(rows):
            rows = np.asarray(rows, np.float64)
            mean = rows.mean(axis=0)
            self._merge(len(rows), mean, np.square(rows - mean).sum(axis=0))

    def merge(self, other: RunningMoments) -> None:
        if other.count:
            self._merge(other.count, other.mean, other._squares)

    def since(self, before: RunningMoments) -> RunningMoments:
        """Moments of the rows added since `before`, an earlier copy of this object."""
        new = RunningMoments(self.mean.shape)
        new.count = self.count - before.count
        if new.count:
            new.mean = (self.count * self.mean - before.count * before.mean) / new.count
            between = np.square(new.mean - before.mean) * (before.count * new.count / self.count)
            new._squares = np.maximum(self._squares - before._squares - between, 0.0)
        return new

    def _merge(self, count: int, mean: Array, squares: Array) -> None:
        total = self.count + count
        delta = mean - self.mean
        self.mean = self.mean + delta * (count / total)
        self._squares = self._squares + squares + np.square(delta) * (self.count * count / total)
        self.count = total

    def state_dict(self) -> dict[str, Array]:
        return {"count": np.array(self.count), "mean": np.array(self.mean), "squares": np.array(self._squares)}

    def load_state_dict(self, state: Mapping[str, Array]) -> None:
        if state["mean"].shape != self.mean.shape:
            raise UserError(f"These statistics are of values of shape {state['mean'].shape}, not {self.mean.shape}.")
        self.count = int(state["count"])
        self.mean, self._squares = np.array(state["mean"]), np.array(state["squares"])


class Statistics:
    """Moments of every float leaf of the observations, by name, and of the discounted returns."""

    def __init__(self, observation: Layout):
        floats = [leaf for leaf in observation.leaves if leaf.dtype.kind == "f"]
        self.observations = {leaf.name: RunningMoments(leaf.shape) for leaf in floats}
        self.returns = RunningMoments()

    def state_dict(self) -> dict[str, Array]:
        return {
            f"{group}/{key}": array
            for group, moments in self._groups().items()
            for key, array in moments.state_dict().items()
        }

    def load_state_dict(self, state: Mapping[str, Array]) -> None:
        expected = self.state_dict().keys()
        if set(state) != set(expected):
            odd = sorted(set(state) ^ set(expected))
            raise UserError(f"These statistics belong to a different environment; they differ in {', '.join(odd[:6])}.")
        for group, moments in self._groups().items():
            moments.load_state_dict({key: state[f"{group}/{key}"] for key in ("count", "mean", "squares")})

    def save(self, path: str | Path) -> None:
        from safetensors.numpy import save_file

        save_file(self.state_dict(), str(path))

    def load(self, path: str | Path) -> None:
        from safetensors import SafetensorError
        from safetensors.numpy import load_file

        try:
            state = load_file(str(path))
        except (OSError, SafetensorError) as error:
            raise UserError(f"Cannot read statistics from {path}: {error}.") from error
        self.load_state_dict(state)

    def _groups(self) -> dict[str, RunningMoments]:
        return {**{f"observation/{name}": m for name, m in self.observations.items()}, "returns": self.returns}


class NormalizedVecEnv(VecEnv):
    """A VecEnv with normalised float observations and rewards; `raw_reward` stays unscaled.

    Observations, final ones included, get mean 0 and standard deviation 1. Rewards are divided by the standard
    deviation of the discounted return, which keeps their sign. Both are clipped to `clip` standard deviations. Faulty
    rows do not update the statistics; with `frozen`, no row does.

    For replay buffers, `scale_later` leaves rewards unscaled, and the consumer multiplies them by the current
    `reward_scale`: rewards scaled when stored would mix old and new scales.
    """

    def __init__(
        self,
        vec: VecEnv,
        *,
        obs: bool = True,
        reward: bool = True,
        gamma: float = 0.99,
        clip: float = 10.0,
        frozen: bool = False,
        scale_later: bool = False,
    ):
        self._vec, self._log, self._obs, self._reward = vec, vec._log, obs, reward
        self._gamma, self._clip, self.frozen = gamma, clip, frozen
        self._scale_later = scale_later
        self.num_envs, self.seed = vec.num_envs, vec.seed
        self.backend_reason, self.resolved_backend = vec.backend_reason, vec.resolved_backend
        self.pipelined, self.holds_back_rows = vec.pipelined, vec.holds_back_rows
        self.gives_access = vec.gives_access
        self.statistics = Statistics(vec.spec.observation)
        self.spec: EnvSpec = vec.spec
        if obs:
            self.spec = replace(vec.spec, observation_space=_unbounded(vec.spec.observation_space))
        self._returns = np.zeros(self.num_envs)

    @property
    def reward_scale(self) -> float:
        return self.learning_scale if self._scale_later else 1.0

    @property
    def learning_scale(self) -> float:
        return 1.0 / float(self.statistics.returns.std) if self._reward else 1.0

    def states(self, memory_mb: float = 1024.0) -> States:
        """States of the wrapped environments; UserError if observations are normalised, which states do not support."""
        if self._obs:
            raise UserError("A search needs unnormalised observations: set net.normalize_obs=true instead.")
        return self._vec.states(memory_mb)

    def reset(self, seed: int = 0) -> None:
        self._returns[:] = 0.0
        self._vec.reset(seed)

    def send(self, env_ids: Array, actions: Tree) -> None:
        self._vec.send(env_ids, actions)

    def linger(self, min_ready: int, timeout_s: float) -> bool:
        return self._vec.linger(min_ready, timeout_s)

    def begin_episodes(
        self, env_ids: Array, seeds: int | Sequence[int | None], options: Sequence[Mapping[str, Any] | None]
    ) -> None:
        self._returns[env_ids] = 0.0
        self._vec.begin_episodes(env_ids, seeds, options)

    def apply(
        self, function: Callable[[Any, Any], Any], values: Iterable[Any] = (), env_ids: Array | None = None
    ) -> list[Any]:
        return self._vec.apply(function, values, env_ids)

    @property
    def shows_masks(self) -> bool:
        return self._vec.shows_masks

    def recv(self, min_ready: int | None = None, *, env_ids: Array | None = None) -> StepBatch:
        batch = self._vec.recv(min_ready, env_ids=env_ids)
        if self._obs:
            self._normalise_obs(batch)
        if self._reward:
            self._normalise_reward(batch)
        return batch

    def record_episodes(self) -> None:
        self._vec.record_episodes()

    def state_dict(self) -> dict[str, Any]:
        return {
            "vec": self._vec.state_dict(),
            "statistics": self.statistics.state_dict(),
            "returns": self._returns.copy(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> list[int]:
        restarted = self._vec.load_state_dict(state["vec"])
        self.statistics.load_state_dict(state["statistics"])
        self._returns[:] = state["returns"]
        self._returns[restarted] = 0.0
        return restarted

    def close(self) -> None:
        self._vec.close()

    def _normalise_obs(self, batch: StepBatch) -> None:
        layout = self._vec.spec.observation
        obs = layout.flatten(batch.obs)
        final = None if batch.final_obs is None else layout.flatten(batch.final_obs)
        good = ~batch.faulty
        ended = (batch.terminated | batch.truncated) & good
        for k, leaf in enumerate(layout.leaves):
            moments = self.statistics.observations.get(leaf.name)
            if moments is None:
                continue
            if not self.frozen:
                moments.update(obs[k][good])
                if final is not None:
                    moments.update(final[k][ended])
            obs[k] = self._scaled(obs[k], moments)
            if final is not None:
                final[k] = self._scaled(final[k], moments)
        batch.obs = layout.unflatten(obs)
        batch.final_obs = None if final is None else layout.unflatten(final)

    def _scaled(self, values: Array, moments: RunningMoments) -> Array:
        scaled = (values - moments.mean) / moments.std
        return np.clip(scaled, -self._clip, self._clip).astype(np.float32)

    def _normalise_reward(self, batch: StepBatch) -> None:
        ended = batch.terminated | batch.truncated
        stepped = (~batch.first | ended) & ~batch.faulty  # a first row that ends no episode comes from a reset
        if not self.frozen:
            ids = batch.env_ids[stepped]
            self._returns[ids] = self._gamma * self._returns[ids] + batch.reward[stepped]
            self.statistics.returns.update(self._returns[ids])
            self._returns[batch.env_ids[ended]] = 0.0
        if not self._scale_later:
            batch.reward = np.clip(batch.reward / self.statistics.returns.std, -self._clip, self._clip)


def _unbounded(space: Space) -> Space:
    if isinstance(space, spaces.Dict):
        return spaces.Dict([(key, _unbounded(sub)) for key, sub in space.spaces.items()])
    if isinstance(space, spaces.Tuple):
        return spaces.Tuple([_unbounded(sub) for sub in space.spaces])
    if isinstance(space, spaces.Box) and np.dtype(space.dtype).kind == "f":
        return spaces.Box(-np.inf, np.inf, space.shape, np.float32)
    return space
