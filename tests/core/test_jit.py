"""Compiled functions where nothing can be kept."""

import numba
import pytest

from corral.core.jit import compiled


def double(x):
    return 2 * x


def test_compiles_without_a_disk_cache(monkeypatch):
    def no_place(*args, **kwargs):
        raise RuntimeError("cannot cache function: no locator available")

    monkeypatch.setattr("numba.core.dispatcher.FunctionCache", no_place)
    with pytest.raises(RuntimeError, match="no locator"):
        numba.njit(cache=True)(double)
    assert compiled(double)(21) == 42
