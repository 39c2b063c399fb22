"""Loops of small networks, compiled by numba: one call instead of ten in NumPy.

Acting on a few rows is bound by the number of calls, learning on a few hundred by the passes over memory; each kernel
passes over its memory once.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from corral.core.jit import compiled
from corral.core.types import Array

# Sums may be reordered for vectorisation; NaN and infinity are preserved.
_compiled = partial(compiled, error_model="numpy", fastmath={"reassoc", "contract", "nsz", "arcp"})

# tanh(x) = x P(x^2) / Q(x^2) within 2e-7, constant beyond `_FLAT`; the coefficients are those of Eigen's ptanh.
_FLAT = np.float32(7.90531110763549805)
_P1, _P3, _P5, _P7, _P9, _P11, _P13 = (
    np.float32(c)
    for c in (
        4.89352455891786e-03, 6.37261928875436e-04, 1.48572235717979e-05, 5.12229709037114e-08,
        -8.60467152213735e-11, 2.00018790482477e-13, -2.76076847742355e-16,
    )
)  # fmt: skip
_Q0, _Q2, _Q4, _Q6 = (
    np.float32(c) for c in (4.89352518554385e-03, 2.26843463243900e-03, 1.18534705686654e-04, 1.19825839466702e-06)
)
_ZERO, _ONE = np.float32(0.0), np.float32(1.0)


@_compiled
def add_bias_tanh(x: Array, bias: Array) -> None:
    """`x = tanh(x + bias)` for rows `[n, m]`."""
    for i in range(x.shape[0]):
        row = x[i]
        for j in range(row.shape[0]):
            v = row[j] + bias[j]
            v = _FLAT if v > _FLAT else v
            v = -_FLAT if v < -_FLAT else v
            s = v * v
            p = ((((((_P13 * s + _P11) * s + _P9) * s + _P7) * s + _P5) * s + _P3) * s + _P1) * v
            row[j] = p / (((_Q6 * s + _Q4) * s + _Q2) * s + _Q0)


@_compiled
def add_bias_relu(x: Array, bias: Array) -> None:
    """`x = max(x + bias, 0)` for rows `[n, m]`."""
    for i in range(x.shape[0]):
        row = x[i]
        for j in range(row.shape[0]):
            v = row[j] + bias[j]
            row[j] = _ZERO if v < _ZERO else v  # NaN stays NaN


@_compiled
def times_tanh_slope(grad: Array, out: Array) -> None:
    """`grad *= 1 - out^2`, the slope of `tanh` where it gave `out`."""
    for i in range(grad.shape[0]):
        grad_row, out_row = grad[i], out[i]
        for j in range(grad_row.shape[0]):
            grad_row[j] *= _ONE - out_row[j] * out_row[j]


@_compiled
def forward(x: Array, layers: tuple[tuple[Array, Array], ...], tanh: bool) -> Array:
    """A network's outputs for rows `[n, inputs]`; each row is computed independently of the others."""
    last = len(layers) - 1
    for k in range(len(layers)):
        weight, bias = layers[k]
        n, size, width = x.shape[0], x.shape[1], weight.shape[0]
        out = np.empty((n, width), np.float32)
        for i in range(n):
            row = x[i]
            for j in range(width):
                weight_row, total = weight[j], _ZERO
                for m in range(size):
                    total += weight_row[m] * row[m]
                out[i, j] = total
        if k < last and tanh:
            add_bias_tanh(out, bias)
        elif k < last:
            add_bias_relu(out, bias)
        else:
            for i in range(n):
                for j in range(width):
                    out[i, j] += bias[j]
        x = out
    return x


@_compiled
def adam(
    weights: Array, grad: Array, mean: Array, square: Array,
    betas: tuple[float, float], steps: int, lr: float, eps: float,
) -> None:  # fmt: skip
    """Step `steps` of Adam: `m = b1 m + (1 - b1) g`, `v = b2 v + (1 - b2) g^2`, `w -= lr m' / (sqrt(v') + eps)`.

    `m' = m / (1 - b1^steps)` and `v' = v / (1 - b2^steps)`.
    """
    b1, b2, small = np.float32(betas[0]), np.float32(betas[1]), np.float32(eps)
    rate = np.float32(lr / (1.0 - betas[0] ** steps))
    scale = np.float32(1.0 / np.sqrt(1.0 - betas[1] ** steps))
    for i in range(weights.shape[0]):
        g = grad[i]
        mean[i] += (_ONE - b1) * (g - mean[i])
        square[i] = b2 * square[i] + (_ONE - b2) * g * g
        weights[i] -= rate * mean[i] / (np.sqrt(square[i]) * scale + small)


@_compiled
def choose(logits: Array, sizes: Array, race: Array, action: Array, log_prob: Array) -> None:
    """Sample each of several choices per row by the exponential race `argmax p_i / e_i`, with `race` drawn from Exp(1).

    Writes the choices into `action[:, k]`, and the sum of their log-probabilities into `log_prob`.
    """
    for i in range(logits.shape[0]):
        total, start = 0.0, 0
        for k in range(sizes.shape[0]):
            top = logits[i, start]
            for j in range(start + 1, start + sizes[k]):
                top = max(top, logits[i, j])
            mass, best, picked = 0.0, -1.0, start
            for j in range(start, start + sizes[k]):
                p = np.exp(np.float64(logits[i, j] - top))
                mass += p
                ratio = p / race[i, j]
                if ratio > best:
                    best, picked = ratio, j
            action[i, k] = picked - start
            total += logits[i, picked] - top - np.log(mass)
            start += sizes[k]
        log_prob[i] = total
