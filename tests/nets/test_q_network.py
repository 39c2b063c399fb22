"""Q-networks with dueling streams."""

import numpy as np
import pytest
import torch
from gymnasium import spaces
from helpers.networks import VECTOR, batch_of, randomize, spec_of
from torch import nn

from corral.acting.model_policy import to_tensors
from corral.nets.config import NetConfig
from corral.nets.q_network import QNetwork

torch.set_num_threads(1)  # for small networks more only wait for each other


@pytest.mark.parametrize("dueling", [True, "shared"])
def test_dueling_values_have_the_advantages_mean_taken_out(dueling):
    model = randomize(QNetwork(spec_of(), 4, NetConfig(), dueling))
    obs = torch.randn(6, 3)
    shared = model.torso(model.encoder(obs))
    if dueling == "shared":
        advantage, value = model.head(shared).split([4, 1], -1)
    else:
        advantage = model.advantage_head(model.advantage_stream(shared))
        value = model.value_head(model.value_stream(shared))
    torch.testing.assert_close(model(obs), value + advantage - advantage.mean(-1, keepdim=True))
    torch.testing.assert_close(model(obs).mean(-1, keepdim=True), value)


@pytest.mark.parametrize(
    ("space", "hidden", "shared", "own"),
    [
        (VECTOR, (64, 32), [64], 32),
        (VECTOR, (32,), [], 32),
        (spaces.Box(0, 255, (4, 40, 40), np.uint8), (64, 32), [], 512),
    ],
)
def test_dueling_streams_have_hidden_layers_of_their_own(space, hidden, shared, own):
    model = QNetwork(spec_of(space), 4, NetConfig(hidden_sizes=hidden), dueling=True)
    assert [layer.out_features for layer in model.torso if isinstance(layer, nn.Linear)] == shared
    for stream in (model.value_stream, model.advantage_stream):
        assert [layer.out_features for layer in stream if isinstance(layer, nn.Linear)] == [own]
    assert (model.value_head.out_features, model.advantage_head.out_features) == (1, 4)
    assert not any(isinstance(layer, nn.Linear) for layer in model.encoder.modules())
    obs = to_tensors(batch_of(space, 5), torch.device("cpu"))
    model(obs).mean().backward()  # the mean is V: no gradient reaches the advantages
    assert model.value_stream[0].weight.grad.abs().sum() > 0
    assert model.advantage_stream[0].weight.grad.abs().max() < 1e-6
