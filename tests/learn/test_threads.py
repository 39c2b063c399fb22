"""Threads of a learner by the cores that other processes leave, and the precision of its encoder, measured."""

import os
import subprocess
import sys
import time
from dataclasses import replace

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from threadpoolctl import threadpool_info
from torch import nn

import corral
from corral.algos import a2c
from corral.config.experiment import Experiment
from corral.core import machine
from corral.core.errors import UserError
from corral.core.types import EnvSpec
from corral.learn import device, threads
from corral.learn.threads import ThreadAdapter, choose_threads
from corral.nets.actor_critic import ActorCritic
from corral.nets.config import NetConfig
from corral.topologies.sync import Sync

IMAGES, SMALL = nn.Conv2d(1, 1, 3), nn.Linear(2, 2)
SPEC = EnvSpec(spaces.Box(0, 255, (1, 36, 36), np.uint8), spaces.Discrete(2))


class Pixels(gymnasium.Env):
    observation_space, action_space = SPEC.observation_space, SPEC.action_space

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros((1, 36, 36), np.uint8), {}

    def step(self, action):
        return np.zeros((1, 36, 36), np.uint8), 0.0, False, False, {}


@pytest.fixture(autouse=True)
def _same_threads_afterwards():
    before = torch.get_num_threads()
    yield
    threads.set_threads(before)


@pytest.fixture
def free(monkeypatch):
    """Sets how many of four cores are free."""

    def leave(count):
        monkeypatch.setattr(threads, "free_cores", lambda: count)

    monkeypatch.setattr(threads, "cores", lambda: 4)
    leave(4.0)
    return leave


@pytest.mark.parametrize(("count", "expected"), [(4.0, 4), (2.6, 3), (1.2, 1), (0.0, 1)])
def test_image_networks_get_the_free_cores(free, count, expected):
    free(count)
    chosen = choose_threads(None, IMAGES)
    assert chosen.number == expected
    assert f"{count:.1f} of 4 cores are free" in str(chosen)


def test_other_processes_of_the_run_keep_their_cores(free):
    assert choose_threads(None, IMAGES, others=3).number == 1
    assert choose_threads(None, IMAGES, others=9).number == 1


def test_given_threads_and_small_networks_are_not_measured(free, monkeypatch):
    monkeypatch.setattr(threads, "free_cores", lambda: pytest.fail("measured"))
    assert choose_threads(3, IMAGES).number == 3
    assert choose_threads("all", IMAGES).number == 4
    assert choose_threads("all", SMALL).number == choose_threads(None, SMALL).number == 1


def test_torch_threads_is_a_number_or_all():
    assert Experiment.make("ppo", "CartPole-v1", overrides={"torch_threads": "all"}).torch_threads == "all"
    for wrong in ("0", "most"):
        with pytest.raises(UserError, match="torch_threads"):
            Experiment.make("ppo", "CartPole-v1", overrides={"torch_threads": wrong})


def test_free_cores_are_those_of_the_machine(monkeypatch):
    assert 0.0 <= machine.free_cores(2, 0.02) <= machine.cores()
    monkeypatch.setattr(machine.CpuMeter, "_read", lambda self: None)  # not Linux
    monkeypatch.setattr(machine.os, "getloadavg", lambda: (machine.cores() - 0.5, 0.0, 0.0), raising=False)
    assert machine.free_cores() == 0.5
    monkeypatch.delattr(machine.os, "getloadavg")  # Windows
    assert machine.free_cores() == machine.cores()
    assert machine.CpuMeter().free() is None


def test_own_cpu_time_counts_as_free(monkeypatch):
    times = iter([(10.0, 0.0), (10.5, 0.5), (10.5, 1.0)])
    monkeypatch.setattr(machine.CpuMeter, "_read", lambda self: next(times))
    monkeypatch.setattr(machine, "cores", lambda: 2)
    meter = machine.CpuMeter()
    assert [meter.free(), meter.free()] == [1.0, 0.0]


def test_threads_adapt_when_two_checks_agree(free, monkeypatch):
    found = iter([4.0, 1.0, 1.1, 1.0, 3.0, 1.0, None])
    monkeypatch.setattr(machine.CpuMeter, "free", lambda self: next(found))
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    adapter, seen = ThreadAdapter(4), []
    for _ in range(7):
        assert adapter.update() == ""  # not due
        now[0] += threads._CHECK_S
        seen.append((adapter.update(), adapter.number))
    assert [number for _, number in seen] == [4, 4, 1, 1, 1, 1, 1]
    assert seen[2][0] == "torch threads 4 -> 1: other processes leave 1.1 of 4 cores"
    assert torch.get_num_threads() == 1


def test_sync_stores_threads_and_precision_with_the_run(free, monkeypatch):
    free(2.0)
    monkeypatch.setattr(device, "_encoder_times", lambda *args: {"fp32": [1.0] * 7, "bf16": [0.5] * 7})
    settings = {"steps": 100, "num_envs": 2, "num_steps": 4, "num_minibatches": 1, "backend": "local"}
    first = Sync(Experiment.make("ppo", Pixels, overrides=settings), lambda kind, text: None)
    first.close()
    stored = first.experiment
    assert (stored.torch_threads, stored.precision) == (2, "bf16")
    free(1.0)
    again = Sync(stored, lambda kind, text: None)
    again.close()
    assert (again.threads, again.experiment) == (2, stored)
    old = Sync(replace(stored, torch_threads="all"), lambda kind, text: None)
    old.close()
    assert old.threads == 4


Config = a2c.Config


class OwnConvolutions(a2c.A2c):
    """An algorithm whose network has convolutions, but no Encoder of Corral's."""

    def build_model(self):
        model = super().build_model()
        model.encoder = nn.Sequential(nn.Unflatten(1, (1, 2, 2)), nn.Conv2d(1, 1, 1), nn.Flatten())
        return model


def test_threads_of_own_convolutions_are_stored_too(free):
    free(2.0)
    settings = {"steps": 100, "num_envs": 2, "backend": "local"}
    run = Sync(Experiment.make(OwnConvolutions, "CartPole-v1", overrides=settings), lambda kind, text: None)
    run.close()
    assert run.experiment.torch_threads == 2


@pytest.mark.parametrize(
    ("ratios", "name", "why"),
    [([0.5] * 7, "bf16", "measured"), ([0.95] * 7, "fp32", "measured"), ([2.0] * 6 + [0.1], "fp32", "measured"),
     ([0.5, 2.0, 0.5, 2.0, 0.5, 0.5, 1.0], "fp32", "too noisy")],
)  # fmt: skip
def test_bf16_must_be_clearly_faster(ratios, name, why, monkeypatch):
    monkeypatch.setattr(device, "_encoder_times", lambda *args: {"fp32": [1.0] * 7, "bf16": ratios})
    chosen = device.choose("auto", ActorCritic(SPEC, NetConfig()), SPEC.observation)
    assert (chosen.name, why in chosen.why) == (name, True)


def test_precisions_are_measured_in_turns():
    times = device._encoder_times(ActorCritic(SPEC, NetConfig()), SPEC.observation)
    assert {name: len(seconds) for name, seconds in times.items()} == {"fp32": 7, "bf16": 7}


@pytest.mark.parametrize(
    ("code", "given", "expected"),
    [("import corral", None, "PASSIVE"), ("import torch, corral", None, ""), ("import corral", "ACTIVE", "ACTIVE")],
)
def test_waiting_threads_sleep_if_corral_comes_first(code, given, expected):
    env = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    env |= {"OMP_WAIT_POLICY": given} if given else {}
    code = f"{code}, os; print(os.environ.get('OMP_WAIT_POLICY', ''))"
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.strip() == expected


def test_the_callers_threads_return_after_a_run(tmp_path):
    threads.set_threads(2)
    settings = {"num_envs": 2, "backend": "local", "preset": "none", "quiet": True, "eval_episodes": 0}
    corral.train("a2c", "CartPole-v1", 64, 0, tmp_path, **settings)
    corral.evaluate(tmp_path, 1)
    assert torch.get_num_threads() == 2
    assert {pool["num_threads"] for pool in threadpool_info() if pool["user_api"] == "blas"} <= {1, 2}
    with threads.own_threads():
        threads.set_threads(1)
    assert max(pool["num_threads"] for pool in threadpool_info() if pool["user_api"] == "blas") == 2
