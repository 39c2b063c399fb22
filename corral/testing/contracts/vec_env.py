"""The contract of a VecEnv as a test suite. Subclass it in a test module and implement `make`:

```python
class TestMyBackend(VecEnvContract):
    def make(self, factory, num_envs, seed=0):
        return MyVecEnv([factory] * num_envs, seed)
```
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

from corral.core.errors import UserError
from corral.core.types import tree_map
from corral.envs.vec_env import VecEnv
from corral.envs.wrappers import ClipReward, EpisodicLife
from corral.testing.envs import BigEnv, CountingEnv, LivesEnv, OneStateEnv, TreeEnv
from corral.testing.play import Row, play, random_actions

ID, EPISODE, T, LIFE = range(4)  # of a CountingEnv's observation


class VecEnvContract:
    """What every backend does with every environment."""

    def make(self, factory: Callable[[], Any], num_envs: int, seed: int = 0) -> VecEnv:
        raise NotImplementedError

    def test_first_batch_has_all_envs_and_starts_episodes(self) -> None:
        with self.make(CountingEnv, 5) as vec:
            batch = vec.recv()
            assert batch.env_ids.tolist() == [0, 1, 2, 3, 4]
            assert batch.first.all()
            assert not (batch.terminated | batch.truncated | batch.faulty | batch.game_over).any()
            assert (batch.reward == 0).all()
            assert batch.final_obs is None
            assert (batch.obs[:, T] == 0).all()

    @pytest.mark.parametrize("end", ["terminated", "truncated", "both", "mixed"])
    def test_true_last_observation_and_flags_survive_the_autoreset(self, end: str) -> None:
        with self.make(partial(CountingEnv, 5, end), 3) as vec:
            for rows in play(vec, 40):
                for row in rows:
                    assert row.next_obs[T] == row.obs[T] + 1  # never 0 at an end
                    assert row.reward == row.raw_reward == row.next_obs[T]
                    assert row.done == (row.next_obs[T] == 5) == row.game_over
                    kind = int(row.obs[EPISODE]) % 3 if end == "mixed" else None
                    if row.done:
                        assert row.terminated == (end in ("terminated", "both") or kind in (0, 2))
                        assert row.truncated == (end in ("truncated", "both") or kind in (1, 2))
                        assert row.following[T] == 0
                        assert row.following[EPISODE] == row.obs[EPISODE] + 1
                    else:
                        np.testing.assert_array_equal(row.following, row.next_obs)

    def test_every_row_is_one_real_step_and_none_is_lost(self) -> None:
        with self.make(partial(CountingEnv, 3), 4) as vec:
            for rows in play(vec, 50):
                assert [row.next_obs[LIFE] for row in rows] == list(range(1, 51))

    def test_an_environment_that_reuses_its_buffer_corrupts_nothing(self) -> None:
        with self.make(partial(CountingEnv, 5, "mixed", True), 3) as vec:
            for rows in play(vec, 40):
                assert [row.next_obs[LIFE] for row in rows] == list(range(1, 41))
                assert all(row.next_obs[T] == row.obs[T] + 1 for row in rows)

    def test_received_arrays_belong_to_the_receiver(self) -> None:
        with self.make(partial(CountingEnv, 2), 3) as vec:
            act, batch = random_actions(vec), vec.recv()
            kept = []
            for _ in range(20):
                for array in (batch.obs, batch.next_obs, batch.reward, batch.terminated):
                    array[...] = 77 if array.dtype != bool else True
                kept.append(batch)
                vec.send(batch.env_ids, act(batch))
                batch = vec.recv()
                assert (batch.obs[:, T] <= 2).all()
                assert (batch.reward <= 2).all()
            assert all((old.obs == 77).all() for old in kept)

    def test_environments_differ_from_each_other(self) -> None:
        with self.make(CountingEnv, 16) as vec:
            assert len(set(vec.recv().obs[:, ID])) == 16

    def test_transitions_depend_on_the_seed_alone(self) -> None:
        ids = []
        for seed in (0, 0, 1):
            with self.make(CountingEnv, 8, seed) as vec:
                ids.append([row.obs[ID] for rows in play(vec, 12) for row in rows])
        assert ids[0] == ids[1]
        assert not set(ids[0]) & set(ids[2])

    def test_reset_starts_over_with_another_seed(self) -> None:
        with self.make(CountingEnv, 4) as vec:
            first = vec.recv().obs[:, ID]
            vec.reset(7)
            second = vec.recv()
            vec.reset(0)
            third = vec.recv().obs[:, ID]
        assert not set(first) & set(second.obs[:, ID])
        assert second.first.all()
        np.testing.assert_array_equal(first, third)

    def test_nested_spaces_and_hybrid_actions(self) -> None:
        with self.make(TreeEnv, 3) as vec:
            for rows in play(vec, 10):
                for row in rows:
                    tree_map(np.testing.assert_array_equal, row.next_obs["echo"], row.action)
                    assert row.next_obs["t"] == row.obs["t"] + 1

    @pytest.mark.parametrize("num_envs", [1, 2, 18, 19, 33])
    def test_any_number_of_environments_works(self, num_envs: int) -> None:
        with self.make(partial(CountingEnv, 3), num_envs) as vec:
            rows = play(vec, 8)
            assert len(rows) == num_envs
            assert all([row.next_obs[LIFE] for row in r] == list(range(1, 9)) for r in rows)

    @pytest.mark.parametrize("nbytes", [1 << 10, 1 << 22, (1 << 22) + 1, 1 << 26])
    def test_observations_of_any_size(self, nbytes: int) -> None:
        count, steps = (1, 1) if nbytes > 1 << 25 else (2, 3)  # the first allocation is slow
        with self.make(partial(BigEnv, nbytes), count) as vec:
            batch = vec.recv()
            bases = batch.obs[:, nbytes // 2].copy()
            for t in range(1, steps + 1):
                vec.send(batch.env_ids, np.zeros(count, np.int64))
                batch = vec.recv()
                seen = batch.next_obs
                assert (seen[:, :8] == t).all()
                assert (seen[:, -8:] == t).all()
                np.testing.assert_array_equal(seen[:, nbytes // 2], bases)

    def test_a_reward_of_shape_one_is_a_reward(self) -> None:
        with self.make(partial(CountingEnv, 5, "terminated", False, (1,)), 3) as vec:
            for rows in play(vec, 10):
                assert [row.reward for row in rows] == [1, 2, 3, 4, 5] * 2

    def test_an_endless_episode_still_flows(self) -> None:
        with self.make(partial(CountingEnv, 0), 2) as vec:
            rows = play(vec, 300)
            assert not any(row.done for r in rows for row in r)
            assert rows[0][-1].next_obs[T] == 300

    def test_a_time_limit_is_bootstrapped_to_the_true_value(self) -> None:
        with self.make(partial(OneStateEnv, 5), 2) as vec:
            gamma, value = 0.9, 0.0
            rows = [row for r in play(vec, 400) for row in r]
            for row in rows:
                target = row.reward + gamma * value * (not row.terminated)
                value += 0.05 * (target - value)
            assert abs(value - 10.0) < 0.5  # 3.6 if the time limit were treated as termination

    def test_raw_rewards_and_games_survive_clipping_and_lives(self) -> None:
        def game() -> Any:
            return ClipReward(EpisodicLife(LivesEnv(4)))

        with self.make(game, 2) as vec:
            for rows in play(vec, 48):
                _check_lives(rows)

    def test_results_can_be_received_as_they_get_ready(self) -> None:
        with self.make(partial(CountingEnv, 4), 6) as vec:
            for rows in play(vec, 25, min_ready=2):
                assert [row.next_obs[LIFE] for row in rows] == list(range(1, 26))

    def test_envs_continue_from_saved_state(self) -> None:
        def read_all(vec: VecEnv) -> Any:
            vec.send(np.arange(4), np.zeros(4, np.int64))
            return vec.recv()

        with self.make(partial(CountingEnv, 9), 4) as vec:
            vec.record_episodes()
            vec.recv()
            for _ in range(12):
                before = read_all(vec)
            state = vec.state_dict()
        with self.make(partial(CountingEnv, 9), 4) as vec:
            restarted = vec.load_state_dict(state)
            if restarted:
                batch = vec.recv(env_ids=np.array(restarted))
                assert batch.env_ids.tolist() == restarted
                assert batch.first.all()
                assert (batch.obs[:, T] == 0).all()
            with pytest.raises(UserError, match="nothing to wait for"):
                vec.recv()
            after = read_all(vec)
            for row, env_id in enumerate(after.env_ids.tolist()):
                restored = env_id not in restarted
                assert after.obs[row, LIFE] == (before.obs[env_id, LIFE] + 1 if restored else 1)
                assert (after.obs[row, ID] == before.obs[env_id, ID]) == restored

    def test_misuse_is_refused(self) -> None:
        with self.make(CountingEnv, 3) as vec:
            act, batch = random_actions(vec), vec.recv()
            with pytest.raises(UserError, match="nothing to wait for"):
                vec.recv()
            with pytest.raises(UserError, match="shape"):
                vec.send(batch.env_ids, np.zeros((3, 2), np.int64))
            with pytest.raises(UserError, match="dtype"):
                vec.send(batch.env_ids, np.full(3, 0.5))
            with pytest.raises(UserError, match="outside"):
                vec.send(batch.env_ids, np.full(3, 9))
            with pytest.raises(UserError, match="distinct"):
                vec.send(np.array([0, 0, 1]), act(batch))
            with pytest.raises(UserError, match="distinct"):
                vec.send(np.array([0, 1, 3]), act(batch))
            vec.send(batch.env_ids, act(batch))
            with pytest.raises(UserError, match="recv"):
                vec.send(batch.env_ids, act(batch))
            assert len(vec.recv()) == 3
        with pytest.raises(UserError, match="closed"):
            vec.recv()


def _check_lives(rows: list[Row]) -> None:
    ends = [k for k, row in enumerate(rows) if row.terminated]
    games = [k for k, row in enumerate(rows) if row.game_over]
    assert len(ends) == 3 * len(games)
    assert len(games) >= 3
    assert {row.reward for row in rows} == {1.0, -1.0}
    assert {row.raw_reward for row in rows} == {5.0, -3.0}
