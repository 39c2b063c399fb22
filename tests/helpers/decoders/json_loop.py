"""Decoders of zmq+json: one message, and a client's part of a conversation."""

import contextlib
import json

import gymnasium
import numpy as np

from corral.core.spaces import Layout
from corral.link import protocol as clp
from corral.link.control import to_meta
from corral.link.message import Message
from corral.link.transports.json_client import JsonPeer
from corral.link.transports.json_values import ClientError, read_client_message, read_obs, spaces_of
from helpers.decoders.wires import MAX, WELCOME

TWO = Layout(gymnasium.spaces.Discrete(2))


def decode_json(data):
    with contextlib.suppress(ClientError):
        said = read_client_message(data)
        observation, _ = spaces_of(said, None, TWO)
        assert all(np.isfinite(leaf).all() for leaf in read_obs(said.obs, observation))


class JsonLoop:
    """A client's lines, and a learner that answers each with the next request."""

    def __call__(self, data):
        """Lines are the client's messages."""
        peer = None
        for seq, line in enumerate(data.split(b"\n")[:8], 1):
            try:
                said = read_client_message(line)
                if peer is None:
                    peer = JsonPeer(said.env_id, "test", spaces_of(said, None, TWO), MAX)
                    peer.hello(said)
                    peer.send(Message(clp.Op.WELCOME, meta=to_meta(WELCOME)).frames())
                else:
                    peer.take(said)
            except ClientError as error:
                if peer is not None:
                    peer.fail(str(error))
            if peer is None or peer.lost is not None:
                return
            op = clp.Op.RESET if seq == 1 else clp.Op.STEP
            peer.send(Message(op, 0, 0, seq, 5, 0, 1, 0, None, [bytes(4), bytes(8)]).frames())


def good_json():
    reset = {"command": "reset", "env_id": "a", "obs": [0.5, 1.0], "seeded": True}
    spaces = {"action_space": 3, "observation_space": Layout(gymnasium.spaces.Box(-1, 1, (2,))).to_json()}
    step = {"command": "step", "env_id": "a", "obs": [1, 2], "reward": 1, "terminated": False, "truncated": False}
    nested = {"command": "reset", "env_id": 7, "obs": {"b": [[1, 2], [3, 4]], "a": 0.5}, "instance": "0" * 32}
    end = {**step, "terminated": True, "raw_reward": 2.5, "life_lost": True}
    all_of_them = reset, {**reset, **spaces}, step, nested, end, {"command": "terminate", "env_id": "a"}
    return [json.dumps(said).encode() for said in all_of_them]


def good_loops():
    reset, described, step, nested, end, terminate = good_json()
    return [b"\n".join(lines) for lines in (
        [reset, step, step], [described, described, step, end, reset], [reset, step, reset], [nested, nested],
        [reset, step, terminate], [reset, end, reset, step],
    )]  # fmt: skip
