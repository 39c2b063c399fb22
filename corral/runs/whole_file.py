"""Files that others write: there whole or not at all."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from corral.core.errors import UserError


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Where to write instead of `path`; it becomes `path` when all is well. UserError where that cannot be."""
    unfinished = path.with_name(f".tmp-{path.name}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        open(unfinished, "wb").close()
        yield unfinished
        os.replace(unfinished, path)
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror or error}.") from error
    finally:
        with contextlib.suppress(OSError):
            unfinished.unlink()
