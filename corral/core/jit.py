"""Functions compiled by numba, kept on disk where there is a place for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def compiled(function: Callable[..., Any], **options: Any) -> Any:
    """The function, compiled when it is first called.

    What was compiled is kept beside the package, in the user's cache, or in NUMBA_CACHE_DIR; where none of them can be
    written, as in a container with a read-only installation, every process compiles anew.
    """
    import numba

    try:
        return numba.njit(cache=True, **options)(function)
    except RuntimeError:  # numba found no place
        return numba.njit(**options)(function)
