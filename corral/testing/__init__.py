"""Testing environments and backends: known environments, contract suites, and an environment checker."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from corral.testing.envs import BigEnv, CountingEnv, FaultyEnv, IdentityEnv, LivesEnv, OneStateEnv, SlowEnv, TreeEnv

if TYPE_CHECKING:
    from corral.testing.checks.checker import CheckResult, check_env, iter_checks
    from corral.testing.contracts.states import StatesContract
    from corral.testing.contracts.store import FifoContract, ReplayContract
    from corral.testing.contracts.supervision import IsolationContract, SupervisionContract
    from corral.testing.contracts.vec_env import VecEnvContract

__all__ = ["BigEnv", "CheckResult", "CountingEnv", "FaultyEnv", "FifoContract", "IdentityEnv", "IsolationContract",
           "LivesEnv", "OneStateEnv", "ReplayContract", "SlowEnv", "StatesContract", "SupervisionContract", "TreeEnv",
           "VecEnvContract", "check_env", "iter_checks"]  # fmt: skip

# Imported on use: the suites need pytest, which may not be installed.
_LAZY = {
    "VecEnvContract": "contracts.vec_env",
    "SupervisionContract": "contracts.supervision",
    "IsolationContract": "contracts.supervision",
    "FifoContract": "contracts.store",
    "ReplayContract": "contracts.store",
    "StatesContract": "contracts.states",
    "check_env": "checks.checker",
    "iter_checks": "checks.checker",
    "CheckResult": "checks.checker",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'corral.testing' has no attribute {name!r}")
    return getattr(importlib.import_module(f"corral.testing.{_LAZY[name]}"), name)
