"""A program with environments in worker processes, each with a child of its own, for tests that kill it."""

import time

import psutil

_PROGRAM = """
import ctypes, os, subprocess, sys, threading, time
import numpy as np
import corral
from corral.testing import CountingEnv

class Busy(CountingEnv):
    def reset(self, *, seed=None, options=None):
        obs, info = super().reset(seed=seed, options=options)
        obs[1], obs[2] = os.getpid(), subprocess.Popen(["sleep", "1000"]).pid
        return obs, info
    def step(self, action):
        {how}

def make():
    global vec
    vec = corral.make_vec(Busy, {workers}, "process", workers={workers})

{start}
batch = vec.recv()
print(*batch.obs[:, 1:3].astype(int).ravel(), vec._reaper._process.pid, flush=True)
vec.send(batch.env_ids, np.zeros({workers}, int))
time.sleep(1000)
"""


def busy_program(how, workers=1, start="make()"):
    """Its text; prints the pids of workers, their children and the reaper, then every environment does `how`."""
    return _PROGRAM.format(how=how, workers=workers, start=start)


def gone(pids, within_s=10.0):
    """Whether all these processes end in time; a zombie has ended."""
    until = time.monotonic() + within_s
    while any(psutil.pid_exists(p) and psutil.Process(p).status() != psutil.STATUS_ZOMBIE for p in pids):
        if time.monotonic() > until:
            return False
        time.sleep(0.05)
    return True
