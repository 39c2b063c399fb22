"""The transport interface: wires to peers, all of one binding behind one `poll`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from corral.core.encoding import Buffer
from corral.link.protocol import GREETING_BYTES

MAX_UNSENT_BYTES = 1 << 30  # queued for one peer; a peer that lets more pile up is disconnected
UNREAD = "it does not read what it is sent"


class Wire(ABC):
    """A connection to one peer. Frames are delivered whole and in order, or the wire is lost."""

    peer: str = ""
    initiated: bool = False  # whether this side made the connection
    max_bytes: int = GREETING_BYTES  # larger messages end the connection; raised once the peer is authenticated

    @abstractmethod
    def send(self, frames: Sequence[Buffer]) -> None:
        """Send a message now, or as soon as the peer accepts it. Does nothing on a lost wire, which `poll` reports."""

    @abstractmethod
    def close(self) -> None:
        """Close the connection; queued data is flushed only if the peer reads it immediately."""


@dataclass(slots=True)
class Event:
    """A message, a new peer (`frames` is None) or a lost wire (`lost`: why). Frames are views until the next `poll`."""

    wire: Wire
    frames: Sequence[Buffer] | None = None
    lost: str | None = None


class Binding(ABC):
    """One address to listen at, or several to connect to."""

    urls: list[str]  # where it listens, with the real port, or the addresses it connects to
    listens: bool = False

    @abstractmethod
    def poll(self, timeout_s: float) -> list[Event]:
        """Wait for events; bounded also by what the peers send."""

    @abstractmethod
    def close(self) -> None:
        """End all connections. Safe to call twice."""
