"""Policies: a plain function of observations, or an object with state."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np

from corral.core.errors import UserError
from corral.core.types import Array, Tree, tree_map

if TYPE_CHECKING:
    from corral.envs.vec_env import VecEnv


@runtime_checkable
class Policy(Protocol):
    """Acts for `n` environments at once, with explicit state.

    Observations and states are NumPy trees with a leading `n`; actions, states and extras may be NumPy or torch. `n`
    varies between calls, with the environments that are ready.
    """

    def initial_state(self, n: int) -> Tree:
        """State of `n` environments before their first observation; None for a stateless policy."""

    def act(self, obs: Tree, state: Tree, first: Array) -> tuple[Tree, Tree, dict[str, Any]]:
        """Actions, new states, and extras to record; where `first` is true the state belongs to an old episode."""


@dataclass(frozen=True)
class ActContext:
    """Training progress, weight version and reward scale, for policies that need them."""

    progress: float = 0.0
    """Fraction of the run's steps that are done, 0 to 1."""
    version: int = 0
    """Weight updates so far; stored in trajectories."""
    reward_scale: float | None = 1.0
    """Scale of the rewards used for learning relative to the unscaled ones; None if unknown."""


@runtime_checkable
class ContextPolicy(Policy, Protocol):
    """A policy that follows schedules, or needs the scale of rewards."""

    def set_context(self, ctx: ActContext) -> None:
        """Use this context from now on; called between rollouts."""


def set_context(policy: Policy, ctx: ActContext) -> None:
    """Pass the context to a policy that uses it."""
    if isinstance(policy, ContextPolicy):
        policy.set_context(ctx)


@runtime_checkable
class PlanningPolicy(ContextPolicy, Protocol):
    """A policy that plans from the current states of environments, and so needs access to them.

    Its state identifies them: `initial_state(n)` contains the numbers 0 to n - 1, and may contain more.
    """

    @property
    def simulator_steps(self) -> int:
        """Simulator steps used for planning so far."""

    def bind_envs(self, vec: VecEnv) -> None:
        """Act for these environments from now on."""


def bind_envs(policy: Policy, vec: VecEnv) -> None:
    """Pass the environments to a policy that plans."""
    if isinstance(policy, PlanningPolicy):
        policy.bind_envs(vec)


def simulator_steps(policy: Policy) -> int | None:
    """Simulator steps used for planning so far; None for policies that do not plan."""
    return policy.simulator_steps if isinstance(policy, PlanningPolicy) else None


class FunctionPolicy:
    """A plain function `actions = fn(observations)` as a Policy."""

    def __init__(self, fn: Callable[[Tree], Tree]):
        self._fn = fn

    def initial_state(self, n: int) -> Tree:
        return None

    def act(self, obs: Tree, state: Tree, first: Array) -> tuple[Tree, Tree, dict[str, Any]]:
        return self._fn(obs), None, {}


def as_policy(policy: Policy | Callable[[Tree], Tree]) -> Policy:
    """Return a Policy unchanged, and wrap a function."""
    if isinstance(policy, Policy):
        return policy
    if callable(policy):
        return FunctionPolicy(policy)
    raise UserError(f"{policy!r} is not a policy: pass a function of the observations, or an object with "
                    "initial_state(n) and act(obs, state, first).")  # fmt: skip


def to_numpy(tree: Tree) -> Tree:
    """Torch tensors as arrays, arrays unchanged, without importing torch."""
    return tree_map(_leaf_to_numpy, tree)


def _leaf_to_numpy(leaf: Any) -> Any:
    if leaf is None:
        return None
    return leaf.detach().cpu().numpy() if hasattr(leaf, "detach") else np.asarray(leaf)
