"""Decoders that are functions of bytes: frames, control messages, spaces, values, addresses."""

import contextlib

import gymnasium
import msgspec
import numpy as np

from corral.core import encoding
from corral.core.errors import UserError
from corral.core.spaces import Layout
from corral.link.address import parse_url
from corral.link.control import Hello, Knock, Ready, Welcome, from_meta
from corral.link.layout import layout_hash, read_space
from corral.link.message import BadMessage, read_message, read_meta
from corral.link.transports.framing import BadFrames, unpack
from corral.snapshot.store import client as sw
from helpers.decoders.wires import MAX, VECTORS, frames_in


def decode_frames(data):
    with contextlib.suppress(BadFrames, BadMessage):
        for frames in frames_in(data, 1 + len(data) % 97):
            read_message(frames)


def decode_grpc(data):
    with contextlib.suppress(BadFrames, BadMessage):
        read_message(unpack(data, MAX))


CONTROLS = (Knock, Hello, Welcome, Ready, sw.ClientKnock, sw.ServerWelcome, sw.Dropped, sw.Page, sw.Held)


def decode_meta(data):
    with contextlib.suppress(BadMessage):
        meta = read_meta(data)
        for kind in CONTROLS:
            with contextlib.suppress(BadMessage):
                from_meta(meta, kind)


def decode_space(data):
    with contextlib.suppress(BadMessage):
        layout = read_space(read_meta(data), "observation")
        layout_hash(layout, layout)


def decode_value(data):
    with contextlib.suppress(encoding.DecodeError):
        encoding.decode(data)


def decode_url(data):
    with contextlib.suppress(UserError):
        parse_url(data.decode(errors="replace"))


def good_metas():
    return [frames[1] for data in VECTORS for frames in frames_in(data) if read_message(frames).meta is not None]


def good_spaces():
    hellos = [meta for meta in map(read_meta, good_metas()) if "observation" in meta]
    more = [
        gymnasium.spaces.MultiBinary([2, 2]),
        gymnasium.spaces.MultiDiscrete([2, 3]),
        gymnasium.spaces.Tuple(
            (gymnasium.spaces.Discrete(3, start=-1), gymnasium.spaces.Box(0, 255, (4, 4), np.uint8))
        ),
    ]
    found = [hello[key] for hello in hellos for key in ("observation", "action")]
    return [msgspec.msgpack.encode(space) for space in found + [Layout(space).to_json() for space in more]]


def good_values():
    values = [
        {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": [1, None, True, 2.5, "text", b"bytes"]},
        {"state": 2**100, "rng": {"inc": -(2**70)}, "none": np.zeros((0, 3))},
        [np.array(3, np.uint8), np.array([True, False])],
    ]
    return [b"".join(bytes(part) for part in encoding.encode(value)) for value in values]
