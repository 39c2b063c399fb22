"""JSON clients in threads and by hand."""

import json
import socket as sockets
import threading
import time

import numpy as np
import zmq
from gymnasium import spaces

from corral.core.spaces import Layout
from corral.envs.backends.simulators.vec_env import LinkVecEnv
from corral.envs.supervision import Supervision
from corral.link.address import parse_url

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


def act(vec, *actions):
    vec.send(np.arange(len(actions)), np.array(actions))


STEP = {"command": "step", "env_id": "hand", "obs": [1, 2], "reward": 1, "terminated": False, "truncated": False}
