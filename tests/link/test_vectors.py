"""The golden messages are what the codec makes and reads."""

import importlib.util
import json
from pathlib import Path

import pytest

from corral.link.message import read_message
from corral.link.transports.framing import FrameReader, pack

VECTORS = Path(__file__).parents[2] / "sdk" / "vectors"
_spec = importlib.util.spec_from_file_location("make_vectors", VECTORS / "make.py")
make = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(make)
MESSAGES = make.messages() | make.state_messages()
INDEX = json.loads((VECTORS / "index.json").read_text())


def read(data, chunk):
    """The messages in these bytes, which come in pieces of that size."""
    reader, out = FrameReader(1 << 20), []
    for start in range(0, len(data), chunk):
        piece = data[start : start + chunk]
        reader.room()[: len(piece)] = piece
        reader.took(len(piece))
        while (frames := reader.next()) is not None:
            out.append([bytes(frame) for frame in frames])
    return out


def test_there_are_files_for_all_and_no_others():
    assert {path.stem for path in VECTORS.glob("*.bin")} == set(MESSAGES) == set(INDEX["messages"])


@pytest.mark.parametrize("name", MESSAGES)
def test_a_message_is_these_bytes(name):
    data = (VECTORS / f"{name}.bin").read_bytes()
    about, message = MESSAGES[name]
    assert b"".join(pack(message.frames())) == data
    assert INDEX["messages"][name] == {"about": about, **make.describe(message)}


@pytest.mark.parametrize("chunk", [1, 3, 64, 1 << 17])
@pytest.mark.parametrize("name", MESSAGES)
def test_these_bytes_are_the_message_however_they_come(name, chunk):
    data = (VECTORS / f"{name}.bin").read_bytes()
    once, twice = read(data + data, chunk)
    assert once == twice
    back = read_message(once)
    assert json.loads(json.dumps(make.describe(back))) == {
        key: value for key, value in INDEX["messages"][name].items() if key != "about"
    }
    assert b"".join(pack(back.frames())) == data
