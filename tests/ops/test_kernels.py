"""The compiled loops against literal NumPy."""

import numpy as np
import pytest

from corral.ops import kernels

rng = np.random.default_rng(0)


def draw(*shape, scale=1.0):
    return (scale * rng.standard_normal(shape)).astype(np.float32)


@pytest.mark.parametrize("scale", [1e-6, 0.1, 1.0, 30.0])
def test_tanh_is_tanh(scale):
    x, bias = draw(33, 17, scale=scale), draw(17, scale=scale)
    wanted = np.tanh((x + bias).astype(np.float64))
    kernels.add_bias_tanh(x, bias)
    np.testing.assert_allclose(x, wanted, rtol=1e-6, atol=3e-7)


@pytest.mark.parametrize("name", ["add_bias_tanh", "add_bias_relu"])
def test_not_finite_values_stay_not_finite(name):
    x = np.array([[np.nan, 1.0]], np.float32)
    getattr(kernels, name)(x, np.zeros(2, np.float32))
    assert np.isnan(x[0, 0])
    assert np.isfinite(x[0, 1])


def test_relu_is_relu():
    x, bias = draw(9, 5), draw(5)
    wanted = np.maximum(x + bias, 0)
    kernels.add_bias_relu(x, bias)
    np.testing.assert_array_equal(x, wanted)


def test_the_slope_of_tanh():
    grad, out = draw(9, 5), np.tanh(draw(9, 5))
    wanted = grad * (1 - out**2)
    kernels.times_tanh_slope(grad, out)
    np.testing.assert_allclose(grad, wanted, rtol=1e-5)


@pytest.mark.parametrize("tanh", [True, False])
def test_forward_is_layers_with_an_activation_between(tanh):
    layers = tuple((draw(m, n), draw(m)) for n, m in [(5, 16), (16, 8), (8, 3)])
    x = draw(11, 5)
    wanted = x.astype(np.float64)
    for k, (weight, bias) in enumerate(layers):
        wanted = wanted @ weight.T.astype(np.float64) + bias
        if k < 2:
            wanted = np.tanh(wanted) if tanh else np.maximum(wanted, 0)
    np.testing.assert_allclose(kernels.forward(x, layers, tanh), wanted, rtol=1e-5, atol=1e-5)


def test_a_rows_outputs_do_not_depend_on_the_rows_beside_it():
    layers = ((draw(64, 4), draw(64)), (draw(2, 64), draw(2)))
    x = draw(37, 4)
    whole = kernels.forward(x, layers, True)
    for part in (slice(0, 1), slice(5, 12), slice(12, 37)):
        assert np.array_equal(kernels.forward(x[part], layers, True), whole[part])


def test_adam_follows_its_formula():
    w, m, v = draw(50), np.zeros(50, np.float32), np.zeros(50, np.float32)
    wanted, wm, wv = w.astype(np.float64), np.zeros(50), np.zeros(50)
    for t in range(1, 8):
        g = draw(50)
        kernels.adam(w, g, m, v, (0.9, 0.999), t, 1e-2, 1e-5)
        wm = 0.9 * wm + 0.1 * g
        wv = 0.999 * wv + 0.001 * g.astype(np.float64) ** 2
        wanted -= 1e-2 * (wm / (1 - 0.9**t)) / (np.sqrt(wv / (1 - 0.999**t)) + 1e-5)
    np.testing.assert_allclose(w, wanted, atol=2e-6)


def test_choices_follow_and_return_probabilities():
    logits = np.array([[0.3, -1.0, 2.0, 0.0, 1.0]], np.float32)  # a choice of three, and one of two
    n, sizes = 200_000, np.array([3, 2])
    params = np.repeat(logits, n, 0)
    action, log_prob = np.empty((n, 2), np.float32), np.empty(n, np.float32)
    kernels.choose(params, sizes, rng.standard_exponential((n, 5)), action, log_prob)
    parts = [np.exp(logits[0, :3]) / np.exp(logits[0, :3]).sum(), np.exp(logits[0, 3:]) / np.exp(logits[0, 3:]).sum()]
    for k, p in enumerate(parts):
        share = np.bincount(action[:, k].astype(int), minlength=len(p)) / n
        np.testing.assert_allclose(share, p, atol=5 * np.sqrt(0.25 / n))
    wanted = sum(np.log(p)[action[:, k].astype(int)] for k, p in enumerate(parts))
    np.testing.assert_allclose(log_prob, wanted, atol=1e-5)
