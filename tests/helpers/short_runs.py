"""Runs of seconds, without a run directory."""

from corral.config.experiment import Experiment
from corral.envs.make import make_vec
from corral.runs.evaluation.evaluate import evaluate_policy
from corral.topologies.sync import Sync

ENVS = "corral.testing.envs"


def learn(algo, env, steps, seed=0, on_rollout=lambda traj: None, **settings):
    """Train in this process; the trainer, whose environments are closed."""
    settings = {"steps": steps, "seed": seed, "num_envs": 8, "backend": "local", "device": "cpu"} | settings
    experiment = Experiment.make(algo, env, preset="none", overrides=settings)
    trainer = Sync(experiment, lambda kind, text: None, on_rollout=on_rollout)
    try:
        while trainer.env_steps < steps:
            trainer.advance()
    finally:
        trainer.close()
    return trainer


def score(trainer, episodes=8):
    """Mean return of the deterministic policy."""
    env, kwargs = trainer.experiment.environment()
    with make_vec(env, episodes, "local", seed=1, env_kwargs=kwargs, role="eval") as vec:
        return evaluate_policy(vec, trainer.eval_policy(deterministic=True, seed=0), episodes, 1).mean
