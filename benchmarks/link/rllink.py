"""RLlib's link to external simulators, RLlink, as a script that does not use Corral.

`python rllink.py ENVS STEPS` is the learner: RLlib's server, which starts the simulator, a second process with RLlib's
own episodes. For each number of seconds on stdin it receives episodes and sends weights for that long, and prints the
number of rows and the seconds that they took. In RLlink the simulator selects the actions: there is no message for a
step.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from typing import Any

import gymnasium
import numpy as np

_OBSERVATION = gymnasium.spaces.Box(-1e9, 1e9, (4,), np.float32)
_ACTION = gymnasium.spaces.Discrete(2)
_CONNECT_S, _PAUSE_S = 60.0, 0.1


def learn(envs: int, steps: int) -> None:
    """Serve until stdin ends."""
    from ray.rllib.algorithms.ppo import PPOConfig
    from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig
    from ray.rllib.env.external import env_runner_server_for_external_inference as external

    say, sys.stdout = sys.stdout, sys.stderr  # RLlib prints to stdout
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    make_config: Any = PPOConfig
    config = (
        make_config()
        .environment(observation_space=_OBSERVATION, action_space=_ACTION, env_config={"port": port})
        .rl_module(model_config=DefaultModelConfig(fcnet_hiddens=[16]))
    )
    make_server: Any = external.EnvRunnerServerForExternalInference
    server = make_server(config=config, worker_index=0)
    simulator = subprocess.Popen([sys.executable, __file__, "simulate", str(port), str(envs), str(steps)])
    try:
        version = 0
        for line in sys.stdin:
            rows, start = 0, time.perf_counter()
            while time.perf_counter() - start < float(line) or not rows:
                rows += sum(map(len, server.sample()))
                version += 1
                server.set_state({"rl_module": server.module.get_state(), "weights_seq_no": version})
            print(rows, time.perf_counter() - start, file=say, flush=True)
    finally:
        simulator.kill()
        os._exit(0)  # its thread waits for messages forever


def simulate(port: int, envs: int, steps: int) -> None:
    """Send episodes and wait for weights, forever."""
    from ray.rllib.env.external import rllink
    from ray.rllib.env.single_agent_episode import SingleAgentEpisode

    send: Any = rllink.send_rllink_message
    get: Any = rllink.get_rllink_message
    sock = _connect(port)
    send(sock, {"type": "PING"})
    get(sock)
    obs, count = np.zeros(4, np.float32), 0
    extras = {"action_logp": -0.69, "action_dist_inputs": np.zeros(2, np.float32)}
    episodes: list[Any] = [
        SingleAgentEpisode(observation_space=_OBSERVATION, action_space=_ACTION) for _ in range(envs)
    ]
    for episode in episodes:
        episode.add_env_reset(obs)
    while True:
        for _ in range(steps):
            count += 1
            for episode in episodes:
                obs = np.full(4, count, np.float32)
                episode.add_env_step(obs, count % 2, 1.0, extra_model_outputs=extras)
        done, episodes = episodes, [episode.cut() for episode in episodes]
        states = [episode.get_state() for episode in done]
        send(sock, {"type": "EPISODES_AND_GET_STATE", "episodes": states, "timesteps": envs * steps})
        get(sock)


def _connect(port: int) -> socket.socket:
    until = time.monotonic() + _CONNECT_S
    while True:
        try:
            return socket.create_connection(("localhost", port))
        except OSError:
            if time.monotonic() > until:
                raise
            time.sleep(_PAUSE_S)


if __name__ == "__main__":
    if sys.argv[1] == "simulate":
        simulate(*map(int, sys.argv[2:]))
    else:
        learn(*map(int, sys.argv[1:]))
