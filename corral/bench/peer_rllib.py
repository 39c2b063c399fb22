"""RLlib's IMPALA on CartPole for ever, as a script that prints `steps seconds` after every iteration.

Knows nothing of Corral. `python peer_rllib.py ENV_RUNNERS ENVS_PER_RUNNER LEARNERS`; without learners of their own,
the main process learns.
"""

from __future__ import annotations

import os
import sys
import time

_ITERATION_S = 0.5


def main(runners: int, envs: int, learners: int) -> None:
    """Train until killed: its own CartPole example, with networks as everybody's here."""
    import ray
    from ray.rllib.algorithms.impala import IMPALAConfig
    from ray.rllib.connectors.env_to_module.mean_std_filter import MeanStdFilter
    from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig

    cpus = 1 + runners + learners  # what it reserves, whatever the machine has
    ray.init(num_cpus=cpus, include_dashboard=False, log_to_driver=False, _temp_dir=os.path.abspath("ray"))
    config = (
        IMPALAConfig()
        .environment("CartPole-v1")
        .env_runners(
            num_env_runners=runners,
            num_envs_per_env_runner=envs,
            env_to_module_connector=lambda env, spaces, device: MeanStdFilter(),
        )
        .learners(num_learners=learners)
        .training(
            train_batch_size_per_learner=500, lr=0.0005, vf_loss_coeff=0.05, entropy_coeff=0.0,
            grad_clip=40.0, grad_clip_by="global_norm",
        )
        .rl_module(model_config=DefaultModelConfig(vf_share_layers=True, fcnet_hiddens=[64, 64]))
        .reporting(min_time_s_per_iteration=_ITERATION_S)
    )  # fmt: skip
    algo = config.build_algo()
    while True:
        steps = algo.train().get("env_runners", {}).get("num_env_steps_sampled_lifetime")
        if steps:
            print(int(steps), time.monotonic(), flush=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
