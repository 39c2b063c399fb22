"""Compiled functions where nothing can be kept."""

import numba
import pytest

from corral.core.jit import compiled


def double(x):
    return 2 * x


def test_what_cannot_be_kept_on_disk_is_compiled_all_the_same(monkeypatch):
    def no_place(*args, **kwargs):
        raise RuntimeError("cannot cache function: no locator available")

    monkeypatch.setattr("numba.core.dispatcher.FunctionCache", no_place)
    with pytest.raises(RuntimeError, match="no locator"):
        numba.njit(cache=True)(double)
    assert compiled(double)(21) == 42
