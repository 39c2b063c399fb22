"""A simulator that drives the loop, for `corral.make_vec("zmq+json://127.0.0.1:5555")`: CartPole in 20 lines.

    python client.py tcp://127.0.0.1:5555 [env_id] [episodes]

Needs pyzmq and gymnasium, not Corral. What the messages say is in docs/json_loop.md.
"""

import os
import sys

import gymnasium
import zmq

URL = (sys.argv[1] if len(sys.argv) > 1 else "tcp://127.0.0.1:5555").replace("zmq+json://", "tcp://")
ENV_ID = sys.argv[2] if len(sys.argv) > 2 else f"cartpole-{os.getpid()}"
EPISODES = int(sys.argv[3]) if len(sys.argv) > 3 else 0  # then leave; 0: stay until the run is over
INSTANCE = os.environ.get("CORRAL_INSTANCE", "")  # tells a learner that has started this process which one it is
PATIENCE_MS = 600_000  # a learner that is gone does not answer


def main() -> None:
    """Play until the learner says that the run is over."""
    socket = zmq.Context().socket(zmq.REQ)
    socket.setsockopt(zmq.RCVTIMEO, PATIENCE_MS)
    socket.setsockopt(zmq.LINGER, 0)
    socket.connect(URL)
    env = gymnasium.make("CartPole-v1")

    def first(seed: int | None = None) -> dict:
        about = {"seeded": True, "action_space": 2, "instance": INSTANCE}
        return {"command": "reset", "obs": env.reset(seed=seed)[0].tolist(), **about}

    message, ended = first(), 0
    while True:
        socket.send_json({"env_id": ENV_ID, **message})
        answer = socket.recv_json()
        if "error" in answer:
            sys.exit(answer["error"])
        if answer.get("terminate") or message["command"] == "terminate":
            return
        if answer.get("reset"):
            message = first(answer["seed"])
        elif answer["action"] is not None:
            obs, reward, terminated, truncated, _ = env.step(answer["action"])
            ended += terminated or truncated
            message = {"command": "step", "obs": obs.tolist(), "reward": reward}
            message |= {"terminated": terminated, "truncated": truncated}
        else:  # the episode has ended
            message = {"command": "terminate"} if 0 < EPISODES <= ended else first()


if __name__ == "__main__":
    main()
