"""Learning and acting on a device that is not the CPU: how often the CPU waits for it, and what it computes."""

from unittest import mock

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from helpers.batches import batch_for, randomize
from helpers.counted_device import DEVICE, counted_device
from torch import nn

from corral.acting import model_policy
from corral.acting.model_policy import read_tensors, to_tensors
from corral.algos import ppo
from corral.algos.registry import ALGORITHMS
from corral.algos.trajectories import compute_values
from corral.config.experiment import Experiment
from corral.core.types import EnvSpec
from corral.learn.device import find_device
from corral.nets import encoder
from corral.nets.config import NetConfig
from corral.nets.obs_norm import ObsNorm
from corral.topologies.sync import Sync

CARTPOLE = "CartPole-v1"
LSTM = {"rnn": "lstm", "rnn_size": 8}
SHORT = {"topology": "sync", "num_steps": 8, "batch_size": 4}
EPOCHS = {"num_steps": 16, "num_minibatches": 2, "update_epochs": 2}
CASES = {  # algorithm, environment, settings, and waits per update besides one per minibatch
    "reinforce": ("reinforce", CARTPOLE, {"episodes_per_update": 4}, 1),
    "a2c": ("a2c", CARTPOLE, {}, 1),
    "a2c-gru": ("a2c", CARTPOLE, {"rnn": "gru", "rnn_size": 8, "normalize_advantage": True}, 1),
    "ppo": ("ppo", CARTPOLE, EPOCHS, 1),
    "ppo-lstm": ("ppo", CARTPOLE, EPOCHS | LSTM, 1),
    "ppo-target-kl": ("ppo", CARTPOLE, EPOCHS | {"target_kl": 1e-4, "learning_rate": 0.01}, 1),
    "ppo-float64": ("ppo", "test_devices:Float64Env", EPOCHS | {"normalize_obs": True}, 1),
    "ppo-search": ("ppo-search", CARTPOLE, {"num_steps": 16, "num_simulations": 4}, 1),
    "alphazero": ("alphazero", "corral/TicTacToe-v0", {"num_simulations": 4, "batch_size": 32, "learning_starts": 64,
                                                       "replay_ratio": 1}, 0),
    "impala": ("impala", CARTPOLE, SHORT, 0),
    "impala-lstm": ("impala", CARTPOLE, SHORT | LSTM, 0),
    "appo": ("appo", CARTPOLE, SHORT | {"num_minibatches": 2}, 0),
    "dqn": ("dqn", CARTPOLE, {"learning_starts": 32, "batch_size": 16, "exploration_initial_eps": 0.0}, 0),
    "apex": ("apex", CARTPOLE, {"topology": "sync", "learning_starts": 32, "batch_size": 16}, 0),
}  # fmt: skip


class Float64Env(gymnasium.Env):
    """Observations as most MuJoCo environments give them, and choices that do not start at 0."""

    def __init__(self):
        floats, choices = spaces.Box(-9, 9, (3,), np.float64), spaces.MultiDiscrete([2, 3], start=[1, 5])
        self.observation_space, self.action_space = spaces.Dict({"a": floats, "b": choices}), spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self._look(), {}

    def step(self, action):
        obs = self._look()
        return obs, float(obs["a"][0] > 0) * action, bool(self.np_random.random() < 0.1), False, {}

    def _look(self):
        return {"a": self.np_random.normal(size=3), "b": self.np_random.integers([1, 5], [3, 8])}


def make(case):
    algo, env, settings, _ = CASES[case]
    overrides = {"steps": 1000, "num_envs": 4, "backend": "local", "device": "cpu"} | settings
    return Sync(Experiment.make(algo, env, preset="none", overrides=overrides), lambda kind, text: None)


def test_every_algorithm_is_counted():
    counted = {(ALGORITHMS[algo].module, ALGORITHMS[algo].class_name) for algo, *_ in CASES.values()}
    assert counted == {(entry.module, entry.class_name) for entry in ALGORITHMS.values()}


@pytest.mark.parametrize("case", CASES)
def test_one_wait_per_minibatch_and_the_weights_of_the_cpu(case):
    on_cpu, updates = make(case), 0
    on_cpu.vec.close()
    with counted_device() as waits, mock.patch("corral.topologies.base.find_device", return_value=DEVICE):
        topology = make(case)
        learn, losses = topology.learner.step, topology.algo.losses
        minibatches = []

        def counting(*args):
            minibatches.append(1)
            return losses(*args)

        def step(sample, progress, scale):
            nonlocal updates
            updates += 1
            minibatches.clear()
            before = len(waits)
            outputs = learn(sample, progress, scale)
            assert waits[before:] == ["aten._to_copy.default"] * (len(minibatches) + CASES[case][3])
            assert all(type(value) is float for output in outputs for value in output.metrics.values())
            with mock.patch("torch.Tensor.pin_memory", side_effect=AssertionError):
                on_cpu.learner.step(sample, progress, scale)
            return outputs

        topology.algo.losses, topology.learner.step = counting, step
        while updates < 3:
            topology.advance()
        topology.close()
        weights = topology.learner.flat.weights.detach().cpu()
    torch.testing.assert_close(on_cpu.learner.flat.weights.detach(), weights, rtol=1e-3, atol=2e-4)
    assert on_cpu.learner.version == topology.learner.version > 0


@pytest.mark.parametrize(("case", "state"), [("a2c", 0), ("a2c-gru", 1), ("dqn", 0)])
def test_acting_waits_once_for_all_environments(case, state):
    with counted_device() as waits, mock.patch("corral.topologies.base.find_device", return_value=DEVICE):
        topology = make(case)
        topology._learn = lambda sample, metrics: None
        waits.clear()
        topology.advance()
        topology.close()
    assert len(waits) == state + topology.algo.fragment_steps(4)  # `state`: the first recurrent states


def test_float64_stays_off_devices():
    norm = ObsNorm(2)
    norm.merge(ObsNorm.moments(torch.tensor([[1.0, 2.0], [3.0, 6.0]])))
    rows = np.array([[1.0, 4.0], [2.0, 2.0]])
    expected = norm(torch.from_numpy(rows).float())
    with counted_device() as waits:
        model = nn.Sequential(norm).to(DEVICE)
        sent = to_tensors(rows, DEVICE)
        out = model(sent)
        assert not waits
        assert sent.dtype == torch.float32
        assert norm.mean.device.type == "cpu"
        assert norm.mean.dtype == torch.float64
        torch.testing.assert_close(out.cpu(), expected)
    assert to_tensors(rows, torch.device("cpu")).dtype == torch.float64


def test_copies_to_cuda_come_from_pinned_memory():
    sent = mock.Mock(dtype=torch.uint8, device=torch.device("cpu"))
    model_policy._send(sent, torch.device("cuda", 1))
    sent.pin_memory().to.assert_called_once_with(torch.device("cuda", 1), non_blocking=True)
    sent.to.assert_not_called()
    for device in ("mps", "cuda"):  # MPS has no pinned memory; what is on a device already is not copied there first
        sent = mock.Mock(dtype=torch.uint8, device=torch.device("cpu" if device == "mps" else device))
        model_policy._send(sent, torch.device(device))
        sent.to.assert_called_once_with(torch.device(device))
        sent.pin_memory.assert_not_called()


def test_tensors_are_read_together():
    with counted_device() as waits:
        on_device = torch.full((), 3, device=DEVICE), torch.ones(2, 3, device=DEVICE)
        two, three, ones = read_tensors([torch.tensor(2.5), *on_device])
        assert len(waits) == 1
    assert (float(two), int(three), ones.shape) == (2.5, 3, (2, 3))


@pytest.fixture
def two_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch, "zeros", lambda *shape, device: None)


@pytest.mark.usefixtures("two_gpus")
def test_auto_keeps_small_networks_without_images_on_the_cpu():
    assert find_device("auto", nn.Linear(64, 64)).type == "cpu"
    assert find_device("auto", nn.Linear(1000, 1000)).type == "cuda"
    assert find_device("auto", nn.Conv2d(1, 1, 3)).type == "cuda"
    assert find_device("cuda", nn.Linear(64, 64)).type == "cuda"


@pytest.mark.usefixtures("two_gpus")
def test_learners_are_spread_over_gpus():
    conv = nn.Conv2d(1, 1, 3)
    for wanted in ("auto", "cuda"):
        assert [find_device(wanted, conv, rank).index for rank in range(4)] == [0, 1, 0, 1]
    assert find_device("cuda:1", conv, 0).index == find_device("cuda:1", conv, 3).index == 1


@pytest.mark.parametrize("rnn", ["none", "lstm"])
def test_values_of_pixels_are_computed_in_parts(rnn, monkeypatch):
    spec = EnvSpec(spaces.Box(0, 255, (1, 36, 36), np.uint8), spaces.Discrete(2))
    algo = ppo.Ppo(ppo.Config(net=NetConfig(rnn=rnn, rnn_size=8)), spec, 4)
    model = randomize(algo.build_model(), scale=0.05)
    traj = batch_for(algo, model)
    whole = compute_values(model, traj)
    seen = []
    model.encoder.convs[0].register_forward_hook(lambda module, args, out: seen.append(len(out)))
    monkeypatch.setattr(encoder, "_MAX_ROWS", 7)
    for expected, found in zip(whole, compute_values(model, traj), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    assert max(seen) == 7
    assert sum(seen) == traj.first.size + len(traj.final_at)
