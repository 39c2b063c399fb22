"""What every keeper of states does."""

from __future__ import annotations

from abc import ABC, abstractmethod
from types import TracebackType

from corral.core.errors import UserError

MOST_NAME = 512  # bytes


class StatesFull(Exception):
    """The budget does not allow another state; nothing was changed, and nothing is ever evicted."""


class StateKeeper(ABC):
    """States as bytes, by name. Within its budget; what is put is got back byte by byte until it is dropped."""

    @abstractmethod
    def put(self, name: str, state: bytes) -> None:
        """Keep a state, in the place of one that has the name; StatesFull when it does not fit."""

    @abstractmethod
    def get(self, name: str) -> bytes | None:
        """The state of this name, None when there is none."""

    @abstractmethod
    def drop(self, name: str) -> bool:
        """Forget a state; whether there was one."""

    @abstractmethod
    def names(self, prefix: str = "") -> list[str]:
        """Names that begin with `prefix`, sorted."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """What the states take."""

    def close(self) -> None:  # noqa: B027 - most have nothing to close
        """Nothing more is asked. Safe to call twice."""

    def __enter__(self) -> StateKeeper:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def check_name(name: str) -> str:
    """The name, if it is one; UserError otherwise."""
    if (
        not isinstance(name, str)
        or not name
        or len(name.encode("utf-8", "replace")) > MOST_NAME
        or not name.isprintable()
    ):
        raise UserError(f"The name of a state is 1 to {MOST_NAME} bytes of printable text, got {str(name)[:80]!r}.")
    return name
