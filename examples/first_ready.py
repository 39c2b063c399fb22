"""Step slow environments without waiting for the slowest: send actions to those that are ready."""

import time

import numpy as np

import corral
from corral.testing import SlowEnv

with corral.make_vec(SlowEnv, num_envs=16) as vec:  # each step waits 10 to 50 ms
    batch, steps, start = vec.recv(), 0, time.perf_counter()
    while time.perf_counter() - start < 2:
        vec.send(batch.env_ids, np.zeros(len(batch), np.int64))
        batch = vec.recv(min_ready=1)
        steps += len(batch)
    print(f"{steps / 2:.0f} steps/s; the maximum is 533, for 16 environments of 30 ms on average")
