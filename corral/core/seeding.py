"""One tree of seeds: run -> role -> worker, environment or component -> episode.

A node's seed is drawn from `SeedSequence(run_seed, spawn_key=path)`, so two runs share no seed (unlike `seed + i`), and
an environment's seed does not depend on the number of workers.
"""

from __future__ import annotations

import numpy as np

ROLES = {"train": 0, "eval": 1}
_ENV, _WORKER, _COMPONENT = 0, 1, 2
COMPONENTS = {"network": 0, "acting": 1, "learning": 2, "store": 3, "actor": 4, "report": 5, "spaces": 6, "restart": 7}
# EnvPool and ALE take 32-bit signed seeds, so every seed stays below 2**31.
_MASK = 0x7FFF_FFFF


def _draw(run_seed: int, *path: int) -> int:
    return int(np.random.SeedSequence(run_seed, spawn_key=path).generate_state(1)[0]) & _MASK


def env_seed(run_seed: int, role: str, env_id: int, episode: int = 0, attempt: int = 0) -> int:
    """Seed of an environment built (or rebuilt after a fault) for `episode`; `attempt` counts failed rebuilds."""
    return _draw(run_seed, ROLES[role], _ENV, env_id, episode, *([attempt] if attempt else []))


def env_seeds(run_seed: int, role: str, num_envs: int) -> list[int]:
    """Seeds of the first episode of every environment."""
    return [env_seed(run_seed, role, i) for i in range(num_envs)]


def worker_seed(run_seed: int, role: str, worker: int, start: int = 0) -> int:
    """Seed of the global RNGs (`random`, `numpy.random`) of a worker's `start`-th process."""
    return _draw(run_seed, ROLES[role], _WORKER, worker, start)


def component_seed(run_seed: int, role: str, part: str, index: int = 0, start: int = 0) -> int:
    """Seed of a component of the run, such as the actions of actor `index`; `start` counts its restarts."""
    return _draw(run_seed, ROLES[role], _COMPONENT, COMPONENTS[part], index, *([start] if start else []))
