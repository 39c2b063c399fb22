"""Proofs that a side knows the token, which itself is never sent."""

from __future__ import annotations

import hmac
import os
from pathlib import Path

from corral.core.errors import UserError

LEARNER, SIMULATOR = b"corral-learner", b"corral-simulator"
NONCE_BYTES = 16
_MIN_BYTES = 16


def read_token(path: str | None) -> bytes | None:
    """Read a token file, stripped of white space; UserError when it is missing, empty or too short."""
    if path is None:
        return None
    try:
        token = Path(path).read_bytes().strip()
    except OSError as error:
        raise UserError(
            f"The token file {Path(path).absolute()} cannot be read ({error.strerror}); give the path of the token of "
            f"the simulators, or make one with `openssl rand -hex 32 > {path}`."
        ) from error
    if len(token) < _MIN_BYTES:
        raise UserError(
            f"The token in {path} has {len(token)} bytes, too few to be a secret; make one with "
            f"`openssl rand -hex 32 > {path}`."
        )
    return token


def new_nonce() -> bytes:
    """A number used once."""
    return os.urandom(NONCE_BYTES)


def prove(token: bytes | None, role: bytes, simulator_nonce: bytes, learner_nonce: bytes) -> bytes:
    """Proof that `role` knows the token; empty without one."""
    if token is None:
        return b""
    return hmac.digest(token, role + simulator_nonce + learner_nonce, "sha256")


def is_proven(token: bytes | None, proof: bytes, role: bytes, simulator_nonce: bytes, learner_nonce: bytes) -> bool:
    """Whether the other side's proof is correct; without a token every proof is accepted."""
    return token is None or hmac.compare_digest(proof, prove(token, role, simulator_nonce, learner_nonce))
