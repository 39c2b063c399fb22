"""Objects between a process and the workers that it started: code, and what environments return, which no data format
carries. Pickle is safe here, because both ends run the user's own code.
"""

from __future__ import annotations

from typing import Any

import cloudpickle

from corral.core.errors import UserError


def dump(value: Any, what: str) -> bytes:
    """UserError if it cannot be pickled."""
    try:
        data: bytes = cloudpickle.dumps(value)
    except Exception as error:
        raise UserError(
            f"{what[0].upper()}{what[1:]} cannot be sent between processes ({error!r}): use backend='local'."
        ) from error
    return data


def load(data: bytes) -> Any:
    """What `dump` was given."""
    return cloudpickle.loads(data)


def dump_error(error: BaseException) -> bytes | None:
    """An exception, None if it cannot be sent."""
    try:
        data: bytes = cloudpickle.dumps(error)
        cloudpickle.loads(data)  # many exceptions with their own __init__ can only be pickled
    except Exception:
        return None
    return data


def load_error(data: bytes | None) -> BaseException | None:
    """What `dump_error` was given, None if it cannot be rebuilt here."""
    try:
        error = None if data is None else cloudpickle.loads(data)
    except Exception:  # its class may exist in the worker only
        return None
    return error if isinstance(error, BaseException) else None
