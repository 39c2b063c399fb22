"""The contract of a Store as test suites. Subclass the one for your kind of store and implement `make`:

```python
class TestMyReplay(ReplayContract):
    def make(self, spec, data, num_envs, seed=0):
        return MyReplay(spec, data, num_envs, seed)
```
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from corral.acting.sampler import Sampler
from corral.core.errors import RunFailed
from corral.core.types import DataSpec, EnvSpec, Positions, Sample, Trajectory, Transitions
from corral.data.make import make_store
from corral.data.store import Store, StoreContext
from corral.testing.envs import CountingEnv, FaultyEnv, TreeEnv

ID, EPISODE, T = range(3)  # of a CountingEnv's observation
NUM_ENVS = 3
Step = tuple[int, int, int]


def fragments(
    factory: Callable[[], Any], length: int, count: int, num_envs: int = NUM_ENVS, seed: int = 0
) -> tuple[EnvSpec, list[Trajectory]]:
    """Real experience: `count` consecutive fragments, and the environments' spec."""

    def policy(obs: Any) -> Any:
        size = len(sampler.vec.spec.observation.flatten(obs)[0])
        return sampler.vec.spec.action.stack([sampler.vec.spec.action_space.sample() for _ in range(size)])

    with Sampler(factory, policy, num_envs, "local", seed=seed) as sampler:
        sampler.vec.spec.action_space.seed(seed)
        rollouts = sampler.rollouts(length)
        return sampler.vec.spec, [next(rollouts) for _ in range(count)]


def steps_of(traj: Trajectory) -> Counter[Step]:
    """Valid rows of a CountingEnv trajectory as (environment, episode, step)."""
    return Counter((int(o[ID]), int(o[EPISODE]), int(o[T])) for o in traj.obs[:-1][~traj.faulty])


def drain(store: Store) -> list[Sample]:
    """Every batch available now."""
    samples = []
    while store.ready():
        samples.append(store.get())
    return samples


def put_and_drain(store: Store, trajectories: list[Trajectory]) -> Iterator[Sample]:
    """Every batch that becomes available while these trajectories are put in, one by one."""
    for traj in trajectories:
        store.put(traj)
        yield from drain(store)


def counting_spec() -> EnvSpec:
    """The spec of a CountingEnv."""
    env = CountingEnv()
    return EnvSpec(env.observation_space, env.action_space)


class StoreContract:
    """What every store does."""

    data: DataSpec
    fragment_length: int

    def make(self, spec: EnvSpec, data: DataSpec, num_envs: int, seed: int = 0) -> Store:
        return make_store(spec, data, num_envs, seed)

    def test_empty_store_is_not_ready(self) -> None:
        store = self.make(counting_spec(), self.data, NUM_ENVS)
        assert store.room()
        assert not store.ready()
        with pytest.raises(RunFailed, match="ready"):
            store.get()

    @pytest.mark.parametrize("factory", [partial(CountingEnv, 4, "mixed"), partial(FaultyEnv, "raise"), TreeEnv])
    def test_loaded_state_gives_equal_samples(self, factory: Callable[[], Any]) -> None:
        spec, trajectories = fragments(factory, self.fragment_length, 16)
        store = self.make(spec, self.data, NUM_ENVS, seed=5)
        for sample in put_and_drain(store, trajectories[:9]):
            self._set_priorities(store, sample)
        store.put(trajectories[9], ctx=StoreContext(progress=0.25))
        if store.ready():
            store.get()
        saved = saved_and_read(store.state_dict())
        other = self.make(spec, self.data, NUM_ENVS, seed=6)
        other.load_state_dict(saved)
        for traj in trajectories[10:]:
            ours, theirs = drain(store), drain(other)
            assert len(ours) == len(theirs)
            for a, b in zip(ours, theirs, strict=True):
                assert_same(vars(a.batch), vars(b.batch))
                self._set_priorities(store, a)
                self._set_priorities(other, b)
            store.put(traj)
            other.put(traj)
        assert store.metrics() == other.metrics()

    def test_either_side_can_always_move(self) -> None:
        spec, trajectories = fragments(partial(CountingEnv, 4), self.fragment_length, 12)
        store = self.make(spec, self.data, NUM_ENVS)
        for traj in trajectories:
            while not store.room():
                assert store.ready()
                store.get()
            store.put(traj)

    def test_faulty_rows_never_come_out(self) -> None:
        spec, trajectories = fragments(partial(FaultyEnv, "raise"), self.fragment_length, 16)
        assert any(traj.faulty.any() for traj in trajectories)
        happened = sum((steps_of(traj) for traj in trajectories), Counter[Step]())
        store = self.make(spec, self.data, NUM_ENVS)
        assert sum(self.check_steps(sample, happened) for sample in put_and_drain(store, trajectories)) > 20

    def test_named_extras_come_out_and_no_others(self) -> None:
        spec, trajectories = fragments(partial(CountingEnv, 4, "mixed"), self.fragment_length, 16)
        data = replace(self.data, extras=("place", "twice"))
        store, other = (self.make(spec, data, NUM_ENVS, seed=5) for _ in range(2))
        seen = 0
        for traj in trajectories:
            place = traj.obs[:-1].copy()
            marked = replace(traj, extras={"place": place, "twice": 2 * place[..., T], "unnamed": place})
            store.put(marked)
            other.load_state_dict(saved_and_read(store.state_dict()))
            ours, theirs = drain(store), drain(other)
            for sample, again in zip(ours, theirs, strict=True):
                assert_same(sample.batch.extras, again.batch.extras)
                seen += self.check_extras(sample)
        assert seen > 20

    def test_extras_that_were_not_recorded_are_an_error(self) -> None:
        spec, trajectories = fragments(partial(CountingEnv, 4), self.fragment_length, 1)
        store = self.make(spec, replace(self.data, extras=("missing",)), NUM_ENVS)
        with pytest.raises(RunFailed, match="missing"):
            store.put(trajectories[0])

    def check_extras(self, sample: Sample) -> int:
        """Assert that a sample has the extras of its own steps; returns their number."""
        batch = sample.batch
        assert batch.extras.keys() == {"place", "twice"}
        obs = batch.obs[:-1][~batch.faulty] if isinstance(batch, Trajectory) else batch.obs
        extras = {name: x[~batch.faulty] if isinstance(batch, Trajectory) else x for name, x in batch.extras.items()}
        np.testing.assert_array_equal(extras["place"], obs)
        np.testing.assert_array_equal(extras["twice"], 2 * obs[:, T])
        return len(obs)

    def check_steps(self, sample: Sample, happened: Counter[Step]) -> int:
        """Assert that a sample has only steps that happened; returns their number."""
        raise NotImplementedError

    def _set_priorities(self, store: Store, sample: Sample) -> None:
        if sample.keys is not None:
            store.feedback(sample.keys, (sample.keys % 7).astype(np.float32))


class FifoContract(StoreContract):
    """Stores whose data is used once."""

    def test_nothing_is_lost_or_duplicated(self) -> None:
        spec, trajectories = fragments(partial(CountingEnv, 4, "mixed"), self.fragment_length, 16)
        store = self.make(spec, self.data, NUM_ENVS)
        out = Counter[Step]()
        for sample in put_and_drain(store, trajectories):
            assert isinstance(sample.batch, Trajectory)
            assert sample.batch.shape[1] == self.data.batch_size
            out += steps_of(sample.batch)
        expected = sum((steps_of(traj) for traj in trajectories), Counter[Step]())
        assert max(out.values()) == 1
        assert not out - expected
        counts = store.metrics()
        assert counts["store/inserted"] == counts["store/sampled"] + counts["store/size"]
        assert counts["store/size"] < self.data.batch_size
        # the missing ones are waiting: less than a batch, and episodes that have not ended
        assert len(expected) - len(out) <= (self.data.batch_size + NUM_ENVS) * max(4, self.data.length)

    def test_true_successors_and_flags_come_through(self) -> None:
        spec, trajectories = fragments(partial(CountingEnv, 4, "mixed"), self.fragment_length, 16)
        store = self.make(spec, self.data, NUM_ENVS)
        for sample in put_and_drain(store, trajectories):
            batch = sample.batch
            assert isinstance(batch, Trajectory)
            rows = ~batch.faulty
            np.testing.assert_array_equal(batch.next_obs()[rows][:, T], batch.obs[:-1][rows][:, T] + 1)
            np.testing.assert_array_equal(batch.reward[rows], batch.next_obs()[rows][:, T])
            np.testing.assert_array_equal(batch.done[rows], batch.next_obs()[rows][:, T] == 4)
            kind = batch.obs[:-1][..., EPISODE] % 3
            np.testing.assert_array_equal(batch.terminated, batch.done & (kind != 1))
            np.testing.assert_array_equal(batch.truncated & rows, batch.done & (kind != 0))

    def test_full_store_refuses(self) -> None:
        spec, trajectories = fragments(partial(CountingEnv, 4), self.fragment_length, 40)
        store = self.make(spec, self.data, NUM_ENVS)
        for traj in trajectories:
            if store.room():
                store.put(traj)
        assert not store.room()
        with pytest.raises(RunFailed, match="full"):
            store.put(trajectories[-1])

    def check_steps(self, sample: Sample, happened: Counter[Step]) -> int:
        assert isinstance(sample.batch, Trajectory)
        steps = steps_of(sample.batch)
        assert not steps - happened
        return len(steps)


class ReplayContract(StoreContract):
    """Stores whose transitions are drawn repeatedly."""

    @pytest.mark.parametrize("ratio", [0.1, 1.0, 2.5, 8.0])
    def test_samples_per_insert_are_as_configured(self, ratio: float) -> None:
        spec, trajectories = fragments(partial(CountingEnv, 4), self.fragment_length, 40)
        data = replace(self.data, samples_per_insert=ratio, min_size=10)
        store = self.make(spec, data, NUM_ENVS)
        for traj in trajectories:
            store.put(traj)
            before = store.metrics()["store/inserted"]
            drain(store)
            counts = store.metrics()
            available_samples = ratio * (before - 10) - counts["store/sampled"]
            assert before < 10 or -1e-6 < available_samples < data.batch_size
        assert counts["store/inserted"] > 100
        assert abs(counts["store/samples_per_insert"] - ratio) < data.batch_size / (counts["store/inserted"] - 10)

    def test_every_transition_is_in_closed_form(self) -> None:
        spec, trajectories = fragments(partial(CountingEnv, 4, "mixed"), self.fragment_length, 30)
        store = self.make(spec, self.data, NUM_ENVS)
        for sample in put_and_drain(store, trajectories):
            self._check_closed_form(sample.batch, 4)

    def test_all_steps_can_be_drawn(self) -> None:
        spec, trajectories = fragments(partial(CountingEnv, 4), self.fragment_length, 8)
        store = self.make(spec, replace(self.data, samples_per_insert=60.0, capacity=400), NUM_ENVS)
        seen = set()
        for sample in put_and_drain(store, trajectories):
            assert isinstance(sample.batch, Transitions)
            seen |= {tuple(o[:3].astype(int)) for o in sample.batch.obs}
        expected = sum((steps_of(traj) for traj in trajectories), Counter[Step]())
        inserted = store.metrics()["store/inserted"]
        assert len(seen) == inserted  # all complete ones, once each
        assert len(expected) - inserted <= NUM_ENVS * (self.data.length - 1)

    def check_steps(self, sample: Sample, happened: Counter[Step]) -> int:
        batch = sample.batch
        assert isinstance(batch, Transitions)
        for obs, following in zip(batch.obs, batch.next_obs, strict=True):
            assert (int(obs[ID]), int(obs[EPISODE]), int(obs[T])) in happened
            # the step that led to the successor happened too
            assert (int(obs[ID]), int(obs[EPISODE]), int(following[T]) - 1) in happened
        self._check_closed_form(batch, None)
        return len(batch.obs)

    def _check_closed_form(self, batch: Trajectory | Transitions | Positions, length: int | None) -> None:
        """A CountingEnv's rewards are its step numbers, and its episodes end after `length` of them."""
        assert isinstance(batch, Transitions)
        gamma, n = self.data.gamma, self.data.length
        for row, (obs, following) in enumerate(zip(batch.obs, batch.next_obs, strict=True)):
            assert (obs[:2] == following[:2]).all()  # never across an end
            m = int(following[T] - obs[T])
            assert 1 <= m <= n
            reward = sum(gamma**j * (obs[T] + 1 + j) for j in range(m))
            assert batch.reward[row] == pytest.approx(reward, rel=1e-6)
            if length is not None:
                assert m == min(n, length - obs[T])
                terminated = following[T] == length and obs[EPISODE] % 3 != 1
                assert batch.discount[row] == pytest.approx(0 if terminated else gamma**m)


def saved_and_read(state: dict[str, Any]) -> dict[str, Any]:
    """A copy of a state as a checkpoint makes it: arrays separately, everything else through JSON."""

    def copy(value: Any) -> Any:
        if isinstance(value, dict):
            assert all(isinstance(key, str) for key in value)
            return {key: copy(item) for key, item in value.items()}
        if isinstance(value, np.ndarray):
            return value.copy()
        assert value is None or isinstance(value, (int, float, str, bool, list)), f"not for a checkpoint: {value!r}"
        return json.loads(json.dumps(value))

    copied: dict[str, Any] = copy(state)
    return copied


def assert_same(a: Any, b: Any) -> None:
    """Assert that two trees are equal bit for bit."""
    if isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            assert_same(a[key], b[key])
    elif isinstance(a, tuple):
        for x, y in zip(a, b, strict=True):
            assert_same(x, y)
    else:
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)
