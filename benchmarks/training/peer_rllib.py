"""RLlib's IMPALA on CartPole, as a script that runs until killed and prints `steps seconds` when samples arrive.

Does not use Corral. `python peer_rllib.py ENV_RUNNERS ENVS_PER_RUNNER LEARNERS`; with 0 learners the main process
learns.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any

_ITERATION_S = 1.0  # the default of 10 is longer than a slice


def main(runners: int, envs: int, learners: int) -> None:
    """Train until killed: RLlib's CartPole example, with networks of the common size."""
    import ray
    import ray.rllib.algorithms.impala as impala
    from ray.rllib.connectors.env_to_module.mean_std_filter import MeanStdFilter
    from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig

    make_filter: Any = lambda env, spaces, device: MeanStdFilter()  # noqa: E731 - RLlib's own types are wrong here
    make_config: Any = impala.IMPALAConfig
    cpus = 1 + runners + learners  # what RLlib reserves, however many the machine has
    ray.init(num_cpus=cpus, include_dashboard=False, log_to_driver=False, _temp_dir=os.path.abspath("ray"))
    config = (
        make_config()
        .environment("CartPole-v1")
        .env_runners(
            num_env_runners=runners,
            num_envs_per_env_runner=envs,
            env_to_module_connector=make_filter,
        )
        .learners(num_learners=learners)
        .training(
            train_batch_size_per_learner=500, lr=0.0005, vf_loss_coeff=0.05, entropy_coeff=0.0,
            grad_clip=40.0, grad_clip_by="global_norm",
        )
        .rl_module(model_config=DefaultModelConfig(vf_share_layers=True, fcnet_hiddens=[64, 64]))
        .reporting(min_time_s_per_iteration=_ITERATION_S)
    )  # fmt: skip
    algo, before = config.build_algo(), 0
    while True:
        steps = int(algo.train().get("env_runners", {}).get("num_env_steps_sampled_lifetime", 0))
        if steps != before:  # fragments arrive in bursts, and a slice must not end within one
            print(steps, time.monotonic(), flush=True)
            before = steps


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
