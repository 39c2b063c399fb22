"""What decides: a plain function of the observations, or an object with memory."""

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

    Observations and states arrive as NumPy trees with a leading `n`; actions, states and extras may be NumPy
    or torch. `n` varies: an environment's rows come in whatever company is ready.
    """

    def initial_state(self, n: int) -> Tree:
        """State of `n` environments before their first observation; None where there is none."""

    def act(self, obs: Tree, state: Tree, first: Array) -> tuple[Tree, Tree, dict[str, Any]]:
        """Actions, new states, and extras to record; where `first` is true the state belongs to an old episode."""


@dataclass(frozen=True)
class ActContext:
    """What acting may depend on besides observations."""

    progress: float = 0.0
    """Share of the run's steps that are done, 0 to 1."""
    version: int = 0
    """Updates of the weights so far; stamped on trajectories."""
    reward_scale: float | None = 1.0
    """What the rewards that values were learned from are of the unscaled ones; None where that is not known."""


@runtime_checkable
class ContextPolicy(Policy, Protocol):
    """A policy that follows schedules, or needs to know the scale of rewards."""

    def set_context(self, ctx: ActContext) -> None:
        """Act by this from now on; called between rollouts."""


def set_context(policy: Policy, ctx: ActContext) -> None:
    """Tell a policy that wants to know it how far the run is."""
    if isinstance(policy, ContextPolicy):
        policy.set_context(ctx)


@runtime_checkable
class PlanningPolicy(ContextPolicy, Protocol):
    """A policy that looks ahead from the states that environments are in, so it has to know the environments.

    Its state names them: `initial_state(n)` are the numbers 0 to n - 1, with whatever else it remembers.
    """

    @property
    def simulator_steps(self) -> int:
        """Steps of simulators that planning has cost so far."""

    def bind_envs(self, vec: VecEnv) -> None:
        """From now on it acts for these environments."""


def bind_envs(policy: Policy, vec: VecEnv) -> None:
    """Tell a policy that plans which environments it is going to act for."""
    if isinstance(policy, PlanningPolicy):
        policy.bind_envs(vec)


def simulator_steps(policy: Policy) -> int | None:
    """Steps of simulators that planning has cost so far; None of policies that do not plan."""
    return policy.simulator_steps if isinstance(policy, PlanningPolicy) else None


class FunctionPolicy:
    """A plain function `actions = fn(observations)` as a Policy."""

    def __init__(self, fn: Callable[[Tree], Tree]):
        self._fn = fn

    def initial_state(self, n: int) -> Tree:
        """No state."""
        return None

    def act(self, obs: Tree, state: Tree, first: Array) -> tuple[Tree, Tree, dict[str, Any]]:
        """Call the function."""
        return self._fn(obs), None, {}


def as_policy(policy: Policy | Callable[[Tree], Tree]) -> Policy:
    """Take a Policy as it is, and wrap a function."""
    if isinstance(policy, Policy):
        return policy
    if callable(policy):
        return FunctionPolicy(policy)
    raise UserError(f"{policy!r} is not a policy: pass a function of the observations, or an object with "
                    "initial_state(n) and act(obs, state, first).")  # fmt: skip


def to_numpy(tree: Tree) -> Tree:
    """Torch tensors as arrays, arrays as they are, without importing torch."""
    return tree_map(_leaf_to_numpy, tree)


def _leaf_to_numpy(leaf: Any) -> Any:
    if leaf is None:
        return None
    return leaf.detach().cpu().numpy() if hasattr(leaf, "detach") else np.asarray(leaf)
