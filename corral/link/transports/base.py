"""What carries messages: wires to peers, all of one binding behind one `poll`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from corral.core.encoding import Buffer
from corral.link.protocol import GREETING_BYTES

MAX_UNSENT_BYTES = 1 << 30  # that wait for a peer to take them; one that lets more pile up is lost
UNREAD = "it does not read what it is sent"


class Wire(ABC):
    """A connection to one peer. Frames sent are delivered whole and in order, or the wire is lost."""

    peer: str = ""
    initiated: bool = False
    """Whether this side made the connection."""
    most_bytes: int = GREETING_BYTES
    """Larger messages end the connection; raised once the peer is authenticated."""

    @abstractmethod
    def send(self, frames: Sequence[Buffer]) -> None:
        """Send a message now, or as soon as the peer takes it. On a lost wire it does nothing: `poll` says so."""

    @abstractmethod
    def close(self) -> None:
        """End the connection, after what has been sent if the peer takes it at once."""


@dataclass(slots=True)
class Event:
    """A message came in, a peer is there (`frames` is None), or a wire is lost (`lost` says why).

    Frames are views that are valid until the next `poll`.
    """

    wire: Wire
    frames: Sequence[Buffer] | None = None
    lost: str | None = None


class Binding(ABC):
    """One address to listen at or several to connect to."""

    urls: list[str]
    """Where it listens, with the real port, or what it connects to."""

    @abstractmethod
    def poll(self, timeout_s: float) -> list[Event]:
        """Wait for something to happen; bounded also by what the peers send."""

    @abstractmethod
    def close(self) -> None:
        """End all connections. Safe to call twice."""
