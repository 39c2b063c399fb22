"""Networks with a bf16 encoder keep the resolution of float32 in values, logits and recurrent states."""

import numpy as np
import pytest
import torch
from gymnasium import spaces

from corral.core.types import EnvSpec
from corral.nets.actor_critic import ActorCritic
from corral.nets.config import NetConfig
from corral.nets.network import use_precision
from corral.nets.q_network import QNetwork

SPEC = EnvSpec(spaces.Box(0, 255, (4, 36, 36), np.uint8), spaces.Discrete(4))


def images(n):
    """Noise with a bright quarter, and which quarter it is."""
    rng = np.random.default_rng(0)
    obs, quarter = rng.integers(0, 60, (n, 4, 36, 36), dtype=np.uint8), rng.integers(0, 4, n)
    for image, k in zip(obs, quarter, strict=True):
        image[:, 18 * (k // 2) :, 18 * (k % 2) :][:, :18, :18] += 150
    return torch.from_numpy(obs), torch.from_numpy(quarter)


def outputs(model, compute):
    """What the network computes with its encoder in fp32 and in bf16."""
    found = []
    for precision in ("fp32", "bf16"):
        use_precision(model, precision)
        with torch.inference_mode():
            found.append(compute(model))
    assert not torch.equal(*found), "the encoder did not change its precision"
    return found


@pytest.mark.parametrize("dueling", [False, "shared"])
def test_bf16_encoder_keeps_close_q_values_apart(dueling):
    torch.manual_seed(1)
    model = QNetwork(SPEC, 4, NetConfig(), dueling)
    obs, best = images(256)
    with torch.no_grad():  # a head for which the best action is worth 0.05 more than the others, which are worth 20
        features = model.encoder(obs)
        wanted = 0.05 * torch.nn.functional.one_hot(best, 4).float()
        model.head.weight.zero_()
        model.head.weight[:4] = torch.linalg.lstsq(features, wanted, driver="gelsd").solution.T
        model.head.bias.fill_(20.0)
    full, half = outputs(model, lambda model: model(obs))
    assert (full.argmax(-1) == best).float().mean() > 0.99
    assert (half.argmax(-1) == best).float().mean() > 0.99  # 25 % if all values of a row are equal


def test_bf16_encoder_keeps_advantages():
    torch.manual_seed(2)
    model = ActorCritic(SPEC, NetConfig())
    obs, _ = images(512)
    with torch.no_grad():
        features = model.encoder(obs)
        model.value_head.weight.copy_(torch.randn(1, features.shape[1]) * 0.2)
        model.value_head.bias.fill_(50.0)
    full, half = outputs(model, lambda model: model.value(obs))
    rewards = torch.randn(511)
    advantages = [rewards + 0.99 * values[1:] - values[:-1] for values in (full, half)]
    assert torch.corrcoef(torch.stack(advantages))[0, 1] > 0.999


@pytest.mark.parametrize("rnn", ["lstm", "gru"])
def test_bf16_encoder_keeps_the_recurrent_core_in_fp32(rnn):
    torch.manual_seed(3)
    model = ActorCritic(SPEC, NetConfig(rnn=rnn, rnn_size=16))
    obs, first = images(6)[0].unflatten(0, (3, 2)), torch.zeros(3, 2, dtype=torch.bool)
    full, half = outputs(model, lambda model: torch.cat([*model.unroll(obs, model.initial_state(2), first)[2]]))
    assert half.dtype == torch.float32
    assert not torch.equal(half, half.bfloat16().float())
    torch.testing.assert_close(full, half, rtol=0.05, atol=0.02)
