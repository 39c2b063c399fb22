"""Contract of a backend when an environment fails, as a test suite."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from corral.core.errors import EnvFailed, UserError
from corral.envs.supervision import Supervision
from corral.envs.vec_env import VecEnv
from corral.testing.contracts.vec_env import EPISODE, ID, LIFE, T
from corral.testing.envs import BigEnv, CountingEnv, FaultyEnv
from corral.testing.play import Row, play


def _broken() -> Any:
    raise RuntimeError("no licence for this simulator")


class SupervisionContract:
    """A failing environment ends its episode as truncated and faulty, is restarted, and is reported."""

    def make_supervised(self, factories: list[Callable[[], Any]], supervision: Supervision) -> VecEnv:
        raise NotImplementedError

    @pytest.mark.parametrize("kind", ["raise", "exit", "nan", "nan_reward"])
    def test_failing_env_yields_faulty_row_and_recovers(self, kind: str) -> None:
        self.check_fault(kind)

    def check_fault(self, kind: str) -> None:
        factories: list[Callable[[], Any]] = [CountingEnv, partial(FaultyEnv, kind), CountingEnv]
        with self.make_supervised(factories, Supervision(step_timeout_s=1.0)) as vec:
            rows = play(vec, 30)
            faults = [fault for fault in vec.faults if fault.kind != "neighbour"]
            assert vec.restarts >= len(faults) >= 2
        _check_faulty(rows[1], at=3)
        for healthy in (0, 2):
            assert not any(row.faulty for row in rows[healthy])
            assert [row.next_obs[LIFE] for row in rows[healthy]] == list(range(1, 31))
        word = {"exit": "raised", "raise": "raised", "kill": "killed", "hang": "hung"}.get(kind, "nan")
        for fault in faults:
            assert (fault.env_id, fault.kind, fault.step, fault.episode % 2) == (1, word, 3, 1)
            assert fault.seed > 0
        if kind == "raise":
            assert "the simulator broke" in faults[0].detail
            assert "testing/envs.py" in faults[0].detail  # the original traceback
        if kind == "hang":
            assert "envs.py" in faults[0].detail  # the stack it hung in
        assert len({row.obs[ID] for row in rows[1]}) == 1 + len([r for r in rows[1] if r.faulty])

    def test_a_reset_that_fails_costs_no_transition(self) -> None:
        factories: list[Callable[[], Any]] = [partial(FaultyEnv, "raise_reset"), CountingEnv]
        with self.make_supervised(factories, Supervision()) as vec:
            rows = play(vec, 30)
            assert vec.restarts >= 2
        for r in rows:
            assert not any(row.faulty for row in r)
            assert [row.next_obs[T] for row in r] == [1, 2, 3, 4, 5] * 6

    def test_a_crash_loop_ends_the_run_with_the_original_error(self) -> None:
        factories: list[Callable[[], Any]] = [CountingEnv, partial(FaultyEnv, "raise", 1, 1)]
        vec = self.make_supervised(factories, Supervision(restarts_in_a_row=3))
        with pytest.raises(EnvFailed, match=r"4 times in a row(.|\n)*the simulator broke"):
            play(vec, 50)
        vec.close()

    def test_env_that_cannot_be_built_names_the_reason(self) -> None:
        with pytest.raises(Exception, match="no licence for this simulator"):
            self.make_supervised([_broken], Supervision())

    def test_environments_of_different_shapes_are_refused(self) -> None:
        with pytest.raises(UserError, match="different observation spaces"):
            self.make_supervised([partial(BigEnv, 64), partial(BigEnv, 65)], Supervision())


class IsolationContract(SupervisionContract):
    """The same for failures that only environments in their own processes survive."""

    @pytest.mark.parametrize("kind", ["kill", "hang"])
    def test_killed_or_hanging_env_yields_faulty_row_and_recovers(self, kind: str) -> None:
        self.check_fault(kind)


def _check_faulty(rows: list[Row], at: int) -> None:
    faulty = [row for row in rows if row.faulty]
    assert len(faulty) >= 2
    for row in faulty:
        assert row.truncated
        assert not row.terminated
        assert not row.game_over
        assert row.reward == row.raw_reward == 0
        assert row.next_obs[T] == row.obs[T] == at - 1  # the last good observation
        assert row.following[T] == 0
        assert row.following[EPISODE] == 0  # a new environment
    for row in rows:
        if not row.faulty:
            assert row.next_obs[T] == row.obs[T] + 1
