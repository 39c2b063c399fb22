"""Waiting for more results before deciding."""

import time

import numpy as np
import pytest

import corral
from corral.testing.envs import CountingEnv, SlowEnv


@pytest.mark.parametrize("backend", ["process", "local"])
def test_linger_gathers_results_of_other_processes(backend):
    with corral.make_vec(CountingEnv, 4, backend, workers=2) as vec:
        ids = vec.recv().env_ids
        for _ in range(20):
            vec.send(ids, np.zeros(4, np.int64))
            vec.linger(4, 30.0)
            assert len(vec.recv(min_ready=1)) == (4 if backend == "process" else 1)
            if backend == "local":
                assert len(vec.recv()) == 3


def test_lingering_ends_when_its_time_is_up_and_loses_nothing():
    with corral.make_vec([lambda: SlowEnv(), lambda: CountingEnv()], backend="process", workers=2) as vec:
        vec.recv()
        vec.send(np.arange(2), np.zeros(2, np.int64))
        vec.linger(2, 0.001)
        seen = vec.recv(min_ready=1).env_ids.tolist()
        while len(seen) < 2:
            seen += vec.recv(min_ready=1).env_ids.tolist()
            time.sleep(0.01)
        assert sorted(seen) == [0, 1]
