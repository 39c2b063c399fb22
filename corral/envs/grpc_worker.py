"""A worker process that dials a learner, and dials again when the connection is lost."""

from __future__ import annotations

import logging
import random
import sys
import time
from typing import Any

from corral.core.errors import EnvFailed, RunFailed, UserError
from corral.envs import grpc_wire as wire
from corral.envs.grpc_session import GIVEN_UP, Session

log = logging.getLogger("corral.envs")

_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.25, 5.0
_HANG_S = 5.0  # on top, for an environment that is in a step when the connection is lost


def main(address: str, patience_s: float) -> None:
    """Work until the run is over; the exit code says how it ended."""
    try:
        code = work(wire.connect(address), address, patience_s)
    except UserError as error:
        print(f"corral: {error}", file=sys.stderr)
        code = 2
    except RunFailed as error:
        print(f"corral: {error}", file=sys.stderr)
        code = 1
    except KeyboardInterrupt:
        code = 130
    sys.exit(code)


def work(channel: Any, address: str, patience_s: float) -> int:
    """Serve the learner at the other end until its run is over (0), or until it gives this process up (GIVEN_UP).

    Nobody there, or a connection that is lost: try again, less and less often, and RunFailed when no learner has
    answered for `patience_s`. UserError when this machine does not fit.
    """
    answered, wait_s, said = time.monotonic(), _FIRST_WAIT_S, ""
    while True:
        session = Session(channel, patience_s + _HANG_S)
        try:
            session.serve()
        except UserError:
            raise
        except Exception as error:  # the learner knows; it decides whether that was once too often
            session.words = str(error) if isinstance(error, EnvFailed) else repr(error)
        else:
            if session.status == "OK":
                return 0
            if session.status == "ABORTED":
                return GIVEN_UP
            if session.status == "FAILED_PRECONDITION":
                raise UserError(session.words)
        full = session.status == "RESOURCE_EXHAUSTED"
        if session.joined or full:  # there is a learner
            answered = time.monotonic()
        if session.joined:
            wait_s, said = _FIRST_WAIT_S, ""
        words = _short(session.words)
        if time.monotonic() - answered > patience_s:
            raise RunFailed(f"No learner answers at {address} ({words}); is it running, and can it be reached?")
        if words != said:
            said = words
            log.info("%s: %s; %s", address, words, "waiting for one" if full else f"trying for up to {patience_s:g} s")
        time.sleep(wait_s * random.uniform(0.7, 1.0))
        wait_s = min(2 * wait_s, _LONGEST_WAIT_S)


def _short(words: str) -> str:
    """Without gRPC's account of where in it a connection failed."""
    return words.rpartition(": ")[2] if words.startswith("failed to connect") else words
