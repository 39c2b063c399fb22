"""Corral: reinforcement learning on any simulator, from one process to a cluster.

The public names are loaded when first used, so `import corral` costs milliseconds and pulls in
neither torch nor Ray.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from corral import messages as _messages

__version__ = "0.1.0"

_PUBLIC = {
    "train": "corral.training",
    "resume": "corral.training",
    "load_policy": "corral.runs.load",
    "Experiment": "corral.experiment",
    "RunFailed": "corral.errors",
    "make_vec": "corral.envs.make",
    "Sampler": "corral.acting.sampler",
    "Search": "corral.planning.search_policy",
    "Policy": "corral.acting.policy",
    "Supervision": "corral.envs.supervise",
    "StepBatch": "corral.types",
    "Trajectory": "corral.types",
    "EnvSpec": "corral.types",
    "UserError": "corral.errors",
    "EnvFailed": "corral.errors",
    "Snapshots": "corral.planning.snapshot",
    "envs": "corral.envs",
    "spaces": "corral.spaces",
    "testing": "corral.testing",
}

__all__ = ["EnvFailed", "EnvSpec", "Experiment", "Policy", "RunFailed", "Sampler", "Search", "Snapshots",
           "StepBatch", "Supervision", "Trajectory", "UserError", "__version__", "envs", "load_policy", "make_vec",
           "resume", "spaces", "testing", "train"]  # fmt: skip

if TYPE_CHECKING:
    from corral import envs, spaces, testing
    from corral.acting.policy import Policy
    from corral.acting.sampler import Sampler
    from corral.envs.make import make_vec
    from corral.envs.supervise import Supervision
    from corral.errors import EnvFailed, RunFailed, UserError
    from corral.experiment import Experiment
    from corral.planning.search_policy import Search
    from corral.planning.snapshot import Snapshots
    from corral.runs.load import load_policy
    from corral.training import resume, train
    from corral.types import EnvSpec, StepBatch, Trajectory


_messages.show_by_default()


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'corral' has no attribute {name!r}")
    module = importlib.import_module(_PUBLIC[name])
    value = module if _PUBLIC[name] == f"corral.{name}" else getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
