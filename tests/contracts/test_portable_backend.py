"""The process backend with nothing that Windows lacks, through the contract suites."""

import pytest
from helpers.portable import forced  # noqa: F401

import corral
from corral.envs.backends.process.vec_env import ProcessVecEnv
from corral.testing import IsolationContract, VecEnvContract

pytestmark = pytest.mark.usefixtures("forced")


class TestPortableProcess(VecEnvContract):
    slow_tests = r"test_(?!first_batch|every_row|received_arrays|nested_spaces)"

    def make(self, factory, num_envs, seed=0):
        return corral.make_vec(factory, num_envs, "process", workers=2, seed=seed)


class TestPortableSupervision(IsolationContract):
    slow_tests = r"test_(?!killed_or_hanging|env_that_cannot)"

    def make_supervised(self, factories, supervision):
        return ProcessVecEnv(factories, "test", supervision, workers=len(factories))
