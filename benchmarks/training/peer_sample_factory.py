"""Sample Factory's APPO on CartPole, as a script that runs until killed and prints `steps seconds` after every batch.

Does not use Corral: Sample Factory needs older versions of Gymnasium and NumPy, so it may have a separate Python.
`python peer_sample_factory.py WORKERS ENVS_PER_WORKER`
"""

from __future__ import annotations

import importlib
import os
import sys
import time
from typing import Any

_OPTIONS = {  # its CartPole example with the default batch size and policy worker, and networks of the common size
    "env": "CartPole-v1", "algo": "APPO", "use_rnn": False, "recurrence": 1, "with_vtrace": False, "device": "cpu",
    "rollout": 32, "batch_size": 1024, "num_epochs": 1, "encoder_mlp_layers": "64 64", "reward_scale": 0.1,
    "train_for_env_steps": 10**12, "train_dir": ".", "experiment": "bench", "save_every_sec": 10**6,
    "experiment_summaries_interval": 10**6, "heartbeat_reporting_interval": 10**6, "use_env_info_cache": False,
}  # fmt: skip


def make_env(name: str, cfg: Any, env_config: Any, render_mode: str | None = None) -> Any:
    """An environment factory with Sample Factory's signature."""
    import gymnasium

    return gymnasium.make(name)


def main(workers: int, envs: int) -> None:
    """Train until killed."""
    arguments, envs_of, train, names = (
        importlib.import_module(f"sample_factory.{name}")
        for name in ("cfg.arguments", "envs.env_utils", "train", "algo.utils.misc")
    )
    reports = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # keep its log away from the reports
    envs_of.register_env("CartPole-v1", make_env)
    given = _OPTIONS | {"num_workers": workers, "num_envs_per_worker": envs}
    args = [arg for name, value in given.items() for arg in (f"--{name}", *str(value).split())]
    parser, _ = arguments.parse_sf_args(args)
    _, runner = train.make_runner(arguments.parse_full_cfg(parser, args))

    def report(runner: Any, message: dict[str, Any], policy: int) -> None:
        print(message[names.LEARNER_ENV_STEPS], time.monotonic(), file=reports)

    handlers = runner.policy_msg_handlers
    handlers[names.LEARNER_ENV_STEPS] = [*handlers[names.LEARNER_ENV_STEPS], report]
    runner.init()
    runner.run()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
