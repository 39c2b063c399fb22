"""The contract of states as a test suite: what `corral.Snapshots` does with an environment. Subclass it:

```python
class TestMyEnvironment(StatesContract):
    level = Level.MEMORY

    def make(self):
        return MyEnv()
```

Environments need Box observations and episodes of at least ten steps for any actions, for the tests with wrappers.
"""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.wrappers import FrameStackObservation, NormalizeObservation, NormalizeReward, TimeLimit

from corral.core.errors import UserError
from corral.core.gym_env import sample_actions
from corral.planning.snapshots import Snapshots
from corral.snapshot.rng import find_generators, read_generators, same_state
from corral.snapshot.states import Level
from corral.testing.checks.states import FLAT_BYTES, UninterruptedRun, make_step, time_cycles

Env = gymnasium.Env[Any, Any]


class StatesContract:
    """What every keeper of states does."""

    level: Level = Level.MEMORY
    steps = 10_000  # of the run that is interrupted by saves, loads and expansions
    load_fraction = 0.05  # fraction of its steps followed by a load; less if loading is slow
    cycles = 2_000  # saves and drops, after which memory use must be unchanged

    def make(self) -> Env:
        raise NotImplementedError

    def test_level_is_reported(self) -> None:
        with Snapshots(self.make) as snapshots:
            assert snapshots.level == self.level

    def test_save_load_expand_equal_uninterrupted_run(self) -> None:
        run = UninterruptedRun(self.make(), self.steps)
        rng = np.random.default_rng(0)
        with Snapshots(self.make, rng="replay") as snapshots:
            env, at, saved = snapshots.env, 0, {}
            for _ in range(self.steps):
                step = run.follow(env, at)
                assert step == run.seen[at], f"step {at}"
                at += 1
                ended = step.ended
                if not ended and rng.random() < 2 * self.load_fraction:
                    saved[at] = snapshots.save()
                if saved and rng.random() < self.load_fraction:
                    old = list(saved)[rng.integers(len(saved))]
                    assert run.expand_along(snapshots, saved[old], old) is None
                    if rng.random() < 0.5:
                        obs = snapshots.load(saved[old])
                        assert np.asarray(obs).tobytes() == run.seen[old - 1].obs
                        at = old
                if len(saved) > 20:
                    first = next(iter(saved))
                    snapshots.drop(saved.pop(first))
                if at == self.steps:
                    break

    def test_planning_leaves_the_acting_environment_bit_equal(self) -> None:
        alone, run = self.make(), []
        alone.reset(seed=3)
        actions = sample_actions(alone, 30, 5)
        for action in actions:
            run.append(make_step(alone, action))
            if run[-1].ended:
                break
        with Snapshots(self.make) as snapshots:
            env: Any = snapshots.env
            env.reset(seed=3)
            for action, expected in zip(actions, run, strict=False):
                root = snapshots.save()
                steps = snapshots.expand([root] * 3, np.stack([action] * 3))
                going = steps.children[~(steps.terminated | steps.truncated)]
                if len(going):
                    snapshots.states.rollout(going, np.stack([[action] * 4] * len(going)))
                snapshots.drop([root, *steps.children])
                assert make_step(env, action) == expected
            assert same_state(read_generators(find_generators(env)), read_generators(find_generators(alone)))
        alone.close()

    def test_a_rollout_is_a_chain_of_expansions(self) -> None:
        with Snapshots(self.make, rng="replay") as snapshots:
            root, states = snapshots.save(), snapshots.states
            actions = np.stack(sample_actions(self.make(), 8, 5))
            out = states.rollout(np.array([root, root]), np.stack([actions, actions]))
            parent = root
            for k in range(out.length[1]):
                steps = snapshots.expand(parent, actions[k])
                assert steps.reward[0] == out.reward[1, k]
                parent = int(steps.children[0])
            np.testing.assert_array_equal(steps.obs[0], out.obs[1])
            np.testing.assert_array_equal(out.obs[0], out.obs[1])

    def test_the_same_seeds_give_the_same_steps(self) -> None:
        with Snapshots(self.make) as snapshots:
            root, states = np.array([snapshots.save()] * 4), snapshots.states
            action = np.stack([states.spec.action_space.sample()] * 4)
            seeds = np.array([1, 2, 1, 2], np.uint64)
            steps = states.expand(root, action, states.new_ids(4), seeds)
            np.testing.assert_array_equal(steps.obs[:2], steps.obs[2:])
            np.testing.assert_array_equal(steps.reward[:2], steps.reward[2:])

    def test_time_limit_continues_from_the_state(self) -> None:
        with Snapshots(lambda: TimeLimit(self.make(), 10)) as snapshots:
            env = snapshots.env
            assert isinstance(env, gymnasium.Env)
            actions = sample_actions(env, 10, 5)
            for action in actions[:7]:
                env.step(action)
            state = snapshots.save()
            env.step(actions[7])
            env.reset()
            env.step(actions[0])
            snapshots.load(state)
            assert [bool(env.step(action)[3]) for action in actions[7:]] == [False, False, True]
            flags, parent = [], state
            for action in actions[7:]:
                steps = snapshots.expand(parent, action)
                flags.append(bool(steps.truncated[0]))
                parent = int(steps.children[0])
            assert flags == [False, False, True]

    def test_frame_stacks_and_normalisers_are_part_of_the_state(self) -> None:
        def wrapped() -> Env:
            env = TimeLimit(self.make(), 9)
            return FrameStackObservation(NormalizeReward(NormalizeObservation(env)), 3)

        run = UninterruptedRun(wrapped(), 60)
        with Snapshots(wrapped, rng="replay") as snapshots:
            saved = {}
            for at in range(50):
                assert run.follow(snapshots.env, at) == run.seen[at]
                if at % 7 == 3 and not run.seen[at].ended:
                    saved[at + 1] = snapshots.save()
            for at, state in reversed(saved.items()):
                assert run.expand_along(snapshots, state, at) is None
                snapshots.load(state)
                for k in range(at, at + 10):
                    assert run.follow(snapshots.env, k) == run.seen[k]

    def test_invalid_requests_are_refused(self) -> None:
        with Snapshots(self.make) as snapshots:
            root = snapshots.save()
            snapshots.drop([root, 12345])
            action = snapshots.states.spec.action_space.sample()
            for call in (lambda: snapshots.load(root), lambda: snapshots.expand(root, action)):
                with pytest.raises(UserError, match="was dropped or never saved"):
                    call()

    def test_full_budget_is_an_error_and_evicts_nothing(self) -> None:
        with Snapshots(self.make) as snapshots:
            state = snapshots.save()
            one = snapshots.states.nbytes  # type: ignore[attr-defined]
        with Snapshots(self.make, memory_mb=3.5 * one / 1e6) as snapshots:
            state = snapshots.save()
            snapshots.save()
            snapshots.save()
            with pytest.raises(UserError, match="memory_mb"):
                snapshots.save()
            shown = snapshots.load(state)
            action = snapshots.states.spec.action_space.sample()
            with pytest.raises(UserError, match="memory_mb"):
                snapshots.expand([state] * 20, np.stack([action] * 20))
            np.testing.assert_array_equal(snapshots.load(state), shown)

    def test_saves_and_drops_leave_memory_flat(self) -> None:
        with Snapshots(self.make) as snapshots:
            root, action = snapshots.save(), snapshots.states.spec.action_space.sample()

            def cycle() -> None:
                snapshots.drop([snapshots.save() for _ in range(10)])
                snapshots.drop(snapshots.expand(root, action).children)

            assert time_cycles(cycle, 10, self.cycles, np.inf)[1] < FLAT_BYTES
