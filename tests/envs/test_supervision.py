"""Deadlines of a step and of a start, and reports of faults that repeat."""

from __future__ import annotations

import logging
import time

import numpy as np
import pytest

import corral
from corral.envs.supervision import Fault, FaultLog, Supervision, marked_env, starting
from corral.runs.events import read_events
from corral.testing import CountingEnv


class SlowReset(CountingEnv):
    """Every reset takes twice as long as a step may."""

    def reset(self, **kwargs):
        time.sleep(1.0)
        return super().reset(**kwargs)


class SlowBuild(CountingEnv):
    """Two of them take longer to build than one may."""

    def __init__(self):
        time.sleep(1.5)
        super().__init__()


class Broken(CountingEnv):
    """Every step fails, with another message each time."""

    count = 0

    def step(self, action):
        Broken.count += 1
        raise RuntimeError(f"the arm left its range at {Broken.count}")


def fault(env_id, text="ValueError: 3 is too much", line=5, step=12):
    trace = f'Traceback (most recent call last):\n  File "sim.py", line {line}, in step\n{text}'
    return Fault(env_id, "raised", 1, step, step, trace)


def test_a_reset_may_take_as_long_as_a_start_and_not_as_a_step():
    limits = Supervision(step_timeout_s=0.5, start_timeout_s=60.0)
    with corral.make_vec(SlowReset, 1, "process", 1, supervision=limits) as vec:
        batch = vec.recv()
        for _ in range(7):  # into the second episode
            vec.send(batch.env_ids, np.zeros(1, np.int64))
            batch = vec.recv()
        assert vec.restarts == 0


def test_each_environment_of_a_worker_has_its_own_time_to_start():
    with corral.make_vec(SlowBuild, 3, "process", 1, supervision=Supervision(start_timeout_s=3.5)) as vec:
        assert len(vec.recv().env_ids) == 3


def test_a_mark_says_which_environment_starts_or_steps():
    limits = Supervision(step_timeout_s=1.0, start_timeout_s=2.0)
    for env_id in (0, 1, 7):
        assert marked_env(starting(env_id)) == marked_env(env_id) == env_id
        assert (limits.limit_s(env_id), limits.limit_s(starting(env_id))) == (1.0, 2.0)


@pytest.mark.parametrize("settings", [{"step_timeout_s": 0}, {"start_timeout_s": -1}, {"restarts_total": -1}])
def test_impossible_limits_are_refused(settings, tmp_path):
    with pytest.raises(corral.UserError, match=next(iter(settings))):
        corral.train("ppo", "CartPole-v1", 100, run_dir=tmp_path / "run", **settings)


def test_limits_of_a_run_reach_training_and_evaluation(monkeypatch):
    from corral.runs.evaluation import evaluate
    from corral.topologies import base

    seen = []
    for module in (base, evaluate):
        monkeypatch.setattr(module, "make_vec", lambda *args, supervision, **kwargs: seen.append(supervision))
    experiment = corral.Experiment.make("ppo", "CartPole-v1", overrides={"step_timeout_s": 7, "start_timeout_s": "300"})
    base.make_train_vec(experiment, 1, 0, "local", None)
    evaluate.make_eval_vec(experiment, 1, 0)
    assert seen == [Supervision(step_timeout_s=7.0, start_timeout_s=300.0)] * 2


def test_repeated_faults_are_shown_once_in_full_and_counted(caplog):
    faults = FaultLog(Supervision())
    with caplog.at_level(logging.WARNING, "corral.envs"):
        for k in range(100):
            faults.record(fault(k % 4, f"ValueError: {k} is too much", step=20 * k))
        faults.record(fault(0, line=6))
        faults.close()
    texts = [record.getMessage() for record in caplog.records]
    assert [text.count("Traceback") for text in texts] == [1, 0, 0, 0, 0, 0, 0, 1, 0]
    assert [text.split()[0] for text in texts[1:7]] == ["2", "4", "8", "16", "32", "64"]
    assert texts[-1].startswith("100 faults like this one")


def test_a_run_whose_steps_all_fail_ends_and_names_the_error(tmp_path, caplog):
    with pytest.raises(corral.EnvFailed, match=r"11 times in a row.*RuntimeError: the arm left its range") as caught:
        corral.train("ppo", Broken, 10_000, run_dir=tmp_path / "run", quiet=True, num_envs=4, backend="local")
    assert "\n" not in str(caught.value)
    events = [event for event in read_events(tmp_path / "run" / "events.jsonl") if event["kind"] == "fault"]
    assert len(events) < 10
    assert events[-1]["similar"] == events[-1]["count"] > 30
    assert caplog.text.count("Traceback") == 1
