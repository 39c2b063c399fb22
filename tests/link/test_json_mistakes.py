"""Mistakes of JSON clients: what is refused, and with which words."""

import json
import re
import socket as sockets
import time

import pytest
import zmq
from helpers.json_clients import (
    STEP,
    Hand,
    act,
    free_url,
    url_of,
    vec_of,
)

from corral.core.errors import UserError
from corral.link.address import parse_url
from corral.link.transports import json_router as json_loop
from corral.link.transports.open import open_for_learner

MISTAKES = {
    "not JSON": (b"\x00\xff hello", "not JSON"),
    "not text": (b'{"command": "\xff"}', "not JSON"),
    "cut off": (json.dumps(STEP)[:-5].encode(), "not JSON"),
    "too deep": (b"[" * 50_000, "not JSON|is invalid"),
    "no object": (b"[1, 2]", "is invalid"),
    "empty": (b"", "not JSON"),
    "no command": ({**STEP, "command": None}, "command"),
    "unknown command": ({**STEP, "command": "pause"}, "'pause' is not one of reset, step, terminate"),
    "no env_id": ({**STEP, "env_id": None}, "env_id"),
    "another env_id": ({**STEP, "env_id": "foot"}, "changed from 'hand' to 'foot'"),
    "long env_id": ({**STEP, "env_id": "x" * 1000}, "1000 characters"),
    "no obs": ({**STEP, "obs": None}, "has no 'obs'"),
    "no reward": ({**STEP, "reward": None}, "has no 'reward'"),
    "no truncated": ({**STEP, "truncated": None}, "has no 'truncated'"),
    "flag is a number": ({**STEP, "terminated": 1}, "terminated"),
    "wrong shape": ({**STEP, "obs": [1, 2, 3]}, r"shape \(3,\), expected \(2,\)"),
    "ragged": ({**STEP, "obs": [[1], [1, 2]]}, "different lengths"),
    "an object": ({**STEP, "obs": {"x": 1}}, "expected numbers"),
    "text": ({**STEP, "obs": ["1", "2"]}, "expected numbers"),
    "null": ({**STEP, "obs": [1, None]}, "expected numbers"),
    "NaN": ({**STEP, "obs": [1, float("nan")]}, "no NaN"),
    "infinite reward": ({**STEP, "reward": float("inf")}, "no NaN or Infinity"),
    "huge number": (json.dumps(STEP).replace("[1, 2]", "[1, 1e999]").encode(), "range"),
    "number too large": ({**STEP, "obs": [1, 1e300]}, "float32 cannot hold"),
    "huge message": (json.dumps(STEP).encode() + b" " * 100_000, "at most"),
    "several frames": ([json.dumps(STEP).encode(), b"more"], "frames"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistake_of_a_client_ends_only_its_episode(context, hand, name):
    body, words = MISTAKES[name]
    frames = body if isinstance(body, list) else [json.dumps(body).encode() if isinstance(body, dict) else body]
    other = Hand(context, hand.fleet, 1)
    other.reset(1, 1)
    with vec_of(hand.fleet, 2) as vec:
        mine = 0 if vec.recv().obs[0, 1] == 7 else 1
        act(vec, 0, 0)
        hand.hear()
        hand.socket.send_multipart(frames)
        error = hand.hear()
        assert error.keys() == {"error"}
        assert re.search(words, error["error"])
        assert len(error["error"]) <= 500
        other.hear()
        other.step(2, 2)
        assert vec.recv(min_ready=1).obs.tolist() == [[2, 2]]
        hand.reset(0, 8)  # it may try again
        batch = vec.recv()
        assert (batch.env_ids.tolist(), batch.faulty.tolist(), batch.truncated.tolist()) == ([mine], [True], [True])
        assert (batch.obs.tolist(), batch.final_obs.tolist()) == ([[0, 8]], [[0, 7]])
        act(vec, 1, 1)
        assert hand.hear() == other.hear() == {"action": 1}
        assert vec.restarts == 1
        for client in (hand, other):
            client.leave()


FIRST = {"command": "reset", "env_id": 1, "obs": [1, 2]}


REFUSED = {
    "step": (STEP, "begin with a reset"),
    "no obs": ({**FIRST, "obs": None}, "no 'obs'"),
    "empty obs": ({**FIRST, "obs": []}, "obs is empty"),
    "empty object": ({**FIRST, "obs": {}}, "expected numbers"),
    "part of text": ({**FIRST, "obs": {"a": [1], "b": "x"}}, "obs.b is x"),
    "another action space": ({**FIRST, "action_space": 3}, "Discrete"),
    "no action space": ({**FIRST, "action_space": {"type": "text"}}, "Unknown space type"),
    "endless action space": ({**FIRST, "action_space": 10**30}, "cannot be used"),
    "large": ({**FIRST, "obs": [0.25] * 100_000}, "at most 262144"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_invalid_first_message_is_refused(context, gate, caplog, name):
    message, words = REFUSED[name]
    hand = Hand(context, gate(most=1 << 18))
    hand.socket.send_string(json.dumps(message))
    assert words in hand.hear()["error"]
    assert words in caplog.text
    assert not hand.fleet.sessions
    hand.reset(1, 2)
    vec_of(hand.fleet, 1).close()
    assert hand.hear()["terminate"]


def test_missing_action_space_is_asked_for(context, gate):
    hand = Hand(context, gate(action=None))
    hand.reset(1, 2)
    assert "env_kwargs={'action': ...}" in hand.hear()["error"]
    hand.reset(1, 2, action_space={"type": "box", "dtype": "float32", "shape": [3], "low": -1, "high": 1})
    with vec_of(hand.fleet, 1) as vec:
        vec.recv()
        act(vec, [0.5, -1, 0])
        assert hand.hear() == {"action": [0.5, -1, 0]}


def test_all_clients_have_the_same_spaces(context, hand):
    with vec_of(hand.fleet, 1):
        other = Hand(context, hand.fleet, 2)
        other.reset(1, 2, 3)
        assert "where others have" in other.hear()["error"]


def test_an_env_id_is_one_clients_until_it_leaves(context, hand):
    with vec_of(hand.fleet, 1) as vec:
        vec.recv()
        other = Hand(context, hand.fleet)
        other.reset(1, 2)
        assert "'hand' belongs to another client" in other.hear()["error"]
        act(vec, 1)
        assert hand.hear() == {"action": 1}
        hand.leave()  # without a word, as a process that is started again
        while hand.fleet.sessions:
            hand.fleet.poll(0.01)
        other.reset(3, 4)
        batch = vec.recv()
        assert (batch.faulty.tolist(), batch.obs.tolist()) == ([True], [[3, 4]])


def test_there_is_no_place_for_more_clients_than_the_most(context, hand, monkeypatch):
    monkeypatch.setattr(json_loop, "_MAX_CLIENTS", 1)
    with vec_of(hand.fleet, 1):
        other = Hand(context, hand.fleet, 2)
        other.reset(1, 2)
        assert "connected already" in other.hear()["error"]


def test_a_client_that_does_not_wait_for_answers_is_refused(context, gate):
    fleet = gate()
    eager = context.socket(zmq.DEALER)
    eager.connect(url_of(fleet).replace("zmq+json", "tcp"))
    for _ in range(3):
        eager.send_multipart([b"", json.dumps(FIRST).encode()])
    until = time.monotonic() + 5
    while not eager.poll(0) and time.monotonic() < until:
        fleet.poll(0.01)
    assert b"before the last one was answered" in eager.recv_multipart()[1]


def test_a_client_that_hangs_is_given_up_and_may_come_again(context, hand):
    with vec_of(hand.fleet, 1, step_timeout_s=0.3) as vec:
        vec.recv()
        act(vec, 1)
        assert hand.hear() == {"action": 1}
        other = Hand(context, hand.fleet, 2)
        other.reset(5, 5)
        batch = vec.recv()
        assert (batch.faulty.tolist(), batch.obs.tolist()) == ([True], [[5, 5]])
        assert vec.faults[0].kind == "hung"
        hand.step(1, 7)
        assert "not connected" in hand.hear()["error"]
        hand.reset(0, 7)
        while len(hand.fleet.sessions) < 2:
            hand.fleet.poll(0.01)


def test_a_token_cannot_be_proven(context, gate):
    hand = Hand(context, gate(token=b"x" * 32))
    hand.reset(1, 2)
    assert "token" in hand.hear()["error"]


def test_client_in_mid_step_hears_end_of_run(context, hand):
    with vec_of(hand.fleet, 1) as vec:
        vec.recv()
        act(vec, 1)
        hand.hear()
        hand.step(1, 7)  # not read before the end
    assert json.loads(hand.socket.recv()) == {"action": None, "terminate": True}


def test_json_learner_only_listens():
    with sockets.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        url = f"zmq+json://127.0.0.1:{busy.getsockname()[1]}"
        with pytest.raises(UserError, match="choose another port"):
            open_for_learner([parse_url(url)], None)
    with pytest.raises(UserError, match="one free address"):
        open_for_learner([parse_url(url), parse_url(free_url())], None)
