"""External simulators over every binding, through the contract suite that all backends pass."""

import numpy as np
import pytest
from helpers.sims import Sim, free_url

import corral
from corral.testing import VecEnvContract
from corral.testing.play import play


class _Link(VecEnvContract):
    scheme, bind, count = "tcp", False, 2
    slow_tests = r".*\[67108864\]"

    @pytest.fixture(autouse=True)
    def _simulators(self):
        self._sims = []
        yield
        for sim in self._sims:
            sim.end()

    def make(self, factory, num_envs, seed=0):
        count = min(self.count, num_envs)
        urls = [free_url(self.scheme) for _ in range(count)] if self.bind else [free_url(self.scheme)] * count
        self._sims += [Sim(factory, url, bind=self.bind) for url in urls]
        env = ",".join(urls) if self.bind else urls[0]
        return corral.make_vec(env, num_envs, workers=count, seed=seed)


class TestTcpDialledByTwoSimulators(_Link):
    """The usual way."""


class TestZmqDialledByTwoSimulators(_Link):
    scheme = "zmq"


class TestTcpDialsOneSimulator(_Link):
    bind, count = True, 1


class TestZmqDialsTwoSimulators(_Link):
    scheme, bind = "zmq", True


class TestGrpcDialledByTwoSimulators(_Link):
    scheme = "grpc"


class TestGrpcDialsOneSimulator(_Link):
    scheme, bind, count = "grpc", True, 1


@pytest.mark.parametrize("count", [1, 2, 3])
def test_transitions_are_those_of_the_environment_in_process(count):
    with corral.make_vec("CartPole-v1", 6, "local", seed=3) as vec:
        expected = play(vec, 200)
    url = free_url()
    sims = [Sim(_cartpole, url) for _ in range(count)]
    with corral.make_vec(url, 6, workers=count, seed=3) as vec:
        actual = play(vec, 200)
    for a, b in zip(expected, actual, strict=True):
        for x, y in zip(a, b, strict=True):
            np.testing.assert_array_equal(x.next_obs, y.next_obs)
            assert (x.reward, x.terminated, x.truncated) == (y.reward, y.terminated, y.truncated)
    assert [sim.exitcode for sim in sims] == [0] * count


def _cartpole():
    from corral.envs.resolve import resolve

    return resolve("CartPole-v1").factory()
