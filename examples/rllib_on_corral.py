"""RLlib's PPO on an environment that Corral runs: one call registers it. Needs `pip install 'corral-rl[rllib]'`."""

import importlib.util
import sys

if importlib.util.find_spec("ray") is None or importlib.util.find_spec("tree") is None:
    print("skipped: RLlib is not installed (pip install 'corral-rl[rllib]')")
    sys.exit()

from ray.rllib.algorithms.ppo import PPOConfig

from corral.envs.rllib import register
from corral.runtimes import ray_cluster


def main() -> None:
    ray_cluster.connect()  # RAY_ADDRESS, or this machine
    register("corral-cartpole", "CartPole-v1")
    config = (
        PPOConfig()
        .environment("corral-cartpole")
        # 0 runners: in this process. Others run on any Ray node, each with its own environments.
        .env_runners(num_env_runners=0, num_envs_per_env_runner=4, gym_env_vectorize_mode="vector_entry_point")
        .training(train_batch_size_per_learner=500, minibatch_size=125, num_epochs=4)
        .debugging(log_level="ERROR")
    )
    algo = config.build_algo()
    for iteration in range(3):
        result = algo.train()["env_runners"]
        print(f"iteration {iteration}: mean return {result['episode_return_mean']:.1f}")
    algo.stop()


if __name__ == "__main__":
    main()
