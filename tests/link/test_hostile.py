"""What a peer that means harm, or is merely broken, may say: it is refused in words, and costs nobody else anything."""

import struct
import zlib
from dataclasses import replace

import msgspec
import numpy as np
import pytest
from helpers.decoders.simulator import ExportedState
from helpers.decoders.state_store import StateClient
from helpers.decoders.wires import Scripted, Strange, Walk

from corral.core import encoding
from corral.core.errors import EnvFailed
from corral.core.spaces import Layout
from corral.envs.serve.server import SimulatorServer
from corral.envs.serve.state_errors import problems_of, unpack_state
from corral.link import protocol as clp
from corral.link.client.states import row_messages
from corral.link.control import Budget, Hello, Knock, Welcome, to_meta
from corral.link.layout import read_space
from corral.link.message import BadMessage, Message, printable, read_message
from corral.link.protocol import Limits
from corral.link.transports.base import Event
from corral.link.transports.json_values import ClientError, inferred

# -- values ------------------------------------------------------------------------------------------------------------


def _array(place, dtype, shape):
    head = msgspec.msgpack.encode(msgspec.msgpack.Ext(1, msgspec.msgpack.encode((place, dtype, shape))))
    return struct.pack("<Q", len(head)) + head + bytes(256)


@pytest.mark.parametrize(
    "data",
    [
        _array(2**63, "<f4", (1,)),
        _array(0, "<f4", (2**64 - 1,)),
        _array(0, "09f4", (1,)),  # NumPy parses it as Python
        struct.pack("<Q", 100_000) + b"\x91" * 100_000,
    ],
    ids=["place", "shape", "dtype", "depth"],
)
def test_invalid_value_is_a_bad_message(data):
    with pytest.raises(encoding.DecodeError):
        encoding.decode(data)


# -- spaces ------------------------------------------------------------------------------------------------------------

LARGE = {"type": "box", "dtype": "float32", "shape": [1 << 24], "low": 0, "high": 1}
SMALL = {"type": "discrete", "n": 2, "start": 0, "dtype": "int64"}


@pytest.mark.parametrize(
    "space",
    [
        {"type": "tuple", "spaces": [LARGE] * 16},
        {"type": "tuple", "spaces": [{"type": "tuple", "spaces": [SMALL] * 200}] * 200},
        {**LARGE, "shape": [1 << 30], "spaces": [SMALL]},
    ],
    ids=["bytes", "leaves", "a box with parts"],
)
def test_huge_space_is_refused_before_it_is_built(space, monkeypatch):
    monkeypatch.setattr(Layout, "from_json", lambda data: pytest.fail("it was built"))
    with pytest.raises(BadMessage, match="more than"):
        read_space(space, "observation")


def test_space_error_is_short():
    with pytest.raises(BadMessage) as refused:
        read_space({**LARGE, "shape": [2], "low": "x" * 1_000_000}, "observation")
    assert len(str(refused.value)) < 1000


FORGED = "ant\n2026-01-01 WARNING all is well\x1b[2J\u202e"


def test_names_of_a_peer_forge_no_lines_of_the_log():
    shown = printable(FORGED)
    assert shown == "ant?2026-01-01 WARNING all is well?[2J?"
    assert printable("a\nb\tc\r", lines=True) == "a\n    b c?"
    hello = Hello(
        [(1, 0)], FORGED, FORGED, 0, bytes(16), bytes(16), 0, SMALL, SMALL, 1, 1, 1, 0, True, []
    )  # fmt: skip
    assert hello.env == hello.sdk == shown
    assert Message(clp.Op.ERROR, meta={"text": FORGED}).text == "ant 2026-01-01 WARNING all is well?[2J?"
    reply = Message(clp.Op.STEP, meta={"rows": {"0": "line\n\x1b[1mline"}})
    assert row_messages(reply, 1) == {0: "line\n    ?[1mline"}


@pytest.mark.parametrize("bound", [{"low": "-inf", "high": "inf"}, {"low": float("-inf"), "high": float("inf")}])
def test_an_integer_box_without_bounds_has_those_of_its_dtype(bound):
    space = read_space({"type": "box", "dtype": "int64", "shape": [2], **bound}, "observation").space
    assert space.low.tolist() == [np.iinfo(np.int64).min] * 2
    assert space.high.tolist() == [np.iinfo(np.int64).max] * 2


@pytest.mark.parametrize("high", [1e30, float("nan"), 300.0])
def test_a_bound_outside_of_its_dtype_is_refused(high):
    with pytest.raises(BadMessage, match="no bound of uint8: give one from 0 to 255"):
        read_space({"type": "box", "dtype": "uint8", "shape": [2], "low": 0, "high": high}, "observation")


# -- the JSON loop -----------------------------------------------------------------------------------------------------


def test_text_observation_is_refused_before_allocation():
    with pytest.raises(ClientError, match="expected numbers"):
        inferred([["x" * 1_000_000] + [""] * 200_000])


def test_observation_with_too_many_leaves_is_refused():
    with pytest.raises(ClientError, match="300 leaves"):
        inferred({"a": {str(k): 1 for k in range(300)}})


# -- simulators --------------------------------------------------------------------------------------------------------


@pytest.fixture
def server():
    server = SimulatorServer(Walk, "Walk", Scripted(), 4)
    yield server
    server.close()


def _post(server, *events):
    server._binding.events = list(events)
    server.poll(0)


def _welcome(server, wire, session=5, resumed=False, knock=0, **limits):
    """A learner's side of the handshake; what the simulator said last."""
    welcome = Welcome((1, 0), session, resumed, bytes(16), b"", 4, Limits(**limits), Budget())
    knock = Message(clp.Op.KNOCK, meta=to_meta(Knock(session=knock)))
    _post(server, Event(wire), *(
        Event(wire, message.frames()) for message in (knock, Message(clp.Op.WELCOME, meta=to_meta(welcome)))
    ))  # fmt: skip
    return read_message(wire.last)


def _ask(server, wire, op, *payload, seq=1, session=5):
    message = Message(op, 0, 0, seq, session, server._layout, 1, 0, None, list(payload))
    _post(server, Event(wire, message.frames()))
    return read_message(wire.last)


@pytest.mark.parametrize("limits", [{"slots": 0}, {"slots": -1}, {"batch": 0}, {"message": -5}, {"info": -1}])
def test_a_learner_that_allows_nothing_is_refused(server, limits):
    refused = _welcome(server, Strange(), **limits)
    assert (refused.op, refused.status) == (clp.Op.ERROR, clp.Status.E_PROTOCOL)
    assert next(iter(limits)) in refused.text
    assert _welcome(server, Strange()).op == clp.Op.READY


def test_learners_with_equal_ids_have_own_sessions(server):
    one, other = Strange(), Strange()
    for wire in (one, other):
        assert _welcome(server, wire).op == clp.Op.READY
        assert _ask(server, wire, clp.Op.RESET, bytes(4), bytes(8)).status == 0
    _post(server, Event(other, Message(clp.Op.CLOSE, clp.NO_REPLY, meta={"over": True}).frames()))
    assert [session.wire for session in server._sessions] == [one]
    assert _ask(server, one, clp.Op.STEP, bytes(4), bytes(8), seq=2).status == 0


def test_session_unknown_to_learner_is_freed(server):
    one, again = Strange(), Strange()
    _welcome(server, one)
    _post(server, Event(one, lost="cut"))
    assert _welcome(server, again, session=6, knock=5).op == clp.Op.READY
    assert [session.number for session in server._sessions] == [6]


def test_session_ended_during_handshake_is_not_resumed(server):
    one, again = Strange(), Strange()
    _welcome(server, one)
    _post(server, Event(one, lost="cut"))
    _post(server, Event(again), Event(again, Message(clp.Op.KNOCK, meta=to_meta(Knock(session=5))).frames()))
    server._end(server._sessions[0])
    welcome = Welcome((1, 0), 5, True, bytes(16), b"", 4, Limits(), Budget())
    _post(server, Event(again, Message(clp.Op.WELCOME, meta=to_meta(welcome)).frames()))
    assert read_message(again.last).status == clp.Status.E_SESSION


def test_later_of_two_resuming_connections_wins(server):
    one, two, three = Strange(), Strange(), Strange()
    _welcome(server, one)
    _post(server, Event(one, lost="cut"))
    welcome = Welcome((1, 0), 5, True, bytes(16), b"", 4, Limits(), Budget())
    for wire in (two, three):
        _post(server, Event(wire), Event(wire, Message(clp.Op.KNOCK, meta=to_meta(Knock(session=5))).frames()))
    for wire in (two, three):
        _post(server, Event(wire, Message(clp.Op.WELCOME, meta=to_meta(welcome)).frames()))
        assert read_message(wire.last).op == clp.Op.READY
    assert two.closed
    assert list(server._by_wire) == [three]


def test_reasons_are_sent_only_if_asked_for(server):
    wire = Strange()
    _welcome(server, wire, info=0)
    _ask(server, wire, clp.Op.RESET, bytes(4), bytes(8))
    unknown = _ask(server, wire, clp.Op.EXPORT, (9).to_bytes(8, "little"), seq=2)
    assert unknown.meta["rows"] == {"0": ""}


def _import(state, kept, over, obs):
    """Status and message of importing this into a Walk; None where it is a state."""
    body = b"".join(bytes(part) for part in encoding.encode([kept, over, obs]))
    head = b"CPY1" + state._layout.to_bytes(4, "little") + zlib.crc32(body).to_bytes(4, "little")
    return problems_of(lambda blob: unpack_state(state._layout, state._states, 2, blob), [head + body])[0]


@pytest.mark.parametrize(
    "obs", [[], [np.zeros(3)], [np.zeros(2, np.float32)], [np.zeros(2), np.zeros(2)], ["text"], [[0, 0]]]
)
def test_exported_state_with_wrong_observation_is_refused(obs):
    state = ExportedState()
    kept = state._states.get(1).kept
    assert _import(state, kept, False, [np.zeros(2)]) is None
    status, message = _import(state, kept, False, obs)
    assert (status, "observation" in message) == (clp.Status.E_BAD_REQUEST, True)


def test_whatever_an_author_raises_at_a_foreign_state_refuses_it():
    state = ExportedState()
    own = encoding.decode(state._states.get(1).kept)
    own["state"]["rng"]["uinteger"] = -1  # an OverflowError of NumPy's
    kept = b"".join(bytes(part) for part in encoding.encode(own))
    status, message = _import(state, kept, False, [np.zeros(2)])
    assert (status, "OverflowError" in message) == (clp.Status.E_BAD_REQUEST, True)


# -- what clients are answered -----------------------------------------------------------------------------------------


def test_messages_about_unknown_rows_are_ignored():
    meta = {"rows": {"1" * 5000: "x", "7": "x", "0": "it broke", "1": 5}}
    assert row_messages(Message(clp.Op.SAVE, meta=meta), 2) == {0: "it broke"}


@pytest.mark.parametrize("meta", [{"names": 5, "more": False}, {"names": [1], "more": False}, {"more": True}, None])
def test_a_state_server_that_lists_no_names_is_an_error(meta):
    client = _client(Message(clp.Op.LIST, clp.REPLY, meta=meta))
    with pytest.raises(EnvFailed, match="names"):
        client.names()


def test_endless_list_of_state_server_is_an_error():
    page = Message(clp.Op.LIST, clp.REPLY, meta={"names": ["a", "b"], "more": True})
    with pytest.raises(EnvFailed, match="not asked for"):
        _client(page, page).names()


def test_a_state_server_that_gives_no_state_is_an_error():
    with pytest.raises(EnvFailed, match="0 frames"):
        _client(Message(clp.Op.GET, clp.REPLY)).get("a")


def test_a_state_server_whose_figures_are_none_is_an_error():
    with pytest.raises(EnvFailed, match="snapshot_bytes"):
        _ = _client(Message(clp.Op.STATS, clp.REPLY, meta={"snapshots": 1, "snapshot_bytes": "many"})).nbytes


def _client(*answers):
    """A client whose server answers its requests with these."""
    client = StateClient()._client
    client._wire, client._ready = Strange(), True
    for seq, answer in enumerate(answers, 1):
        client._binding.events.append(Event(client._wire, replace(answer, seq=seq).frames()))
    return client
