"""Which device and precision the networks of a topology's processes get."""

from unittest import mock

import pytest
import torch

from corral.config.experiment import Experiment
from corral.envs.make import make_vec
from corral.learn.device import Precision
from corral.topologies.actor import Actor
from corral.topologies.base import make_topology
from corral.topologies.learner_group import PeerLearner
from corral.topologies.weight_channel import WeightChannel
from corral.topologies.worker import Worker


def experiment(topology, env="CartPole-v1", algo="impala", **settings):
    settings = {"topology": topology, "num_envs": 2, "actors": 2, "device": "cuda"} | settings
    return Experiment.make(algo, env, preset="none", overrides=settings)


@pytest.fixture
def asked():
    """The devices that were asked for, with the learner's rank; all of them are the CPU."""
    with mock.patch("corral.topologies.base.find_device", return_value=torch.device("cpu")) as find:
        yield lambda: [(call.args[0], *call.args[2:]) for call in find.call_args_list if len(call.args) > 1]


def test_peer_learners_ask_for_the_device_of_their_rank(asked):
    with make_vec("CartPole-v1", 1, "local") as vec:
        PeerLearner(experiment("actor_learner"), vec.spec.to_json(), Precision("fp32", ""), 3, 0, None)
    assert asked() == [("cuda", 3)]


def test_workers_ask_for_the_device_of_their_rank(asked):
    worker = Worker(experiment("data_parallel", algo="ppo", backend="local"), "127.0.0.1", b"", 1, 0, None)
    try:
        worker.build("fp32")
    finally:
        worker.close()
    assert asked() == [("cuda", 1)]


@pytest.mark.parametrize(
    ("topology", "runtime", "device"),
    [
        ("actor_learner", "process", "cpu"),
        ("central_inference", "process", "cuda"),
        ("central_inference", "ray", "cpu"),
    ],
)
def test_only_central_inference_uses_the_run_device(asked, topology, runtime, device):
    backend = "process" if topology == "central_inference" else "local"
    actor = Actor(experiment(topology, runtime=runtime, backend=backend), 0, 0, None)
    actor.close()
    assert asked() == [(device, 0)]


def test_actors_take_a_precision_only_from_the_same_device():
    settings = experiment(
        "actor_learner", "helpers.pixel_envs:FollowTheSpot", device="cpu", precision="bf16", runtime="inline",
        backend="local", actors=1, num_steps=4, batch_size=2,
    )  # fmt: skip
    topology = make_topology(settings, lambda kind, text: None)
    try:
        runtime = mock.Mock(share=lambda mail: mail)
        mail = WeightChannel(topology.learner, runtime, 0)._newest()
    finally:
        topology.close()
    for device, bf16 in (("cpu", True), ("cuda", False)):
        actor = Actor(settings, 0, 0, None)
        actor._load(mail | {"device": device})
        actor.close()
        assert actor._model.encoder._bf16 is bf16
