"""Every backend that can run any environment, through the public contract suites."""

import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from helpers.on_runtimes import RAY_BACKEND

import corral
from corral.envs.backends.local import LocalVecEnv
from corral.envs.backends.process.vec_env import ProcessVecEnv
from corral.envs.backends.ray.vec_env import RayVecEnv
from corral.testing import IsolationContract, SupervisionContract, VecEnvContract
from corral.testing.play import play


class TestLocal(VecEnvContract, SupervisionContract):
    def make(self, factory, num_envs, seed=0):
        return corral.make_vec(factory, num_envs, "local", seed=seed)

    def make_supervised(self, factories, supervision):
        return LocalVecEnv(factories, "test", supervision)


class TestProcess(VecEnvContract):
    slow_tests = r".*\[67108864\]"

    def make(self, factory, num_envs, seed=0):
        return corral.make_vec(factory, num_envs, "process", workers=2, seed=seed)


class TestProcessSupervision(IsolationContract):
    def make_supervised(self, factories, supervision):
        return ProcessVecEnv(factories, "test", supervision, workers=len(factories))


class TestRay(VecEnvContract):
    pytestmark = RAY_BACKEND
    slow_tests = r"test_(?!first_batch|every_row|received_arrays|nested_spaces|results_can|envs_continue)"

    def make(self, factory, num_envs, seed=0):
        return corral.make_vec(factory, num_envs, "ray", workers=2, seed=seed)


@pytest.mark.faults  # Ray is slow to notice a death, slower than the deadlines here on a busy machine
class TestRaySupervision(IsolationContract):
    pytestmark = RAY_BACKEND

    def make_supervised(self, factories, supervision):
        return RayVecEnv(factories, "test", supervision, workers=len(factories))


class _Vector(VecEnvContract):
    vector_class, mode = SyncVectorEnv, AutoresetMode.SAME_STEP
    slow_tests = r".*\[67108864\]"

    def make(self, factory, num_envs, seed=0):
        vec = corral.make_vec(self.vector_class([factory] * num_envs, autoreset_mode=self.mode))
        vec.seed = seed
        return vec


class TestVectorSameStep(_Vector):
    pass


class TestVectorDisabled(_Vector):
    mode = AutoresetMode.DISABLED


class TestVectorNextStep(_Vector):
    mode = AutoresetMode.NEXT_STEP


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_transitions_do_not_depend_on_the_number_of_workers(workers):
    with corral.make_vec("CartPole-v1", 8, "local", seed=3) as vec:
        expected = play(vec, 200)
    with corral.make_vec("CartPole-v1", 8, "process", workers=workers, seed=3) as vec:
        actual = play(vec, 200)
    for a, b in zip(expected, actual, strict=True):
        for x, y in zip(a, b, strict=True):
            np.testing.assert_array_equal(x.next_obs, y.next_obs)
            assert (x.reward, x.terminated, x.truncated) == (y.reward, y.terminated, y.truncated)
