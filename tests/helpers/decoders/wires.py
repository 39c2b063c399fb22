"""Wires and messages that the decoders' tests write by hand."""

from pathlib import Path

from corral.core.errors import EnvFailed
from corral.link.control import Budget, Welcome
from corral.link.protocol import Limits
from corral.link.transports.base import Binding, Wire
from corral.link.transports.framing import FrameReader, pack
from helpers.declared_walk import Declared

VECTORS = [path.read_bytes() for path in sorted((Path(__file__).parents[3] / "sdk" / "vectors").glob("*.bin"))]


MAX = 1 << 20


WELCOME = Welcome((1, 0), 5, False, bytes(16), b"", 4, Limits(message=MAX, batch=8), Budget(MAX, 10))


class Strange(Wire):
    """A wire whose other side is the test."""

    def __init__(self, initiated=False):
        self.peer, self.initiated, self.sent, self.closed = "strange", initiated, 0, False
        self.last = None

    def send(self, frames):
        self.sent += 1
        self.last = [bytes(frame) for frame in frames]

    def close(self):
        self.closed = True


class Scripted(Binding):
    """Brings the events that the test has put there."""

    urls = ["test://"]  # noqa: RUF012

    def __init__(self):
        self.events = []

    def poll(self, timeout_s):
        events, self.events = self.events, []
        return events

    def close(self):
        pass


class Finite(Scripted):
    """The same one by one, for who would wait for more: there is no more."""

    def poll(self, timeout_s):
        if not self.events:
            raise EnvFailed("nothing more comes")
        return [self.events.pop(0)]


class Walk(Declared):
    """An environment whose states travel: its author checks nothing."""

    def _write(self, state):
        self._x, self._t = state["x"] + 0.0, state["t"] + 0
        self.np_random.bit_generator.state = state["rng"]


def packed(*messages):
    """Messages as bytes of `tcp://`."""
    return b"".join(bytes(part) for message in messages for part in pack(message.frames()))


def frames_in(data, chunk=1 << 16):
    """The messages in these bytes, which come in pieces of at most that size; BadFrames at the first that is none."""
    reader, at = FrameReader(MAX), 0
    while at < len(data):
        room = reader.room()
        size = min(len(room), len(data) - at, chunk)
        room[:size] = data[at : at + size]
        reader.took(size)
        at += size
        while (frames := reader.next()) is not None:
            yield [bytes(frame) for frame in frames]
