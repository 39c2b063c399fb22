"""Writes the golden messages: NAME.bin as it travels over tcp://, and index.json, which says what each is.

An implementation is right when it builds these bytes from these fields, and reads these fields from these bytes.
`python sdk/vectors/make.py` writes them anew; tests/link/test_vectors.py and sdk/cpp/tests compare.
"""

from __future__ import annotations

import json
from pathlib import Path

import gymnasium.spaces as gs
import numpy as np

from corral.core.spaces import Layout
from corral.link import protocol as clp
from corral.link.auth import LEARNER, SIMULATOR, prove
from corral.link.control import Budget, Hello, Knock, Ready, Welcome, to_meta
from corral.link.layout import RowsLayout, layout_hash, space_group
from corral.link.message import Message
from corral.link.protocol import Limits
from corral.link.transports.tcp import pack
from corral.snapshot.store import client as sw

HERE = Path(__file__).parent
SIM_NONCE, LEARNER_NONCE, INSTANCE = bytes(range(16)), bytes(range(16, 32)), bytes(range(32, 48))
TOKEN = b"0123456789abcdef0123456789abcdef"
SESSION = 0x01020304

CART = Layout(gs.Box(-4.8, 4.8, (4,), np.float32)), Layout(gs.Discrete(2))
HYBRID = (
    Layout(
        gs.Dict([("pose", gs.Box(-np.inf, np.inf, (3,), np.float32)), ("cam", gs.Box(0, 255, (2, 2, 3), np.uint8))])
    ),
    Layout(
        gs.Dict(
            [
                ("gear", gs.Discrete(5, start=-2)),
                ("throttle", gs.Box(np.float32([0, -1]), np.float32([1, 1]), dtype=np.float32)),
                ("keys", gs.MultiDiscrete([3, 4])),
                ("lamps", gs.MultiBinary(3)),
            ]
        )
    ),
)


def hello(spaces: tuple[Layout, Layout], name: str, **more: object) -> dict[str, object]:
    """Meta of a HELLO."""
    fields = {
        "versions": [(1, 0)], "sdk": "vectors", "env": name, "env_version": 3, "instance": INSTANCE,
        "nonce": SIM_NONCE, "session": 0, "observation": spaces[0].to_json(), "action": spaces[1].to_json(),
        "players": 1, "slots": 64, "threads": 2, "level": 3, "exact": True, "capabilities": ["rollout", "export"],
    }  # fmt: skip
    return to_meta(Hello(**{**fields, **more}))  # type: ignore[arg-type]


def u4(*values: int) -> bytes:
    """Numbers of 32 bits."""
    return np.array(values, "<u4").tobytes()


def u8(*values: int) -> bytes:
    """Numbers of 64 bits."""
    return np.array(values, "<u8").tobytes()


def rows(batch: int, layout: RowsLayout | None = None, **leaves: object) -> bytes:
    """A frame of rows."""
    layout = layout or RowsLayout()
    frame, room = layout.group().make(batch)
    names = ["reward", *(["raw_reward"] if layout.raw_reward else []), "flags", "status"]
    names += ["to_play"] if layout.players > 1 else []
    for name, place in zip(names, room, strict=True):
        if name in leaves:
            place[...] = np.reshape(leaves[name], place.shape)
    return bytes(frame)


def group(layout: Layout, *leaves: np.ndarray) -> bytes:
    """A frame of observations or actions."""
    return bytes(
        space_group(layout).write(
            [np.asarray(a, leaf.dtype) for a, leaf in zip(leaves, layout.leaves, strict=True)], len(leaves[0])
        )
    )


def messages() -> dict[str, tuple[str, Message]]:
    """All golden messages by name, with a word about each."""
    cart, hybrid = layout_hash(*CART), layout_hash(*HYBRID)

    def ask(
        op: clp.Op, batch: int, payload: list[bytes], flags: int = 0, layout: int = cart, **more: object
    ) -> Message:
        return Message(op, flags, 0, 7, SESSION, layout, batch, 30_000, payload=payload, **more)  # type: ignore[arg-type]

    def reply(
        op: clp.Op, batch: int, payload: list[bytes], flags: int = 0, layout: int = cart, **more: object
    ) -> Message:
        return Message(op, clp.REPLY | flags, 0, 7, SESSION, layout, batch, 123, payload=payload, **more)  # type: ignore[arg-type]

    obs = np.arange(12, dtype=np.float32).reshape(3, 4)
    welcome = Welcome(
        (1, 0), SESSION, False, LEARNER_NONCE, prove(TOKEN, LEARNER, SIM_NONCE, LEARNER_NONCE), 16, Limits(),
        Budget(1 << 30, 1_000_000),
    )  # fmt: skip
    hybrid_actions = group(
        HYBRID[1],
        np.array([-2, 2]),
        np.array([[0.5, -1], [1, 0.25]]),
        np.array([[2, 3], [0, 1]]),
        np.array([[1, 0, 1], [0, 1, 1]]),
    )
    pixels = np.arange(24).reshape(2, 2, 2, 3)
    two = RowsLayout(players=2)
    return {
        "knock": ("a learner that dialled", Message(clp.Op.KNOCK, meta=to_meta(Knock()))),
        "hello_cart": ("one leaf each", Message(clp.Op.HELLO, meta=hello(CART, "CartPole"))),
        "hello_hybrid": (
            "dicts, infinite bounds, bounds per element",
            Message(clp.Op.HELLO, meta=hello(HYBRID, "Hybrid")),
        ),
        "welcome": ("with the proof of the token", Message(clp.Op.WELCOME, meta=to_meta(welcome))),
        "ready": (
            "with the proof of the token",
            Message(clp.Op.READY, meta=to_meta(Ready(prove(TOKEN, SIMULATOR, SIM_NONCE, LEARNER_NONCE)))),
        ),
        "reset": ("three slots", ask(clp.Op.RESET, 3, [u4(0, 1, 5), u8(11, 12, 2**64 - 1)])),
        "reset_reply": ("first observations", reply(clp.Op.RESET, 3, [rows(3, flags=[8, 8, 8]), group(CART[0], obs)])),
        "step": (
            "one leaf of actions",
            ask(clp.Op.STEP, 3, [u4(0, 1, 5), group(CART[1], np.array([0, 1, 1]))], clp.AUTORESET),
        ),
        "step_reply": ("nobody ended", reply(clp.Op.STEP, 3, [rows(3, reward=[1, 0.5, -2]), group(CART[0], obs)])),
        "step_reply_final": (
            "row 1 terminated and started again, row 2 failed and waits",
            reply(
                clp.Op.STEP,
                3,
                [
                    rows(3, reward=[1, 1, 0], flags=[0, 1 | 8, 2 | 4], status=[0, 0, 7]),
                    group(CART[0], obs),
                    group(CART[0], obs[1:2] + 100),
                ],
                meta={"rows": {"2": "it broke"}},
            ),
        ),
        "step_hybrid": (
            "four leaves of actions at multiples of 64 bytes",
            ask(clp.Op.STEP, 2, [u4(2, 3), hybrid_actions], clp.AUTORESET, hybrid),
        ),
        "step_hybrid_reply": (
            "two leaves of observations",
            reply(clp.Op.STEP, 2, [rows(2, reward=[1, 2]), group(HYBRID[0], np.ones((2, 3)), pixels)], 0, hybrid),
        ),
        "step_two_players_reply": (
            "two rewards per row, and who moves next",
            reply(
                clp.Op.STEP,
                2,
                [rows(2, two, reward=[[1, -1], [0, 0]], flags=[1, 0], to_play=[0, 1]), group(CART[0], obs[:2])],
            ),
        ),
        "step_raw_reply": (
            "with the game's own reward",
            reply(
                clp.Op.STEP,
                1,
                [rows(1, RowsLayout(raw_reward=True), reward=[1], raw_reward=[5]), group(CART[0], obs[:1])],
            ),
        ),
        "save": ("two slots", ask(clp.Op.SAVE, 2, [u4(0, 1), u8(1 << 40 | 1, 1 << 40 | 2)])),
        "save_reply": (
            "one did not fit",
            reply(clp.Op.SAVE, 2, [rows(2, status=[0, 6])], meta={"rows": {"1": "full"}}),
        ),
        "load": ("and show it", ask(clp.Op.LOAD, 1, [u4(4), u8(1 << 40 | 1)], clp.WANT_OBS)),
        "expand": (
            "two children of one parent, one of them not kept",
            ask(clp.Op.EXPAND, 2, [u8(1 << 40 | 1, 1 << 40 | 1), group(CART[1], np.array([0, 1])), u8(1 << 40 | 3, 0)]),
        ),
        "expand_seeds": (
            "with chance seeds",
            ask(clp.Op.EXPAND, 1, [u8(1 << 40 | 1), group(CART[1], np.array([1])), u8(1 << 40 | 4), u8(99)]),
        ),
        "rollout": (
            "one parent, three steps",
            ask(clp.Op.ROLLOUT, 1, [u8(1 << 40 | 1), group(CART[1], np.array([0, 1, 0]))], meta={"steps": 3}),
        ),
        "drop": (
            "two states",
            Message(clp.Op.DROP, clp.NO_REPLY, 0, 8, SESSION, cart, 2, payload=[u8(1 << 40 | 1, 1 << 40 | 2)]),
        ),
        "drop_generation": (
            "all of generation 1",
            Message(clp.Op.DROP, clp.NO_REPLY, 0, 9, SESSION, cart, meta={"generation": 1}),
        ),
        "export_reply": ("two states", reply(clp.Op.EXPORT, 2, [rows(2), u8(3, 2), b"abcde"])),
        "heartbeat": ("are you there", Message(clp.Op.HEARTBEAT, 0, 0, 10, SESSION, cart)),
        "refused": (
            "a request that cannot be carried out",
            Message(
                clp.Op.STEP,
                clp.REPLY | clp.FAILED,
                clp.Status.E_BAD_REQUEST,
                7,
                SESSION,
                cart,
                3,
                12,
                {"text": "STEP: slot 9, there are 4"},
            ),
        ),
        "error": (
            "the end of a session",
            Message(clp.Op.ERROR, clp.NO_REPLY, clp.Status.E_AUTH, 0, 0, 0, 0, 0, {"text": "no proof"}),
        ),
        "close": (
            "the run is over",
            Message(clp.Op.CLOSE, clp.NO_REPLY, 0, 11, SESSION, cart, meta={"reason": "the run is over", "over": True}),
        ),
    }


def state_messages() -> dict[str, tuple[str, Message]]:
    """Between a state server and a client, whose nonces are the learner's and the simulator's of the others."""
    client, server = SIM_NONCE, LEARNER_NONCE
    welcome = sw.ServerWelcome((1, 0), server, prove(TOKEN, sw.SERVER, client, server), sw.MAX_BYTES)

    def reply(op: clp.Op, flags: int = 0, status: int = 0, **more: object) -> Message:
        return Message(op, clp.REPLY | flags, status, 3, **more)  # type: ignore[arg-type]

    return {
        "states_knock": ("a client of a state server", Message(clp.Op.KNOCK, meta=to_meta(sw.knock(client)))),
        "states_welcome": ("with the proof of the token", Message(clp.Op.WELCOME, meta=to_meta(welcome))),
        "states_ready": (
            "with the proof of the token",
            Message(clp.Op.READY, meta=to_meta(Ready(prove(TOKEN, sw.CLIENT, client, server)))),
        ),
        "put": ("a state of five bytes", Message(clp.Op.PUT, seq=3, meta={"name": "a/é"}, payload=[b"\0bits"])),
        "put_reply": ("it is kept", reply(clp.Op.PUT)),
        "put_full": (
            "it did not fit",
            reply(clp.Op.PUT, clp.FAILED, clp.Status.E_SNAPSHOT_FULL, meta={"text": "drop some"}),
        ),
        "get": ("by its name", Message(clp.Op.GET, seq=3, meta={"name": "a/é"})),
        "get_reply": ("the state", reply(clp.Op.GET, payload=[b"\0bits"])),
        "get_unknown": ("there is none", reply(clp.Op.GET, status=clp.Status.E_UNKNOWN_STATE, payload=[b""])),
        "drop_state": ("by its name", Message(clp.Op.DROP_STATE, seq=3, meta={"name": "a/é"})),
        "drop_state_reply": ("there was one", reply(clp.Op.DROP_STATE, meta={"dropped": True})),
        "list": ("the next page", Message(clp.Op.LIST, seq=3, meta={"prefix": "a/", "after": "a/b"})),
        "list_reply": ("the last page", reply(clp.Op.LIST, meta={"names": ["a/c", "a/é"], "more": False})),
        "states_stats": ("how much there is", Message(clp.Op.STATS, seq=3, meta={})),
        "states_stats_reply": ("two states", reply(clp.Op.STATS, meta={"snapshots": 2, "snapshot_bytes": 10})),
    }


def describe(message: Message) -> dict[str, object]:
    """Fields as JSON; bytes as hexadecimal digits."""
    names = ("op", "flags", "status", "seq", "session", "layout", "batch", "aux")
    fields: dict[str, object] = {name: int(getattr(message, name)) for name in names}
    fields["flags"] = message.flags | (clp.META if message.meta is not None else 0)
    return fields | {"meta": _plain(message.meta), "payload": [bytes(frame).hex() for frame in message.payload]}


def _plain(value: object) -> object:
    if isinstance(value, bytes):
        return {"hex": value.hex()}
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


def main() -> None:
    """Write them all."""
    index: dict[str, object] = {
        "token": TOKEN.decode(), "simulator_nonce": SIM_NONCE.hex(), "learner_nonce": LEARNER_NONCE.hex(),
        "layout_cart": layout_hash(*CART), "layout_hybrid": layout_hash(*HYBRID), "messages": {},
    }  # fmt: skip
    for name, (about, message) in (messages() | state_messages()).items():
        (HERE / f"{name}.bin").write_bytes(b"".join(pack(message.frames())))
        index["messages"][name] = {"about": about, **describe(message)}  # type: ignore[index]
    (HERE / "index.json").write_text(json.dumps(index, indent=1) + "\n")


if __name__ == "__main__":
    main()
