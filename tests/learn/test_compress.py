"""Codecs and error feedback against literal versions, and what they promise."""

import numpy as np
import pytest
import torch

from corral.core.errors import UserError
from corral.learn.exchange.compress import (
    Compression,
    Float32Codec,
    HalfCodec,
    Qsgd,
    Sign,
    TopK,
    find_compression,
)

CODECS = {
    "whole": Float32Codec(),
    "fp16": HalfCodec(torch.float16),
    "bf16": HalfCodec(torch.bfloat16),
    "qsgd:2": Qsgd(2),
    "qsgd:4": Qsgd(4),
    "qsgd:8": Qsgd(8),
    "sign": Sign(),
    "topk": TopK(0.1, Float32Codec()),
    "topk+qsgd": TopK(0.1, Qsgd(8)),
    "topk+sign": TopK(0.1, Sign()),
    "topk+bf16": TopK(0.1, HalfCodec(torch.bfloat16)),
}


def vector(count, seed=0):
    return np.random.default_rng(seed).normal(size=count).astype(np.float32)


@pytest.mark.parametrize("count", [1, 7, 511, 512, 513, 2000, 70_000])
@pytest.mark.parametrize("name", CODECS)
def test_code_size_depends_on_length_alone(name, count):
    codec, values = CODECS[name], vector(count)
    code = codec.encode(values, np.random.default_rng(1))
    read = codec.decode(code, count)
    assert code.dtype == np.uint8
    assert len(code) == len(codec.encode(np.zeros(count, np.float32), np.random.default_rng(2)))
    assert (read.dtype, read.shape) == (np.float32, (count,))
    assert np.isfinite(read).all()
    assert np.dot(read, values) > 0  # it points to the same side


@pytest.mark.parametrize("name", CODECS)
def test_encoding_is_a_copy(name):
    values = vector(600)
    code = CODECS[name].encode(values, np.random.default_rng(0))
    before = code.copy()
    values[:] = 7
    np.testing.assert_array_equal(code, before)


@pytest.mark.parametrize("name", CODECS)
def test_zeros_stay_zeros(name):
    codec = CODECS[name]
    assert not codec.decode(codec.encode(np.zeros(600, np.float32), np.random.default_rng(0)), 600).any()


def test_half_precision_is_the_nearest_and_never_infinite():
    values = np.array([1 / 3, -2.5, 1e6, -1e9, 1e-9], np.float32)
    half, brain = HalfCodec(torch.float16), HalfCodec(torch.bfloat16)
    read = half.decode(half.encode(values, np.random.default_rng(0)), 5)
    np.testing.assert_array_equal(read, np.float32([np.float16(1 / 3), -2.5, 65504, -65504, 0]))
    read = brain.decode(brain.encode(values, np.random.default_rng(0)), 5)
    np.testing.assert_allclose(read, values, rtol=2**-8)


def test_the_largest_numbers_are_kept_and_where_they_belong():
    values = np.array([0.1, -5.0, 0.2, 3.0, -0.3, 0.0, 1.0, -2.0, 0.4, 0.5], np.float32)
    read = TopK(0.3, Float32Codec()).decode(TopK(0.3, Float32Codec()).encode(values, np.random.default_rng(0)), 10)
    np.testing.assert_array_equal(read, np.float32([0, -5, 0, 3, 0, 0, 0, -2, 0, 0]))


def test_signs_have_the_mean_size_of_their_bucket():
    values = vector(700)
    read = Sign().decode(Sign().encode(values, np.random.default_rng(0)), 700)
    expected = np.concatenate([
        np.where(values[:512] >= 0, 1, -1) * np.abs(values[:512]).mean(),
        np.where(values[512:] >= 0, 1, -1) * np.abs(values[512:]).mean(),
    ])  # fmt: skip
    np.testing.assert_allclose(read, expected, rtol=1e-6)


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_quantisation_is_as_in_the_literal_formula(bits):
    values, levels = vector(100), np.float32(2 ** (bits - 1) - 1)
    read = Qsgd(bits).decode(Qsgd(bits).encode(values, np.random.default_rng(5)), 100)
    uniform = np.random.default_rng(5).random((1, 512), dtype=np.float32)[0]
    scale = np.abs(values).max()
    for v, u, r in zip(values, uniform[:100], read, strict=True):
        level = np.floor(abs(v) / scale * levels + u)
        assert r == pytest.approx(np.sign(v) * scale * level / levels, rel=1e-5)


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_quantisation_is_unbiased(bits):
    """The mean of n encodings is the vector, within five standard errors of every number."""
    values, rng, codec, n = vector(64), np.random.default_rng(3), Qsgd(bits), 20_000
    reads = np.stack([codec.decode(codec.encode(values, rng), 64) for _ in range(n)]).astype(np.float64)
    error = np.abs(reads.mean(0) - values)
    assert (error <= 5 * reads.std(0) / np.sqrt(n) + 1e-6).all()
    assert reads.std(0).max() > 0  # it is random, or this would say nothing


def test_and_rounding_to_the_nearest_would_not_be():
    """The criterion of the test above, on a codec that has no expectation but what it always gives."""
    values, levels = vector(64), 7
    scale = np.abs(values).max()
    reads = np.stack([np.round(values / scale * levels) / levels * scale] * 100).astype(np.float64)
    assert (np.abs(reads.mean(0) - values) > 5 * reads.std(0) / 10 + 1e-6).any()


def test_error_feedback_sends_omitted_values_later():
    literal_left = np.zeros(50, np.float32)
    compression = Compression(TopK(0.1, Float32Codec()), 50, 0, feedback=True)
    sent_in_all, given_in_all = np.zeros(50), np.zeros(50)
    for k in range(200):
        grad = vector(50, k)
        sent = compression.unpack(compression.pack(grad))
        literal_left += grad
        chosen = np.argsort(np.abs(literal_left))[-5:]
        expected = np.zeros(50, np.float32)
        expected[chosen] = literal_left[chosen]
        literal_left -= expected
        np.testing.assert_allclose(sent, expected, atol=1e-5)
        sent_in_all, given_in_all = sent_in_all + sent, given_in_all + grad
    np.testing.assert_allclose(sent_in_all + literal_left, given_in_all, atol=1e-3)


def test_momentum_correction_is_as_in_the_paper():
    velocity = left = np.zeros(40, np.float32)
    compression = Compression(TopK(0.1, Float32Codec()), 40, 0, feedback=True, momentum=0.9)
    for k in range(50):
        grad = vector(40, k)
        sent = compression.unpack(compression.pack(grad))
        velocity = np.float32(0.9) * velocity + grad
        left = left + velocity
        chosen = np.argsort(np.abs(left))[-4:]
        expected = np.zeros(40, np.float32)
        expected[chosen] = left[chosen]
        left = np.where(expected != 0, 0, left)
        velocity = np.where(expected != 0, 0, velocity)
        np.testing.assert_allclose(sent, expected, rtol=1e-4, atol=1e-5)


def test_unused_code_is_sent_again():
    compression = Compression(TopK(0.2, Float32Codec()), 10, 0, feedback=True)
    code = compression.pack(np.arange(10, dtype=np.float32))
    compression.undo_pack(code)
    again = compression.unpack(compression.pack(np.zeros(10, np.float32)))
    np.testing.assert_array_equal(again, compression.unpack(code))


def test_velocities_of_unused_codes_continue():
    compression = Compression(TopK(0.2, Float32Codec()), 10, 0, feedback=True, momentum=0.9)
    grad = np.arange(1, 11, dtype=np.float32)
    compression.undo_pack(compression.pack(grad))
    sent = compression.unpack(compression.pack(np.zeros(10, np.float32)))
    expected = grad + np.float32(0.9) * grad  # as if the first had not been sent
    np.testing.assert_allclose(sent[-2:], expected[-2:], rtol=1e-6)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_discarded_gradient_leaves_no_trace(momentum):
    one, other = (Compression(TopK(0.2, Float32Codec()), 10, 0, feedback=True, momentum=momentum) for _ in range(2))
    for k in range(20):
        if k % 3 == 1:
            one.pack(vector(10, 100 + k))
            one.discard_pack()
        np.testing.assert_array_equal(one.pack(vector(10, k)), other.pack(vector(10, k)))


@pytest.mark.parametrize("name", ["topk:0.02", "sign", "topk:0.05+sign"])
def test_error_feedback_on_beats_off(name):
    """Least squares of which no coordinate fits its own scale: what is always left out never gets learned."""
    compress = find_compression(name)
    rng = np.random.default_rng(0)
    matrix = rng.normal(size=(200, 100)) * np.geomspace(1, 0.05, 100)
    wanted = rng.normal(size=100)

    def loss_after(feedback):
        compression = Compression(compress.codec, 100, 0, feedback=feedback)
        x = np.zeros(100)
        for k in range(1500):
            rows = matrix[(k * 7) % 200 : (k * 7) % 200 + 8]
            grad = rows.T @ (rows @ (x - wanted)) / len(rows)
            x -= 0.01 * compression.unpack(compression.pack(grad.astype(np.float32)))
        return float(np.square(matrix @ (x - wanted)).mean())

    on, off = loss_after(True), loss_after(False)
    assert on < 0.8 * off, (on, off)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("gzip", "is unknown: use none"),
        ("topk", "is unknown"),
        ("topk:2", "between 1e-06 and 1"),
        ("topk:0", "between"),
        ("topk:0.1+gzip", "is unknown"),
        ("qsgd:3", "2, 4 or 8"),
        ("qsgd", "is unknown"),
        ("powersgd:0", "between 1 and 64"),
    ],
)
def test_unknown_compression_lists_the_known(name, says):
    with pytest.raises(UserError, match=says):
        find_compression(name)


def test_none_is_no_compression():
    assert find_compression("none") is None
