"""Swing a pendulum up without training anything: MPPI simulates plans from the environment's current state."""

import corral
from corral.planning.shooting import Mppi

with corral.make_vec("Pendulum-v1", num_envs=1, backend="local") as vec:
    policy = Mppi(horizon=15, samples=16)  # 16 plans of 15 steps for every action
    policy.bind_envs(vec)
    batch, state, total = vec.recv(), policy.initial_state(1), 0.0
    while True:
        action, state, _ = policy.act(batch.obs, state, batch.first)
        vec.send(batch.env_ids, action)
        batch = vec.recv()
        total += float(batch.reward[0])
        if batch.truncated[0]:
            break
    print(f"return {total:.0f}; a random policy gets about -1200")
