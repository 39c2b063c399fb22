"""The errors a user meets: a mistake to correct, and failures that end a run."""

from __future__ import annotations

import os
import sysconfig
import traceback

_CORRAL = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_STDLIB = sysconfig.get_paths()["stdlib"]


class UserError(ValueError):
    """A mistake in the request; the message is one sentence that names the remedy (exit code 2)."""


class EnvFailed(RuntimeError):
    """An environment failed more often than its restart budget allows (exit code 1)."""


class RunFailed(RuntimeError):
    """A run that cannot continue, for example because its losses are no longer finite (exit code 1)."""


class EnvNotStarted(UserError, EnvFailed):
    """An environment that raises while it is built or reset for the first time: a mistake in it or its arguments."""


class Terminated(BaseException):
    """A signal has ended the command. Not a SystemExit, which counts as a failure where an environment raises it."""

    def __init__(self, number: int):
        super().__init__(f"signal {number}")
        self.code = 128 + number


def describe_error(error: BaseException) -> str:
    """An exception in one line, with the place where it was raised outside of Corral.

    If that is in an installed package, the last line of the user's own code is named as well.
    """
    frames = traceback.extract_tb(error.__traceback__)
    outside = [frame for frame in frames if not frame.filename.startswith((f"{_CORRAL}{os.sep}", "<"))]
    own = [
        frame for frame in outside if not frame.filename.startswith(_STDLIB) and "site-packages" not in frame.filename
    ]
    places = [f"{frame.filename}:{frame.lineno}, in {frame.name}" for frame in outside[-1:]]
    if own and own[-1] is not outside[-1]:
        places.append(f"called at {own[-1].filename}:{own[-1].lineno}")
    lines = str(error).strip().splitlines()
    place = f" ({'; '.join(places)})" if places else ""
    source = frames[-1].line if frames else None  # such as the condition of an assert
    return f"{type(error).__name__}: {lines[0] if lines else source or 'no message'}{place}"
