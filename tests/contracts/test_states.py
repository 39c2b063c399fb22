"""Every way to keep the states of an environment in this process passes one suite.

Simulators that are slow make fewer steps here; `make states` runs them as long as the others.
"""

import os

import gymnasium
import pytest
from helpers.snapshot_envs import DeclaredWalk, Entangled, LockedWalk, Pole, Walk

import corral
from corral.snapshot.states import Level
from corral.testing import StatesContract

LONG = "CORRAL_LONG_STATES" in os.environ


def slow(steps, cycles):
    return (10_000, 100_000) if LONG else (steps, cycles)


class TestFields(StatesContract):
    steps, cycles = slow(10_000, 20_000)

    def make(self):
        return gymnasium.make("CartPole-v1")


class TestFieldsOfEntangledParts(StatesContract):
    def make(self):
        return Entangled()


class TestFieldsWithDice(StatesContract):
    def make(self):
        return Walk()


class TestDeclared(StatesContract):
    level = Level.PORTABLE

    def make(self):
        return DeclaredWalk()


class TestReplay(StatesContract):
    level, load_fraction = Level.REPLAY, 0.01

    def make(self):
        return LockedWalk()


class TestAtari(StatesContract):
    load_fraction = 0.02
    steps, cycles = slow(3_000, 2_000)

    def make(self):
        ale_py = pytest.importorskip("ale_py")
        gymnasium.register_envs(ale_py)
        return gymnasium.make("ALE/Breakout-v5", obs_type="ram")  # sticky actions


class TestBullet(StatesContract):
    load_fraction = 0.02
    steps, cycles = slow(10_000, 500)

    def make(self):
        pytest.importorskip("pybullet")
        return Pole()


class TestMujoco(StatesContract):
    load_fraction = 0.02
    steps, cycles = slow(10_000, 2_000)

    def make(self):
        pytest.importorskip("mujoco")
        return gymnasium.make("HalfCheetah-v5")


class TestAtariInCorralsWrappers(StatesContract):
    steps, load_fraction, cycles = 600, 0.1, 100

    def make(self):
        pytest.importorskip("ale_py")
        return corral.envs.suites.atari("Breakout")()


class TestMujocoWhoseRewardsAreOfWhatWasDerivedBefore(StatesContract):
    load_fraction = 0.1
    steps, cycles = slow(1_000, 500)

    def make(self):
        pytest.importorskip("mujoco")
        return gymnasium.make("Ant-v5")
