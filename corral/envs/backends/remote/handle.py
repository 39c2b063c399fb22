"""A worker of a remote VecEnv as its parent sees it: everything that does not depend on the transport."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from typing import Any

import cloudpickle

from corral.core.errors import UserError
from corral.core.gym_env import EnvFactory
from corral.core.types import Array
from corral.envs.supervision import IDLE


class RemoteWorker(ABC):
    """One worker and the environments it owns."""

    def __init__(self, index: int, ids: Array):
        self.index, self.ids = index, ids
        self.starts = -1

    def reset(self) -> None:
        """Prepare for a new process in place of the last."""
        self.starts += 1
        self.seeded = False  # its global RNGs
        self.running = False  # it has built its environments and has its rows
        self.pending = 0  # results not yet received
        self.last_mark = IDLE
        self.heartbeat()

    def heartbeat(self) -> None:
        self.busy_since = time.monotonic()

    @abstractmethod
    def spawn(self) -> None:
        """Start the worker, or a replacement; it builds its environments and answers with SPEC."""

    @abstractmethod
    def kill(self) -> None:
        """End the worker, whatever its state, and drop its unread messages."""

    @abstractmethod
    def post(self, op: int, data: Any = None) -> None:
        """Send a message; a dead worker is noticed only while waiting for the answer."""

    @abstractmethod
    def exit_report(self) -> str: ...


def pickle_factories(factories: dict[int, EnvFactory], name: str) -> bytes:
    """Factories as bytes for a worker; UserError when they cannot be pickled."""
    try:
        data: bytes = cloudpickle.dumps((factories, name))
    except Exception as error:
        raise UserError(
            f"The environment factory of {name} cannot be sent to a worker process ({error}); make it a "
            "module-level function or class, or use backend='local'."
        ) from error
    return data
