"""Corral: reinforcement learning on any simulator, from one process to a cluster.

The public names are loaded when first used, so `import corral` costs milliseconds and pulls in
neither torch nor Ray.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import TYPE_CHECKING, Any

from corral.core import log as _messages

__version__ = "0.1.0"

_PUBLIC = {
    "train": "corral.runs.train",
    "resume": "corral.runs.train",
    "load_policy": "corral.runs.load",
    "evaluate": "corral.runs.evaluation.evaluate",
    "record": "corral.runs.views.video",
    "plot": "corral.runs.views.plot",
    "trust": "corral.runs.load",
    "Callback": "corral.runs.callbacks.base",
    "MetricSink": "corral.runs.sinks.base",
    "Experiment": "corral.config.experiment",
    "RunFailed": "corral.core.errors",
    "make_vec": "corral.envs.make",
    "Sampler": "corral.acting.sampler",
    "Search": "corral.planning.search_policy",
    "Policy": "corral.acting.policy",
    "Supervision": "corral.envs.supervision",
    "StepBatch": "corral.core.types",
    "Trajectory": "corral.core.types",
    "EnvSpec": "corral.core.types",
    "UserError": "corral.core.errors",
    "EnvFailed": "corral.core.errors",
    "Snapshots": "corral.planning.snapshots",
    "envs": "corral.envs",
    "spaces": "corral.core.spaces",
    "testing": "corral.testing",
}

_MODULES = {"envs", "spaces", "testing"}

__all__ = ["Callback", "EnvFailed", "EnvSpec", "Experiment", "MetricSink", "Policy", "RunFailed", "Sampler", "Search",
           "Snapshots", "StepBatch", "Supervision", "Trajectory", "UserError", "__version__", "envs", "evaluate",
           "load_policy", "make_vec", "plot", "record", "resume", "spaces", "testing", "train",
           "trust"]  # fmt: skip

if TYPE_CHECKING:
    from corral import envs, testing
    from corral.acting.policy import Policy
    from corral.acting.sampler import Sampler
    from corral.config.experiment import Experiment
    from corral.core import spaces
    from corral.core.errors import EnvFailed, RunFailed, UserError
    from corral.core.types import EnvSpec, StepBatch, Trajectory
    from corral.envs.make import make_vec
    from corral.envs.supervision import Supervision
    from corral.planning.search_policy import Search
    from corral.planning.snapshots import Snapshots
    from corral.runs.callbacks.base import Callback
    from corral.runs.evaluation.evaluate import evaluate
    from corral.runs.load import load_policy, trust
    from corral.runs.sinks.base import MetricSink
    from corral.runs.train import resume, train
    from corral.runs.views.plot import plot
    from corral.runs.views.video import record


_messages.show_by_default()
if "torch" not in sys.modules:  # OpenMP reads it once: threads that wait for work sleep, instead of taking a core
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'corral' has no attribute {name!r}")
    module = importlib.import_module(_PUBLIC[name])
    value = module if name in _MODULES else getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
