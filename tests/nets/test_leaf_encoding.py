"""How bytes, other integers and float images enter a network."""

import numpy as np
import pytest
import torch
from gymnasium import spaces

from corral.algos import ppo
from corral.core.spaces import Layout
from corral.core.types import EnvSpec
from corral.nets.actor_critic import ActorCritic
from corral.nets.config import NetConfig
from corral.nets.encoder import Encoder
from corral.nets.network import describe_encoding
from corral.nets.torsos import ImpalaCnn, NatureCnn

GRID = spaces.Box(0, 255, (7, 7, 3), np.uint8)  # MiniGrid's codes
FLOATS = spaces.Box(0, 1, (84, 84, 3), np.float32)


def make(space, **settings):
    torch.manual_seed(0)
    return Encoder(Layout(space), NetConfig(**settings))


def encode(space, values, **settings):
    encoder = make(space, **settings)
    with torch.no_grad():
        found = encoder(torch.from_numpy(np.asarray(values, space.dtype)))
    assert found.shape[1] == encoder.out_size
    return found.numpy()


def seen_image(encoder, obs):
    seen = []
    encoder.convs[0].register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    encoder(torch.from_numpy(obs))
    return seen[0].numpy()


def test_codes_of_a_grid_are_one_hot():
    rows = np.zeros((2, 7, 7, 3))
    rows[1, 0, 0] = [10, 15, 200]
    found = encode(GRID, rows)
    codes, rest = found[:, : 147 * 16].reshape(2, 147, 16), found[:, 147 * 16 :]
    assert (codes.sum(-1) == 1).all()
    assert codes[1, :3].argmax(-1).tolist() == [10, 15, 15]
    np.testing.assert_allclose(rest[1, :3], np.array([10, 15, 200]) / 255, rtol=1e-6)


@pytest.mark.parametrize("dtype", [np.uint8, np.int64])
def test_codes_with_few_values_have_a_place_each(dtype):
    space = spaces.Box(-1 if dtype is np.int64 else 0, 10, (3, 3), dtype)
    low = int(space.low.min())
    found = encode(space, np.full((1, 3, 3), 4)).reshape(9, -1)
    assert found.shape[1] == 11 - low
    assert (found.argmax(-1) == 4 - low).all()


def test_bytes_are_scaled_by_their_bounds():
    assert encode(spaces.Box(0, 10, (4,), np.uint8), [[0, 5, 10, 10]]).tolist() == [[0, 0.5, 1, 1]]
    assert encode(spaces.Box(0, 1, (2, 2), np.uint8), [[[0, 1], [1, 1]]]).tolist() == [[0, 1, 1, 1]]


@pytest.mark.parametrize(
    ("settings", "expected"), [({"obs_encoding": "raw"}, 51.0), ({"obs_encoding": "scaled"}, 0.2),
                               ({"obs_encoding": "bytes"}, 0.2)],
)  # fmt: skip
def test_a_setting_decides_how_codes_are_encoded(settings, expected):
    found = encode(GRID, np.full((1, 7, 7, 3), 51), **settings)
    assert found.shape == (1, 147)
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_bytes_are_normalized_on_request():
    encoder = make(GRID, normalize_obs=True)
    rows = np.random.default_rng(0).integers(3, 9, (500, 7, 7, 3), np.uint8)
    encoder.norm.merge(encoder.moments(rows_of(rows)))
    found = encoder(rows_of(rows))
    torch.testing.assert_close(found.mean(0), torch.zeros(147), atol=1e-4, rtol=0)
    torch.testing.assert_close(found.std(0, correction=0), torch.ones(147), atol=1e-4, rtol=0)


def rows_of(rows):
    return torch.from_numpy(rows)


@pytest.mark.parametrize("high", [1, 255])
def test_float_images_are_scaled_by_their_bounds(high):
    encoder = make(spaces.Box(0, high, (84, 84, 3), np.float32))
    assert isinstance(encoder.convs[0], NatureCnn)
    obs = np.random.default_rng(0).uniform(0, high, (2, 84, 84, 3)).astype(np.float32)
    np.testing.assert_allclose(seen_image(encoder, obs), np.moveaxis(obs, 3, 1) / high, rtol=1e-6)


def test_a_float_image_is_no_wide_mlp():
    actions = spaces.Discrete(3)
    sizes = {
        how: sum(p.numel() for p in ActorCritic(EnvSpec(FLOATS, actions), NetConfig(obs_encoding=how)).parameters())
        for how in ("auto", "bytes")
    }
    assert sizes["bytes"] > 2_500_000
    assert sizes["auto"] < 1_700_000


@pytest.mark.parametrize(
    "space",
    [spaces.Box(-np.inf, np.inf, (84, 84, 3), np.float32), spaces.Box(0, 1, (84, 84), np.float32),
     spaces.Box(0, 1, (2, 6, 7), np.float32)],
)  # fmt: skip
def test_other_floats_stay_numbers(space):
    encoder = make(space)
    assert not encoder.has_images
    assert encoder.out_size == np.prod(space.shape)


def test_small_images_get_the_encoder_that_takes_them():
    encoder = make(spaces.Box(0, 255, (20, 20, 3), np.uint8))
    assert isinstance(encoder.convs[0], ImpalaCnn)


def test_every_leaf_says_its_encoding():
    space = spaces.Dict(
        {"map": GRID, "camera": FLOATS, "ram": spaces.Box(0, 255, (9,), np.uint8), "x": spaces.Box(0, 1)}
    )
    model = ppo.Ppo(ppo.Config(), EnvSpec(space, spaces.Discrete(2)), 1).build_model()
    text = describe_encoding(model)
    assert "map 7x7x3 uint8: one-hot of 16 values and scaled" in text
    assert "camera 84x84x3 float32: convolutions" in text
    assert "ram 9 uint8: scaled from 0..255" in text
    assert "x " not in text


def test_images_without_a_real_range_are_not_scaled_away():
    """Scaled by the range of float32, which many write for none, every value would be the same."""
    most = np.finfo(np.float32).max
    found = encode(spaces.Box(-most, most, (3, 64, 64), np.float32), np.full((1, 3, 64, 64), 0.5))
    assert (found == 0.5).all()
