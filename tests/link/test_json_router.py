"""The binding zmq+json://: clients that drive the loop behind the same VecEnv, and what they may do wrong."""

import contextlib
import json
import re
import shutil
import signal
import socket as sockets
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import zmq
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st

import corral
from corral.core.errors import UserError
from corral.core.spaces import Layout
from corral.envs.backends.simulators.vec_env import LinkVecEnv
from corral.envs.supervision import Supervision
from corral.link.address import parse_url
from corral.link.client.fleet import Fleet
from corral.link.transports import json_router as json_loop
from corral.link.transports.json_router import JsonBinding
from corral.link.transports.json_values import Mistake, described, inferred, read_client_message, read_obs, spaces_of
from corral.link.transports.open import open_for_learner
from corral.testing import CountingEnv, VecEnvContract
from corral.testing.contracts.vec_env import ID, LIFE, T
from corral.testing.play import play

CLIENTS = Path(__file__).parents[2] / "sdk" / "json"
ANYWHERE = parse_url("zmq+json://127.0.0.1:0")
TWO = Layout(spaces.Discrete(2))
PATIENCE_MS = 10_000


def as_json(value):
    if isinstance(value, dict):
        return {key: as_json(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return [as_json(item) for item in value]
    return np.asarray(value).tolist()


class Client(threading.Thread):
    """A JSON client around any environment, in a thread."""

    def __init__(self, url, env_id, factory, context):
        super().__init__(daemon=True)
        self.env_id, self.factory, self.error = env_id, factory, None
        self.socket = dial(context, url)
        self.start()

    def run(self):
        try:
            self.env = self.factory()
            self.play()
        except Exception as error:
            self.error = error
        finally:
            self.socket.close(0)

    def play(self):
        action = Layout(self.env.action_space)
        message = self.first()
        while True:
            self.socket.send_string(json.dumps({"env_id": self.env_id, **message}))
            answer = json.loads(self.socket.recv())
            if answer.get("terminate"):
                return
            if "reset" in answer:
                message = self.first(answer["seed"])
            elif answer["action"] is None:
                message = self.first()
            else:
                leaves = zip(action.leaves, action.flatten(answer["action"]), strict=True)
                chosen = action.unflatten([np.asarray(value, leaf.dtype)[()] for leaf, value in leaves])
                obs, reward, terminated, truncated, info = self.env.step(chosen)
                message = {"command": "step", "obs": as_json(obs), "reward": float(np.asarray(reward).reshape(()))}
                message |= {"terminated": bool(terminated), "truncated": bool(truncated)}
                message |= {key: info[key] for key in ("raw_reward", "life_lost") if key in info}

    def first(self, seed=None):
        obs, _ = self.env.reset(seed=seed)
        described = {
            f"{what}_space": Layout(getattr(self.env, f"{what}_space")).to_json() for what in ("action", "observation")
        }
        return {"command": "reset", "obs": as_json(obs), "seeded": True, **described}


def dial(context, url):
    socket = context.socket(zmq.REQ)
    socket.setsockopt(zmq.RCVTIMEO, PATIENCE_MS)
    socket.setsockopt(zmq.LINGER, 0)
    socket.connect(url.replace("zmq+json://", "tcp://"))
    return socket


@pytest.fixture
def context():
    context = zmq.Context()
    yield context
    context.destroy(0)


@pytest.fixture
def start(context):
    """Starts clients in threads; in the end all have been told that the run is over."""
    clients = []

    def start(url, factory, count):
        clients.extend(Client(url, len(clients) + k, factory, context) for k in range(count))

    yield start
    for client in clients:
        client.join(5)
        assert not client.is_alive()
        assert client.error is None, client.error


@pytest.fixture
def gate():
    """Opens fleets with the gateway, which are closed in the end."""
    fleets = []

    def gate(action=TWO, token=None, **kwargs):
        fleets.append(Fleet(JsonBinding(listen=ANYWHERE, action=action, **kwargs), token))
        return fleets[-1]

    yield gate
    for fleet in fleets:
        fleet.close()


def vec_of(fleet, num_envs, simulators=None, **supervision):
    return LinkVecEnv(
        fleet, num_envs, Supervision(**supervision), "train", simulators=simulators or num_envs, elastic=True,
        release=fleet.close,
    )  # fmt: skip


def url_of(fleet):
    return fleet.binding.urls[0]


def free_url():
    with sockets.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"zmq+json://127.0.0.1:{probe.getsockname()[1]}"


class TestContract(VecEnvContract):
    @pytest.fixture(autouse=True)
    def _clients(self, start):
        self._start = start

    def make(self, factory, num_envs, seed=0):
        fleet = Fleet(JsonBinding(listen=ANYWHERE))
        self._start(url_of(fleet), factory, num_envs)
        vec = vec_of(fleet, num_envs)
        vec.seed = seed
        return vec

    # As JSON a byte takes up to four, and seconds to write and read where the suite goes up to 64 MB: users of such
    # observations want the link.
    @pytest.mark.parametrize("nbytes", [1 << 10, (1 << 16) + 1, 1 << 20])
    def test_observations_of_any_size(self, nbytes):
        super().test_observations_of_any_size(nbytes)


def test_sixteen_clients_play_at_once(start):
    url = free_url()
    start(url, partial(CountingEnv, 5, "mixed"), 16)  # before anybody listens
    with corral.make_vec(url, 16, workers=16) as vec:
        rows = play(vec, 100, min_ready=4)
    assert all([row.next_obs[LIFE] for row in r] == list(range(1, 101)) for r in rows)
    assert len({r[0].obs[ID] for r in rows}) == 16


# -- one client by hand ----------------------------------------------------------------------------------------


class Hand:
    """A client whose every message is chosen by the test, in the thread of the learner."""

    def __init__(self, context, fleet, env_id="hand"):
        self.fleet, self.env_id, self.socket = fleet, env_id, dial(context, url_of(fleet))

    def say(self, command, **more):
        self.socket.send_string(json.dumps({"command": command, "env_id": self.env_id, **more}))

    def reset(self, *obs, **more):
        self.say("reset", obs=obs, **more)

    def step(self, *obs, reward=1, terminated=False, truncated=False, **more):
        self.say("step", obs=obs, reward=reward, terminated=terminated, truncated=truncated, **more)

    def hear(self):
        until = time.monotonic() + 5
        while not self.socket.poll(0):
            assert time.monotonic() < until
            self.fleet.poll(0.01)
        return json.loads(self.socket.recv())

    def leave(self):
        self.socket.close(0)


@pytest.fixture
def hand(context, gate):
    fleet = gate()
    hand = Hand(context, fleet)
    hand.reset(0.0, 7)
    return hand


def act(vec, *actions):
    vec.send(np.arange(len(actions)), np.array(actions))


def test_the_loop_word_by_word(hand):
    with vec_of(hand.fleet, 1) as vec:
        assert vec.spec.observation_space == spaces.Box(-np.inf, np.inf, (2,), np.float32)
        first = vec.recv()
        assert first.obs.tolist() == [[0, 7]]
        act(vec, 1)
        assert hand.hear() == {"action": 1}
        hand.step(1, 7.5, reward=3)
        batch = vec.recv()
        assert (batch.obs.tolist(), batch.reward.tolist(), batch.first.tolist()) == ([[1, 7.5]], [3], [False])
        act(vec, 0)
        assert hand.hear() == {"action": 0}
        hand.step(2, 8, reward=0.5, terminated=True, raw_reward=50)
        assert hand.hear() == {"action": None}
        hand.reset(0, 9)
        batch = vec.recv()
        assert batch.obs.tolist() == [[0, 9]]
        assert batch.final_obs.tolist() == [[2, 8]]
        assert (batch.reward.tolist(), batch.raw_reward.tolist()) == ([0.5], [50])
        assert (batch.terminated[0], batch.truncated[0], batch.first[0], batch.faulty[0]) == (True, False, True, False)
    assert hand.hear() == {"action": None, "terminate": True}


def test_reset_of_seeded_and_unseeded_json_clients(hand):
    with vec_of(hand.fleet, 1) as vec:
        assert vec.recv().obs.tolist() == [[0, 7]]
        act(vec, 1)
        hand.hear()
        hand.step(1, 7)
        vec.recv()
        vec.reset(3)  # in the middle of its episode
        batch = vec.recv()
        assert (batch.obs.tolist(), batch.first.tolist()) == ([[1, 7]], [True])
        act(vec, 1)
        hand.hear()
        hand.step(2, 7, truncated=True)
        hand.hear()
        hand.reset(0, 8, seeded=True)
        vec.recv()
        seeds = []
        for seed in (4, 4, 5):
            vec.reset(seed)
            order = hand.hear()
            assert order.keys() == {"reset", "seed"}
            seeds.append(order["seed"])
            hand.reset(0, seed, seeded=True)
            assert vec.recv().obs.tolist() == [[0, seed]]
        assert seeds[0] == seeds[1] != seeds[2]


def test_restart_in_mid_episode_yields_faulty_row(hand):
    with vec_of(hand.fleet, 1) as vec:
        vec.recv()
        act(vec, 1)
        hand.hear()
        hand.reset(0, 8)
        batch = vec.recv()
        assert (batch.truncated[0], batch.faulty[0], batch.first[0], batch.reward[0]) == (True, True, True, 0)
        assert (batch.obs.tolist(), batch.final_obs.tolist()) == ([[0, 8]], [[0, 7]])
        assert "started over" in vec.faults[0].detail
        act(vec, 1)
        assert hand.hear() == {"action": 1}


@pytest.mark.parametrize("how", ["terminate", "disconnect", "mistake"])
def test_client_leaving_after_an_episode_delivers_its_end(hand, how):
    with vec_of(hand.fleet, 1) as vec:
        vec.recv()
        act(vec, 1)
        hand.hear()
        hand.step(1, 7, reward=100, terminated=True)
        assert hand.hear() == {"action": None}
        if how == "terminate":
            hand.say("terminate")
            assert hand.hear() == {"action": None}
        elif how == "disconnect":
            hand.leave()
        else:
            hand.reset("x")
        batch = vec.recv()
        assert (batch.reward[0], batch.terminated[0], batch.faulty[0]) == (100, True, False)
        assert batch.final_obs.tolist() == [[1, 7]]
        assert vec.restarts == 1


def test_late_client_replaces_one_that_left(context, hand):
    with vec_of(hand.fleet, 1) as vec:
        vec.recv()
        act(vec, 1)
        hand.hear()
        hand.say("terminate")
        assert hand.hear() == {"action": None}
        other = Hand(context, hand.fleet)  # by the same name
        other.reset(5, 5)
        batch = vec.recv()
        assert (batch.truncated[0], batch.faulty[0]) == (True, True)
        assert (batch.final_obs.tolist(), batch.obs.tolist()) == ([[0, 7]], [[5, 5]])
        assert "terminated" in vec.faults[0].detail


def test_environments_wait_for_late_joiners(context, hand):
    with vec_of(hand.fleet, 2, simulators=1) as vec:
        batch = vec.recv(min_ready=1)
        assert batch.env_ids.tolist() == [0]
        act(vec, 1)
        assert hand.hear() == {"action": 1}
        hand.step(1, 7)
        late = Hand(context, hand.fleet, 12.5)
        late.reset(3, 3)
        assert vec.recv().obs.tolist() == [[1, 7], [3, 3]]


def test_client_killed_in_mid_step_yields_one_faulty_row(gate, start):
    script = """
import json, sys, time, zmq
socket = zmq.Context().socket(zmq.REQ)
socket.connect(sys.argv[1])
def say(**message):
    socket.send_string(json.dumps({"env_id": "stuck", **message}))
    return json.loads(socket.recv())
say(command="reset", obs=[0, 0, 0, 0])
for t in (1, 2):
    say(command="step", obs=[0, 0, t, t], reward=t, terminated=False, truncated=False)
print("in the middle of a step", flush=True)
time.sleep(60)
"""
    fleet = gate(Layout(spaces.Discrete(3)), observation=Layout(CountingEnv().observation_space))
    url = url_of(fleet)
    command = [sys.executable, "-c", script, url.replace("zmq+json", "tcp")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        while not fleet.sessions:
            fleet.poll(0.1)
        start(url, partial(CountingEnv, 0), 2)
        with vec_of(fleet, 2, simulators=3) as vec:  # one to spare
            batch = vec.recv()
            stuck = int(np.flatnonzero(batch.obs[:, ID] == 0)[0])
            healthy = 1 - stuck
            for life in range(1, 6):
                if life == 3:
                    act(vec, 0, 0)
                    batch = vec.recv(min_ready=1)
                    assert batch.env_ids.tolist() == [healthy]
                    assert process.stdout.readline()
                    process.send_signal(signal.SIGKILL)
                    lost = vec.recv()
                    assert lost.env_ids.tolist() == [stuck]
                    assert (lost.truncated[0], lost.faulty[0], lost.reward[0]) == (True, True, 0)
                    assert lost.final_obs[0].tolist() == [0, 0, 2, 2]
                    assert lost.obs[0, T] == 0
                else:
                    act(vec, 0, 0)
                    batch = vec.recv()
                    assert not batch.faulty.any()
                assert batch.obs[batch.env_ids == healthy, LIFE].tolist() == [life]
            assert [fault.kind for fault in vec.faults] == ["killed"]
    finally:
        process.kill()
        process.communicate()


def test_client_gone_before_hello_takes_no_slot(context, gate):
    fleet = gate()
    binding = fleet.binding
    ghosts = [Hand(context, fleet, name) for name in "abc"]
    for ghost in ghosts:
        ghost.reset(0, 7)
    until = time.monotonic() + 5
    while len(binding._alive) < 3 and time.monotonic() < until:
        binding._watch()
    for ghost in ghosts:
        ghost.leave()
    while binding._alive and time.monotonic() < until:
        binding._watch()
    hand = Hand(context, fleet, "a")  # likely with the descriptor of one of them
    hand.reset(0, 8)
    with vec_of(fleet, 1) as vec:
        while len(fleet.sessions) != 1 and time.monotonic() < until:
            fleet.poll(0.01)
        assert vec.recv().obs.tolist() == [[0, 8]]
        hand.leave()


# -- mistakes --------------------------------------------------------------------------------------------------

STEP = {"command": "step", "env_id": "hand", "obs": [1, 2], "reward": 1, "terminated": False, "truncated": False}
MISTAKES = {
    "not JSON": (b"\x00\xff hello", "not JSON"),
    "not text": (b'{"command": "\xff"}', "not JSON"),
    "cut off": (json.dumps(STEP)[:-5].encode(), "not JSON"),
    "too deep": (b"[" * 50_000, "not JSON|does not fit"),
    "no object": (b"[1, 2]", "does not fit"),
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
        assert "'hand' is another client's" in other.hear()["error"]
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
        assert "no longer" in hand.hear()["error"]
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


# -- spaces ----------------------------------------------------------------------------------------------------


def test_spaces_are_inferred_as_float32_of_the_shapes_that_come():
    box = partial(spaces.Box, -np.inf, np.inf, dtype=np.float32)
    assert inferred([1, 2, 3]).space == box((3,))
    assert inferred(1.5).space == box(())
    nested = inferred({"b": [[1, 2]], "a": {"x": True}})
    assert nested == inferred({"a": {"x": 0}, "b": [[0.5, 0.25]]})  # whatever the order
    assert nested == Layout(spaces.Dict([("a", spaces.Dict({"x": box(())})), ("b", box((1, 2)))]))


def test_spaces_are_described_in_several_ways():
    assert (
        described(2, "action") == described(spaces.Discrete(2), "action") == described(TWO.to_json(), "action") == TWO
    )
    for odd in (True, 0, "x", None, [2], {"type": "box"}):
        with pytest.raises(UserError, match=r"action=.*Gymnasium space"):
            described(odd, "action")


def test_observations_keep_to_their_spaces():
    layout = Layout(spaces.Dict({"n": spaces.Discrete(3), "u": spaces.Box(0, 255, (2,), np.uint8)}))
    assert [leaf.tolist() for leaf in read_obs({"n": 2.0, "u": [0, 255]}, layout)] == [[2], [[0, 255]]]
    for odd in ({"n": 3, "u": [0, 1]}, {"n": 0, "u": [0, 256]}, {"n": 0.5, "u": [0, 1]}, {"n": 0}, [0, [0, 1]], 7):
        with pytest.raises(Mistake):
            read_obs(odd, layout)


_NUMBERS = st.integers() | st.floats() | st.booleans() | st.none() | st.text(max_size=3)
_VALUES = st.recursive(
    _NUMBERS, lambda v: st.lists(v, max_size=3) | st.dictionaries(st.text(max_size=2), v, max_size=3)
)


@settings(max_examples=100, deadline=None)
@given(st.dictionaries(st.sampled_from([*STEP, "action_space", "observation_space", "seeded"]), _VALUES), _VALUES)
def test_any_client_message_is_read_or_refused(more, space):
    body = json.dumps({**STEP, "obs": [1], "action_space": {"type": "box", "shape": space}, **more}).encode()
    with contextlib.suppress(Mistake):
        said = read_client_message(body)
        observation, _ = spaces_of(said, None, None)
        assert all(np.isfinite(leaf).all() for leaf in read_obs(said.obs, observation))


# -- the clients that users start from -------------------------------------------------------------------------


def test_the_python_client_plays_and_leaves():
    _play_cartpole([sys.executable, str(CLIENTS / "client.py")])


def test_the_cpp_client_compiles_and_plays(tmp_path):
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    program = str(tmp_path / "client")
    wheel = next(Path(zmq.__file__).parents[1].glob("pyzmq.libs/libzmq*.so*"), None)
    link = ["-lzmq"] if wheel is None else [f"-L{wheel.parent}", f"-l:{wheel.name}", f"-Wl,-rpath,{wheel.parent}"]
    command = [compiler, "-std=c++17", "-Wall", "-Wextra", "-Werror", str(CLIENTS / "client.cpp"), "-o", program, *link]
    built = subprocess.run(command, capture_output=True, text=True)
    if "-lzmq" in built.stderr:
        pytest.skip("no libzmq to link with")
    assert built.returncode == 0, built.stderr
    _play_cartpole([program])


def test_a_learner_starts_clients_and_ends_them():
    command = f"{sys.executable} {CLIENTS / 'client.py'} {{url}}"
    with corral.make_vec("zmq+json://127.0.0.1:0", 2, env_kwargs={"sim": command, "sims": 2}) as vec:
        launcher = vec._fleet.members[0].joined.__self__
        assert all(process.session is not None for process in launcher._processes)
        assert len(play(vec, 20)) == 2
        processes = [process.popen for process in launcher._processes]
    assert [process.returncode for process in processes] == [0, 0]


def _play_cartpole(command):
    """A client leaves after three episodes and another takes over, until the run is over; both end well."""
    url = free_url()
    dialled = url.replace("zmq+json", "tcp")
    clients = [subprocess.Popen([*command, dialled, "short", "3"])]
    try:
        with corral.make_vec(url, 1) as vec:
            clients.append(subprocess.Popen([*command, dialled]))
            (rows,) = play(vec, 300)
            first = vec.reset(11) or vec.recv().obs
            again = vec.reset(11) or vec.recv().obs
            np.testing.assert_array_equal(first, again)
        assert [client.wait(10) for client in clients] == [0, 0]
    finally:
        for client in clients:
            client.kill()
            client.wait()
    assert vec.spec.action_space == spaces.Discrete(2)
    (fault,) = [k for k, row in enumerate(rows) if row.faulty]
    assert sum(row.terminated for row in rows[:fault]) == 3
    for row in rows[:fault] + rows[fault + 1 :]:
        assert row.reward == 1
        assert row.terminated == bool(abs(row.next_obs[0]) > 2.4 or abs(row.next_obs[2]) > 0.2095)
        assert (abs(row.following) <= 0.05).all() or not row.terminated or row is rows[fault - 1]
