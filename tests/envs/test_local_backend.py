"""What only the local backend does."""

import logging
import time
from functools import partial

import numpy as np

import corral
from corral.envs.supervision import Supervision
from corral.testing import CountingEnv, SlowEnv


def test_watchdog_shows_stack_of_hanging_env(caplog):
    factories = [CountingEnv, partial(SlowEnv, 1.5, 1.5)]
    with corral.make_vec(factories, backend="local", supervision=Supervision(step_timeout_s=0.3)) as vec:
        batch = vec.recv()
        vec.send(batch.env_ids, np.zeros(2, np.int64))
        with caplog.at_level(logging.ERROR, "corral"):
            batch = vec.recv()
    reports = [record.getMessage() for record in caplog.records]
    assert len(reports) == 1
    assert "environment 1 hangs" in reports[0]
    assert "time.sleep" in reports[0]
    assert "backend='process'" in reports[0]
    assert not batch.faulty.any()


def test_asking_for_some_steps_only_those():
    with corral.make_vec(partial(SlowEnv, 0.0, 0.0), 6, "local") as vec:
        batch = vec.recv()
        vec.send(batch.env_ids, np.zeros(6, np.int64))
        assert vec.recv(min_ready=2).env_ids.tolist() == [0, 1]
        assert vec.recv(env_ids=np.array([5, 3])).env_ids.tolist() == [5, 3]
        assert vec.recv().env_ids.tolist() == [2, 4]


def test_the_watchdog_ends_with_the_vec_env():
    import threading

    before = threading.active_count()
    for _ in range(5):
        corral.make_vec(CountingEnv, 1, "local").close()
    time.sleep(0.05)
    assert threading.active_count() <= before + 1
