"""The planner: searches from the current states of environments."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import numpy as np

from corral.acting.policy import Policy
from corral.core.errors import UserError
from corral.core.types import Array
from corral.planning.action_set import ActionSet, Samples
from corral.planning.config import SearchConfig, require_sims
from corral.planning.mcts import root
from corral.planning.mcts.evaluation import Evaluate, RolloutEvaluation
from corral.planning.mcts.gumbel import Gumbel
from corral.planning.mcts.search import TreeSearch
from corral.planning.mcts.selection import Puct
from corral.snapshot.states import States

_VALUE_RESOLUTION = 0.05  # in single-player environments


@dataclass
class Plan:
    """Results of searches, one row per environment."""

    policy: Array  # [n, edges] float64, the improved policy
    visits: Array  # [n, edges] int32
    values: Array  # [n] float64, of the roots, for the player to move
    best: Array  # [n] the best edges
    legal: Array  # [n, edges] bool, which edges exist
    actions: Array | None  # [n, edges, D] sampled actions of the edges, if any

    def to_action_rows(self, edges: Array) -> Array:
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
            keep=sims if config.reuse_tree else 0, to_env=actions.to_env, rng=rng,
        )  # fmt: skip
        self._taken = np.full(num_envs, -1)  # edges
        # Enumerated actions are not widened: their order is not random.
        self._widen_k = float(config.progressive_widening and isinstance(actions, Samples))

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
            policy, values, best = root.gumbel_result(forest, env_ids, gumbel)
        else:
            if noise > 0:
                root.mix_noise(forest, env_ids, config.dirichlet_alpha, noise * config.dirichlet_fraction, rng)
            search.grow(env_ids, Puct(config.c_init, widen_k=self._widen_k), sims, reward_scale)
            policy, values = root.visit_policy(forest, env_ids), root.root_values(forest, env_ids)
            best = policy.argmax(1)
        self._taken[env_ids] = best
        drawn = None if search.actions is None else search.actions[env_ids, 0]
        return Plan(policy, forest.n[env_ids, 0], values, best, legal, drawn)

    def set_taken(self, env_ids: Array, edges: Array) -> None:
        """Set the actions actually taken, for tree reuse; -1 if the action has no edge."""
        self._taken[env_ids] = edges

    def _draw(self, env_ids: Array, sims: int, noise: float) -> Gumbel:
        config = self.config
        drawn = root.draw_gumbel(self.search.forest, env_ids, config.max_num_considered_actions, sims, noise, self._rng)
        two = self.states.players > 1
        resolution = config.value_resolution
        if resolution is None:
            resolution = 1.0 if two else _VALUE_RESOLUTION
        grain, least = (0.0, resolution) if two else (resolution, 0.0)
        return drawn._replace(c_visit=config.c_visit, c_scale=config.c_scale, grain=grain, least=least)


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
            f"A search needs a policy with action probabilities and a value function, and {type(model).__name__} has "
            "neither: use one trained by ppo, a2c, impala or alphazero."
        )
    if callable(policy) and not inspect.isclass(policy):
        from corral.planning.mcts.network import FunctionEvaluation

        return FunctionEvaluation(policy, actions, rng)
    raise UserError(
        f"{policy!r} cannot evaluate states: pass the result of corral.load_policy, a function that returns (logits, "
        "values), a Policy for rollouts, or None for random rollouts."
    )


def known_scale(scale: float | None) -> float:
    """The reward scale; UserError if it is unknown."""
    if scale is None:
        raise UserError(
            "This policy's values are in scaled rewards and the scale was not saved, so a search cannot use them: "
            "train with topology=sync, or with normalize_reward=false."
        )
    return scale
