"""The planner: searches from the current states of environments."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from corral.acting.policy import Policy
from corral.core.errors import UserError
from corral.core.types import Array
from corral.planning.action_set import ActionSet, Samples
from corral.planning.mcts.evaluation import Evaluate, RolloutEvaluation
from corral.planning.mcts.gumbel import Gumbel
from corral.planning.mcts.root import draw_gumbel, gumbel_winner, improved_policy, mix_noise, root_values, visit_policy
from corral.planning.mcts.search import TreeSearch
from corral.planning.mcts.selection import ChanceNodes, Puct
from corral.snapshot.states import States

_VALUE_RESOLUTION = 0.05  # in single-player environments


@dataclass(frozen=True)
class SearchConfig:
    """Settings of a tree search."""

    root_selection: Literal["gumbel", "puct"] = "gumbel"
    """gumbel: sequential halving, sound from 2 simulations on; puct: visit counts, with Dirichlet noise."""
    leaves_in_flight: int = 4
    """Simulations of a tree that run at once; 1 is the sequential search."""
    num_sampled_actions: int = 16
    """Sampled actions of a node, where the action space is continuous or too large to enumerate."""
    progressive_widening: bool = False
    """With puct: start nodes with few sampled actions and add more with their visits. Has no effect where actions are
    enumerated."""
    max_num_considered_actions: int = 16
    """With gumbel: maximum number of actions considered at the root."""
    c_visit: float = 50.0
    """With gumbel: offset of the visit count in the weight of values."""
    c_scale: float = 0.1
    """With gumbel: weight of values relative to priors."""
    value_resolution: float | None = None
    """With gumbel: differences of values below this fraction of their size are scaled down, because they are as likely
    errors of the critic; in two-player games, a fraction of a win. 0: never, as published; none: 0.05, and 1 in
    two-player games."""
    c_init: float = 1.25
    """With puct: weight of priors relative to values."""
    dirichlet_alpha: float = 0.3
    """With puct: concentration of the Dirichlet noise in the root's priors."""
    dirichlet_fraction: float = 0.25
    """With puct: fraction of the noise in the root's priors."""
    reuse_tree: bool = False
    """Start a search from the subtree below the action that was taken, where it is known."""
    memory_mb: float = 1024.0
    """Maximum memory for saved states."""

    def __post_init__(self) -> None:
        for name, least in (("leaves_in_flight", 1), ("max_num_considered_actions", 1), ("num_sampled_actions", 2)):
            given = getattr(self, name)
            if not isinstance(given, (int, np.integer)) or given < least:
                raise UserError(f"{name} must be a whole number of at least {least}, got {given!r}.")
        if not self.memory_mb > 0:
            raise UserError(f"memory_mb must be above 0, got {self.memory_mb}.")
        if self.root_selection not in ("gumbel", "puct"):
            raise UserError(f"root_selection={self.root_selection!r} is not one of gumbel, puct.")
        if self.progressive_widening and self.root_selection != "puct":
            raise UserError("progressive_widening needs root_selection=puct: gumbel samples all actions at once.")
        if not 0 <= self.dirichlet_fraction <= 1 or not 0 < self.dirichlet_alpha < np.inf:
            raise UserError("dirichlet_fraction must be between 0 and 1, and dirichlet_alpha above 0.")
        for name in ("c_visit", "c_scale", "c_init", "value_resolution"):  # below 0 a search would prefer worse actions
            given = getattr(self, name)
            if given is not None and not 0 <= given < np.inf:
                raise UserError(f"{name} must be a number of at least 0, got {given}.")


def require_sims(sims: int) -> None:
    """UserError unless this number of simulations is allowed."""
    if not isinstance(sims, (int, np.integer)) or isinstance(sims, bool):
        raise UserError(f"A search makes a whole number of simulations, such as 50, got sims={sims!r}.")
    if sims < 1:
        raise UserError(f"A search needs at least 1 simulation, got {sims}: raise sims, or play without search.")


@dataclass
class Plan:
    """Results of searches, one row per environment."""

    policy: Array  # [n, edges] float64, the improved policy
    visits: Array  # [n, edges] int32
    values: Array  # [n] float64, of the roots
    best: Array  # [n] the best edges
    legal: Array  # [n, edges] bool, which edges exist
    actions: Array | None  # [n, edges, D] sampled actions of the edges, if any

    def stand_for(self, edges: Array) -> Array:
        """One edge per row, in the form that the action set takes."""
        return edges if self.actions is None else self.actions[np.arange(len(edges)), edges]


class Planner:
    """One search tree per environment of `states`, with up to `sims` simulations per search."""

    def __init__(
        self,
        states: States,
        actions: ActionSet,
        evaluate: Evaluate,
        config: SearchConfig,
        num_envs: int,
        sims: int,
        *,
        discount: float,
        rng: np.random.Generator,
    ):
        require_sims(sims)
        self.states, self.actions, self.config, self.sims, self._rng = states, actions, config, sims, rng
        self.search = TreeSearch(
            states, evaluate, num_envs, actions.width, sims, config.leaves_in_flight, discount,
            keep=sims if config.reuse_tree else 0, chance=ChanceNodes(k=1.0), to_env=actions.to_env, rng=rng,
        )  # fmt: skip
        self._taken = np.full(num_envs, -1)  # edges
        self._widen_k = float(
            config.progressive_widening and isinstance(actions, Samples)
        )  # enumerated actions have an order

    @property
    def simulator_steps(self) -> int:
        """Environment steps of all searches so far, including rollouts from leaves."""
        return self.search.steps + int(getattr(self.search.evaluate, "steps", 0))

    def plan(
        self, env_ids: Array, first: Array, sims: int | None = None, noise: float = 0.0, roots: Array | None = None,
        reward_scale: float = 1.0,
    ) -> Plan:  # fmt: skip
        """Search from the current states of these environments; `first` marks the start of an episode.

        `noise` scales the noise at the roots: 0 plays best, 1 explores. `roots` are states already saved, now the
        planner's.
        """
        config, search, rng = self.config, self.search, self._rng
        sims = self.sims if sims is None else sims
        roots = self.states.save(env_ids) if roots is None else roots
        fresh = np.ones(len(env_ids), np.bool_)
        if config.reuse_tree:
            fresh = ~search.reuse(env_ids, np.where(first, -1, self._taken[env_ids]), roots)
        if fresh.any():
            search.plant(env_ids[fresh], roots[fresh])
        forest = search.forest
        legal = forest.prior[env_ids, 0] >= 0
        if config.root_selection == "gumbel":
            gumbel = self._draw(env_ids, sims, noise)
            search.grow(env_ids, gumbel, sims, reward_scale)
            policy, best = improved_policy(forest, env_ids, gumbel), gumbel_winner(forest, env_ids, gumbel)
        else:
            if noise > 0:
                mix_noise(forest, env_ids, config.dirichlet_alpha, noise * config.dirichlet_fraction, rng)
            search.grow(env_ids, Puct(config.c_init, widen_k=self._widen_k), sims, reward_scale)
            policy = visit_policy(forest, env_ids, 1.0)
            best = policy.argmax(1)
        self._taken[env_ids] = best
        drawn = None if search.actions is None else search.actions[env_ids, 0]
        return Plan(policy, forest.n[env_ids, 0], root_values(forest, env_ids), best, legal, drawn)

    def took(self, env_ids: Array, edges: Array) -> None:
        """Report actions other than the best; -1: one without an edge."""
        self._taken[env_ids] = edges

    def _draw(self, env_ids: Array, sims: int, noise: float) -> Gumbel:
        config = self.config
        drawn = draw_gumbel(self.search.forest, env_ids, config.max_num_considered_actions, sims, noise, self._rng)
        two = self.states.players > 1
        resolution = config.value_resolution
        if resolution is None:
            resolution = 1.0 if two else _VALUE_RESOLUTION
        share, least = (0.0, resolution) if two else (resolution, 0.0)
        return drawn._replace(c_visit=config.c_visit, c_scale=config.c_scale, grain=share, least=least)


def make_evaluation(
    policy: Any, states: States, actions: ActionSet, rollout_steps: int, discount: float, rng: np.random.Generator
) -> Evaluate:
    """The leaf evaluation for `policy`.

    `policy` is a network with policy and value, or the result of `corral.load_policy`; a `Policy` for rollouts of
    `rollout_steps`; None for random rollouts; or a function `logits, values = fn(observations)`.
    """
    model = getattr(policy, "model", policy)
    if hasattr(model, "policy_head"):
        from corral.planning.mcts.network import NetworkEvaluation

        return NetworkEvaluation(model, actions, rng)
    if policy is None or isinstance(policy, Policy):
        return RolloutEvaluation(states, actions, rollout_steps, discount, rng, policy)
    if model is not policy:
        raise UserError(
            f"A search asks a policy for probabilities and values, and {type(model).__name__} has none: take one that "
            "ppo, a2c, impala or alphazero have trained."
        )
    if callable(policy) and not inspect.isclass(policy):
        from corral.planning.mcts.network import FunctionEvaluation

        return FunctionEvaluation(policy, actions, rng)
    raise UserError(
        f"{policy!r} cannot judge states: pass what corral.load_policy gives, a function that returns (logits, values),"
        " a Policy to act on with, or None to act at random."
    )


def known_scale(scale: float | None) -> float:
    """The reward scale; UserError if it is unknown."""
    if scale is None:
        raise UserError(
            "The rewards that this policy has learned from were scaled, and by how much was not saved: its values say "
            "nothing to a search. Train it with topology=sync, or with normalize_reward=false."
        )
    return scale
