"""One client by hand: the loop word by word, and clients that leave, restart or come late."""

import signal
import subprocess
import sys
import time
from functools import partial

import numpy as np
import pytest
from gymnasium import spaces
from helpers.json_clients import Hand, act, url_of, vec_of

from corral.core.spaces import Layout
from corral.testing import CountingEnv
from corral.testing.contracts.vec_env import ID, LIFE, T


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
    sockets = fleet.binding._sockets
    ghosts = [Hand(context, fleet, name) for name in "abc"]
    for ghost in ghosts:
        ghost.reset(0, 7)
    until = time.monotonic() + 5
    while len(sockets._by_fd) < 3 and time.monotonic() < until:
        sockets._watch(sockets._router, [])
    for ghost in ghosts:
        ghost.leave()
    while sockets._by_fd and time.monotonic() < until:
        sockets._watch(sockets._router, [])
    hand = Hand(context, fleet, "a")  # likely with the descriptor of one of them
    hand.reset(0, 8)
    with vec_of(fleet, 1) as vec:
        while len(fleet.sessions) != 1 and time.monotonic() < until:
            fleet.poll(0.01)
        assert vec.recv().obs.tolist() == [[0, 8]]
        hand.leave()
