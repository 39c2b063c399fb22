"""Finds processes that tests have started and not ended. A conftest.py imports the hook and the fixture."""

import multiprocessing.forkserver
import multiprocessing.resource_tracker
import os
import signal
import time
import uuid
from bisect import bisect

import psutil
import pytest

TAG, SESSION = "CORRAL_TEST_SESSION", uuid.uuid4().hex


class Leftovers:
    """Every process that is started from now on inherits a variable, by which it is found even as an orphan."""

    def __init__(self):
        os.environ[TAG] = SESSION
        self._starts, self._tests = [], []

    def note(self, test):
        """Remember when a test began, so that a process can be attributed to it."""
        self._starts.append(time.time())
        self._tests.append(test)

    def end(self, patience_s=10.0, but_ray=False):
        """End what is left; a line for each, with the test during which it was started."""
        _, left = psutil.wait_procs([p for p in self._find() if not (but_ray and _is_of_ray(p))], patience_s)
        lines = []
        for process in left:
            try:
                test = self._tests[bisect(self._starts, process.create_time() + 0.01) - 1] if self._tests else "?"
                lines.append(f"{process.pid}, started in {test}: {' '.join(process.cmdline())[:300]}")
                process.kill()
            except psutil.NoSuchProcess:
                continue
        psutil.wait_procs(left, patience_s)
        return lines

    def _find(self):
        ours = {os.getpid(), multiprocessing.forkserver._forkserver._forkserver_pid,
                multiprocessing.resource_tracker._resource_tracker._pid}  # fmt: skip
        return [process for process in psutil.process_iter() if process.pid not in ours and _is_tagged(process)]


def _is_of_ray(process):
    try:
        return "/ray/" in (command := " ".join(process.cmdline())) or command.startswith("ray::")
    except psutil.Error:
        return True


def _is_tagged(process):
    try:
        return process.environ().get(TAG) == SESSION and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:  # it is gone, or another user's
        return False


LEFTOVERS = Leftovers()
# What a shell starts with `&` ignores SIGINT, and so would everything that tests start and interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_runtest_setup(item):
    LEFTOVERS.note(item.nodeid)


@pytest.fixture(scope="module", autouse=True)
def no_process_is_left():
    yield
    _require_none(LEFTOVERS.end(but_ray=True))


@pytest.fixture(scope="session", autouse=True)
def no_process_is_left_at_the_end():
    yield
    _require_none(LEFTOVERS.end())


def _require_none(left):
    assert not left, "processes were left behind, and have been ended:\n" + "\n".join(left)
