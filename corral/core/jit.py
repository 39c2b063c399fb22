"""Functions compiled by numba, cached on disk where possible."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def compiled(function: Callable[..., Any], **options: Any) -> Any:
    """The function, compiled when it is first called. The cache is beside the package, in the user's cache, or in
    NUMBA_CACHE_DIR; if none of them is writable, as in a container with a read-only installation, every process
    compiles again.
    """
    import numba

    try:
        return numba.njit(cache=True, **options)(function)
    except RuntimeError:  # numba found no cache folder
        return numba.njit(**options)(function)
