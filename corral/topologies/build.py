"""The parts that every topology is made of, from an experiment."""

from __future__ import annotations

import torch

from corral.algos.base import Algorithm
from corral.algos.registry import find_algorithm
from corral.config.experiment import Experiment
from corral.core import seeding
from corral.core.types import EnvSpec
from corral.envs.backends.simulators.options import is_url, share_simulators
from corral.envs.make import make_vec
from corral.envs.normalize import NormalizedVecEnv
from corral.envs.vec_env import VecEnv
from corral.learn.device import lay_out


def make_algorithm(experiment: Experiment, spec: EnvSpec) -> Algorithm:
    """The experiment's algorithm, for environments that look like `spec`."""
    algo: Algorithm = find_algorithm(experiment.algo).load()(experiment.algorithm, spec, experiment.total_envs)
    return algo


def build_model(algo: Algorithm, seed: int, device: torch.device) -> torch.nn.Module:
    """The algorithm's network with weights drawn from the run's seed, whatever else draws random numbers."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # LAPACK's rounding, and with it orthogonal weights, depends on the number of threads
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seeding.part_seed(seed, "train", "network"))
            model = algo.build_model()
    finally:
        torch.set_num_threads(threads)
    model = model.to(device)
    lay_out(model)
    return model


def make_train_vec(
    experiment: Experiment, num_envs: int, seed: int, backend: str, workers: int | None, cores: int | None = None
) -> VecEnv:
    """Environments to learn from, which may keep this many cores busy."""
    env, kwargs = experiment.environment()
    if is_url(env):  # simulators run where they are, whatever the topology thinks of workers
        backend, workers = "auto", experiment.workers
        one_vec = experiment.topology in ("sync", "central_inference")
        kwargs = share_simulators(kwargs, 1 if one_vec else experiment.num_actors)
    vec = make_vec(env, num_envs, backend, workers, seed, env_kwargs=kwargs, listen=experiment.listen, cores=cores)
    if experiment.normalize_reward:
        return NormalizedVecEnv(vec, obs=False, gamma=getattr(experiment.algorithm, "gamma", 0.99))
    return vec
