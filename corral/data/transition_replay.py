"""Replay of n-step transitions, uniform or prioritised (Schaul et al., 2015)."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np

from corral.core.errors import RunFailed, UserError
from corral.core.machine import require_memory
from corral.core.types import Array, DataSpec, EnvSpec, Sample, Trajectory, Transitions, tree_map
from corral.data.frame_ring import Observations
from corral.data.nstep import NStep, NStepWindows
from corral.data.rate_limiter import RateLimiter
from corral.data.store import START, Store, StoreContext, count_metrics, named_extras
from corral.data.sumtree import SumTree
from corral.data.transition_ring import TransitionRing

_log = logging.getLogger("corral")
_AHEAD = 100  # transitions that acting may be ahead of learning, if both run concurrently
_MAX_DEVIATIONS = 10.0  # bound of a scaled reward per step, as in NormalizedVecEnv


class TransitionReplay(Store):
    """Keeps up to `data.capacity` transitions and samples batches with replacement.

    Prioritised: P(i) = p_i / sum of p, where p = (|priority| + eps)^alpha, with stratified sampling. A new transition
    gets the largest p ever set, unless `put` was given priorities. `weight` = (N P)^-beta / the largest in the batch;
    beta increases from its start to 1 with `progress`. Keys are never reused, so feedback on a transition that has been
    overwritten meanwhile is ignored.
    """

    def __init__(self, spec: EnvSpec, data: DataSpec, num_envs: int, seed: int = 0):
        _check(data)
        self._spec, self._data, self._num_envs = spec, data, num_envs
        self._rng = np.random.default_rng(np.random.SeedSequence(seed))
        self._allocate(32, margin=0)
        require_memory(self.nbytes * data.capacity // 32, data.capacity, "Replay")
        self._allocate(data.capacity, margin=4 * num_envs * (data.length + 2))
        self._nstep = NStep(data.length, data.gamma, num_envs, spec.action)
        tolerance = max(2 * data.batch_size, data.samples_per_insert * min(data.capacity / 10, _AHEAD))
        self.limiter = RateLimiter(data.samples_per_insert, data.min_size, tolerance)
        self._warned = False
        self._ctx = START

    def _allocate(self, capacity: int, margin: int) -> None:
        self._observations = Observations(self._spec, capacity, self._num_envs, margin)
        self._rows = TransitionRing(capacity, self._spec.action, len(self._observations.sizes))
        self._tree = SumTree(capacity) if self._data.prioritised else None

    @property
    def nbytes(self) -> int:
        return self._observations.nbytes + self._rows.nbytes + (self._tree.nbytes if self._tree else 0)

    def put(self, traj: Trajectory, priorities: Array | None = None, ctx: StoreContext = START) -> None:
        self._require_fit(*traj.shape)
        self._ctx = ctx
        numbers, successors, continues = self._observations.add(traj)
        priority = np.full(traj.shape, np.nan) if priorities is None else priorities.astype(np.float64)
        extras = named_extras(traj, self._data.extras)
        continues &= ~traj.first[0]
        self._append(self._nstep.add(traj, numbers[:-1], successors, priority, extras, continues))

    def room(self) -> bool:
        return self.limiter.may_insert()

    def ready(self) -> bool:
        return len(self._rows) > 0 and self.limiter.may_sample(self._data.batch_size)

    def get(self) -> Sample:
        rows, count = self._rows, self._data.batch_size
        if not self.ready():
            raise RunFailed("No batch may be sampled yet: check ready() before get().")
        if self._tree is None:
            keys = self._rng.integers(rows.low, rows.high, count)
            slots = keys % rows.capacity
            weight = np.ones(count, np.float32)
        else:
            slots = self._tree.sample(self._rng.random(count))
            keys = rows.low + (slots - rows.low) % rows.capacity
            weight = self._weights(self._tree, slots)
        self.limiter.sampled += count
        both = self._observations.take(np.concatenate([rows.obs.take(slots), rows.next_obs.take(slots)]))
        batch = Transitions(
            obs=tree_map(lambda leaf: leaf[:count], both),
            action=self._spec.action.unflatten([leaf.take(slots, axis=0) for leaf in rows.action]),
            reward=self._scaled(rows.reward.take(slots)),
            discount=rows.discount.take(slots),
            next_obs=tree_map(lambda leaf: leaf[count:], both),
            weight=weight,
            extras={name: column.take(slots, axis=0) for name, column in rows.extras.items()},
        )
        return Sample(batch, keys)

    def _scaled(self, reward: Array) -> Array:
        scale = self._ctx.reward_scale
        if scale == 1.0:
            return reward
        most = np.float32(_MAX_DEVIATIONS * self._data.length)
        scaled: Array = np.clip(reward * np.float32(scale), -most, most)
        return scaled

    def feedback(self, keys: Array | None, priorities: Array) -> None:
        """Set the priorities of transitions that still exist; non-finite priorities are ignored."""
        if self._tree is None or keys is None:
            return
        known = (keys >= self._rows.low) & np.isfinite(priorities)
        if not known.all():
            keys, priorities = keys[known], priorities[known]
        self._tree.set(keys % self._rows.capacity, self._shape(priorities))

    def _append(self, windows: NStepWindows) -> None:
        rows, observations = self._rows, self._observations
        needs = observations.needs(windows.obs)
        recent = observations.is_recent(needs)
        if not recent.all():  # from an environment that stalled while others continued: they would soon be evicted
            windows, needs = windows.take(recent), needs[recent]
        low, high = rows.low, rows.high
        rows.append(windows, needs)
        rows.evict(observations.alive_from)
        self.limiter.inserted += len(windows.obs)
        kept_slots_from = max(low, rows.high - rows.capacity)
        if self._tree is not None:
            if rows.low > kept_slots_from:
                gone = np.arange(kept_slots_from, rows.low) % rows.capacity
                self._tree.set(gone, np.zeros(len(gone)))
            shaped, unknown = self._shape(windows.priority), ~np.isfinite(windows.priority)
            shaped[unknown] = self._tree.max or 1.0
            self._tree.set(np.arange(high, rows.high) % rows.capacity, shaped)
        if rows.low > kept_slots_from and len(rows) < 0.9 * rows.capacity and not self._warned:
            self._warned = True
            _log.warning(
                "Replay keeps only %d of %d transitions, because episodes are short or images are not frame stacks: "
                "raise buffer_size to keep more.",
                len(rows),
                rows.capacity,
            )

    def _shape(self, priorities: Array) -> Array:
        shaped: Array = (np.abs(priorities, dtype=np.float64) + self._data.priority_eps) ** self._data.priority_alpha
        return shaped

    def _weights(self, tree: SumTree, slots: Array) -> Array:
        start = self._data.priority_beta
        beta = start + (1 - start) * min(self._ctx.progress, 1.0)
        probability = tree.leaves.take(slots) / tree.total
        weight = (len(self._rows) * probability) ** -beta
        scaled: Array = (weight / weight.max()).astype(np.float32)
        return scaled

    def _require_fit(self, length: int, width: int) -> None:
        least = 2 * (length + self._data.length - 1) * width
        if least > self._data.capacity:
            raise UserError(
                f"A replay of {self._data.capacity:,} transitions is too small for fragments of {length} x {width} "
                f"steps: raise buffer_size to at least {least:,}."
            )

    def metrics(self) -> dict[str, float]:
        paid = self.limiter.inserted - self._data.min_size
        found = {
            **count_metrics(len(self._rows), self.limiter.inserted, self.limiter.sampled),
            "store/samples_per_insert": self.limiter.sampled / paid if paid > 0 else 0.0,
        }
        if self._tree is not None:
            found["store/mean_priority"] = self._tree.total / max(1, len(self._rows))
            found["store/max_priority"] = self._tree.max
        return found

    def state_dict(self) -> dict[str, Any]:
        state = {
            "settings": self._settings(),
            "rows": self._rows.state_dict(),
            "observations": self._observations.state_dict(),
            "nstep": self._nstep.state_dict(),
            "limiter": self.limiter.state_dict(),
            "rng": dict(self._rng.bit_generator.state),
            "progress": self._ctx.progress,
            "reward_scale": self._ctx.reward_scale,
        }
        if self._tree is not None:
            filled = min(self._rows.high, self._rows.capacity)
            state["tree"] = {"leaves": self._tree.leaves[:filled], "max": self._tree.max}
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["settings"] != self._settings():
            raise UserError(
                f"The saved replay has the settings {state['settings']}, this one has {self._settings()}: resume with "
                "the same settings, or start a new run."
            )
        self._rows.load_state_dict(self._named_extras(state["rows"], empty=not state["rows"]["high"]))
        self._observations.load_state_dict(state["observations"])
        self._nstep.load_state_dict(self._named_extras(state["nstep"], empty=not np.any(state["nstep"]["waiting"])))
        self.limiter.load_state_dict(state["limiter"])
        self._rng.bit_generator.state = state["rng"]
        self._ctx = StoreContext(state["progress"], state.get("reward_scale", 1.0))  # missing in older checkpoints
        if self._tree is not None:
            leaves = state["tree"]["leaves"]
            self._tree.set(np.arange(len(leaves)), np.asarray(leaves))
            self._tree.max = state["tree"]["max"]

    def _named_extras(self, part: dict[str, Any], *, empty: bool) -> dict[str, Any]:
        """A saved component with the extras that the algorithm names; UserError if its steps lack one."""
        saved = part.get("extras", {})
        missing = [name for name in self._data.extras if name not in saved]
        if missing and not empty:
            raise UserError(
                f"The steps of the saved replay lack the extra '{missing[0]}', which the algorithm needs: resume with "
                "the same algorithm, or start a new run."
            )
        return {**part, "extras": {name: saved[name] for name in self._data.extras if name in saved}}

    def _settings(self) -> dict[str, Any]:
        return {
            **{name: getattr(self._data, name) for name in ("capacity", "length", "gamma", "prioritised")},
            "num_envs": self._num_envs,
            "observation": self._spec.observation.digest,
            "action": self._spec.action.digest,
        }


def _check(data: DataSpec) -> None:
    if data.capacity < 1:
        raise UserError(f"Replay needs a capacity of at least 1 transition, got {data.capacity}.")
    if data.min_size > data.capacity:
        raise UserError(
            f"Learning would never start: replay holds {data.capacity:,} transitions, and learning waits for "
            f"{data.min_size:,}; lower learning_starts and batch_size, or raise buffer_size."
        )
    if data.length < 1 or data.batch_size < 1 or data.samples_per_insert <= 0:
        raise UserError("Replay needs length, batch_size and samples_per_insert above 0.")
