"""For testing environments and backends: known environments, contract suites, and an environment checker."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from corral.testing.envs import BigEnv, CountingEnv, FaultyEnv, LivesEnv, OneStateEnv, SlowEnv, TreeEnv

if TYPE_CHECKING:
    from corral.testing.contract import VecEnvContract
    from corral.testing.supervision import IsolationContract, SupervisionContract

__all__ = [
    "BigEnv",
    "CountingEnv",
    "FaultyEnv",
    "IsolationContract",
    "LivesEnv",
    "OneStateEnv",
    "SlowEnv",
    "SupervisionContract",
    "TreeEnv",
    "VecEnvContract",
]


def __getattr__(name: str) -> Any:
    # The suites need pytest, which users of the environments alone may not have.
    if name == "VecEnvContract":
        from corral.testing import contract

        return contract.VecEnvContract
    if name in ("SupervisionContract", "IsolationContract"):
        from corral.testing import supervision

        return getattr(supervision, name)
    raise AttributeError(f"module 'corral.testing' has no attribute {name!r}")
