"""PPO with search: a search on the real environment improves the policy's actions; PPO learns from both.

    L = L_clip(pi / pi_old, A min(w_max, pi_old(a) / mu(a))) + c_v (V - R)^2 / 2 - c_e H + c_d CE(pi_search, pi)

mu is the behaviour policy, (1 - e) ((1 - b) pi_old + b pi_search) + e uniform, with e `random_action_fraction` and b
`search_acts_fraction`. It is known exactly, so PPO's ratio stays that of two policies (Hilton et al. 2022 on decoupling
them). CE counts on searched steps. Continuous actions that a search chose have no density: they train by CE and value
alone. R is the lambda return whose bootstrap is (1 - k) V + k v_search, with k `search_value_fraction`, and A = R - V,
which for k = 0 is GAE. Both are mu's: where the search acts, the steps that follow are not corrected, so that V learns
the value of acting by the mixture. While the critic explains less than `min_explained_variance` of the returns'
variance, a search would only amplify its errors: c_d and k are then 0.

Modes: `ppo` never searches; `ppo+distill` searches a fraction of the steps and the policy acts; `expert` lets the
search act and learns by CE and value alone; `eval` trains as `ppo` and searches in evaluations.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn

from corral.acting.model_policy import to_tensors
from corral.acting.policy import Policy
from corral.algos.base import Algorithm, ParamGroup, UpdateContext, require
from corral.algos.ppo import Config as PpoConfig
from corral.algos.ppo import Ppo
from corral.algos.schedule import Schedule, read_schedule
from corral.algos.search.search_acting import SearchBehaviour
from corral.algos.trajectories import Minibatch, compute_values, explained_variance, flatten_steps, normalize, num_valid
from corral.core.errors import UserError
from corral.core.types import Array, EnvSpec, LossOutput, Trajectory
from corral.nets.actor_critic import ActorCritic
from corral.ops.returns import gae, lambda_return
from corral.planning.action_set import Choices, choose_action_set
from corral.planning.config import SearchConfig
from corral.planning.search_policy import Search


@dataclass(frozen=True)
class Config:
    """Settings of PPO with search. Those marked "schedule" take 0.5, 8:64 or 1:0.1@0.3."""

    search_mode: Literal["ppo", "ppo+distill", "expert", "eval"] = "ppo+distill"
    """What search is used for."""
    ppo: PpoConfig = field(default_factory=PpoConfig)
    search: SearchConfig = field(default_factory=SearchConfig)
    num_simulations: float | str = 16
    """Simulations of a search; schedule."""
    search_fraction: float | str = 0.25
    """Fraction of steps on which a search runs, with ppo+distill; schedule."""
    search_acts_fraction: float | str = 0.0
    """Fraction of the searched steps on which the search selects the action, with ppo+distill; schedule."""
    random_action_fraction: float | str = 0.0
    """Fraction of steps with a uniformly random action; schedule."""
    root_noise: float | str = 0.0
    """Exploration noise at the roots, 0 to 1; schedule."""
    temperature: float | str = 1.0
    """Temperature of the search's policy when it selects actions; schedule."""
    distill_coef: float | str = 0.5
    """Weight of the cross-entropy to the search's policy; schedule."""
    search_value_fraction: float | str = 0.0
    """Weight of the search's values in bootstraps; schedule."""
    min_explained_variance: float = 0.3
    """Explained variance of the critic below which nothing is learned from searches."""
    max_importance_weight: float = 1.0
    """Clip of the importance weight pi_old / mu of an advantage."""

    def __post_init__(self) -> None:
        if self.ppo.net.rnn != "none":
            raise UserError(
                "ppo-search does not support recurrent networks, because a search evaluates single states: set "
                "rnn=none, or use ppo."
            )
        if self.ppo.clip_range_vf is not None:
            raise UserError("ppo-search does not clip values: set clip_range_vf=none, or use ppo.")
        require("max_importance_weight", self.max_importance_weight, minimum=1)
        require("min_explained_variance", self.min_explained_variance, maximum=1)
        self.schedules()

    def schedules(self) -> dict[str, Schedule]:
        bounds = {"num_simulations": (1, 1e6), "temperature": (0, 100), "distill_coef": (0, 1e6)}
        names = ("num_simulations", "search_fraction", "search_acts_fraction", "random_action_fraction", "root_noise",
                 "temperature", "distill_coef", "search_value_fraction")  # fmt: skip
        return {name: read_schedule(name, getattr(self, name), *bounds.get(name, (0, 1))) for name in names}

    @property
    def searches(self) -> bool:
        return self.search_mode in ("ppo+distill", "expert")

    @property
    def gamma(self) -> float:
        return self.ppo.gamma


_SEARCHED = ("behaviour", "better", "distill", "kappa", "search_value")
"""Columns that `SearchBehaviour` records in addition to PPO's."""


@dataclass
class SearchedRows(Minibatch):
    """A minibatch with search results; rows without a search have weight 0."""

    trust: Tensor | None = None  # [n] min(max_importance_weight, pi_old / mu), 0 where the action has no density
    distill: Tensor | None = None  # [n] weight of the cross-entropy, before the schedule's
    better: Tensor | None = None  # [n, edges] the search's policy
    edges: Tensor | None = None  # [n, edges, D] actions of the edges, where they are sampled


class PpoSearch(Algorithm):
    """PPO with search for one environment specification. Batches without searches use PPO's own loss."""

    def __init__(self, config: Config, spec: EnvSpec, num_envs: int):
        self.config, self.spec, self.ppo = config, spec, Ppo(config.ppo, spec, num_envs)
        self._schedules = config.schedules()
        self._actions = choose_action_set(spec.action, config.search.num_sampled_actions, likeliest=False)
        self.data = self.ppo.data
        if config.searches:
            edges = () if isinstance(self._actions, Choices) else ("edges",)
            self.data = replace(self.data, extras=(*self.data.extras, *_SEARCHED, *edges))
        self._every_edge: Array | None = None
        if isinstance(self._actions, Choices):
            self._every_edge = self._actions.to_model(np.arange(self._actions.width))

    def build_model(self) -> ActorCritic:
        return self.ppo.build_model()

    def make_policy(self, model: ActorCritic, *, explore: bool, rng: np.random.Generator, index: int = 0) -> Policy:
        config = self.config
        if not (explore and config.searches):
            return self.ppo.make_policy(model, explore=explore, rng=rng, index=index)
        return SearchBehaviour(
            model, self._actions, config.search, self._schedules, config.gamma, config.search_mode == "expert", rng
        )

    def eval_policy(self, model: ActorCritic, *, deterministic: bool, rng: np.random.Generator) -> Policy:
        """The network alone, or a search with search_mode=eval."""
        config = self.config
        if config.search_mode != "eval":
            return self.ppo.make_policy(model, explore=not deterministic, rng=rng)
        sims = round(self._schedules["num_simulations"].maximum)
        return Search.of_model(model, sims, config.gamma, config.search, rng, deterministic=deterministic)

    def groups(self) -> Sequence[ParamGroup]:
        return self.ppo.groups()

    def minibatches(self, batch: Minibatch, rng: torch.Generator) -> Iterator[Minibatch]:
        return self.ppo.minibatches(batch, rng)

    def prepare(self, model: ActorCritic, batch: Trajectory) -> Minibatch:
        """Compute advantages, value targets, and the weights of actions and search results."""
        if not self.config.searches:
            return self.ppo.prepare(model, batch)
        config, extras = self.config, batch.extras
        values, next_values = compute_values(model, batch)
        ends = batch.terminated, batch.truncated, batch.faulty
        advantages = gae(batch.reward, values, next_values, *ends, config.ppo.gamma, config.ppo.gae_lambda)
        explained = explained_variance(values[batch.valid], (advantages + values)[batch.valid])
        # Returns that do not vary, of which nothing can be explained, count as 0.
        trusted = (0.0 if math.isnan(explained) else explained) > config.min_explained_variance
        if trusted and extras["kappa"].any():
            next_values = bootstrap(next_values, batch.done, extras["search_value"], extras["kappa"])
            # Not GAE: its telescoping sum of deltas cancels V within an episode, which would leave v_search - V in
            # every step.
            advantages = (
                lambda_return(batch.reward, next_values, *ends, config.ppo.gamma, config.ppo.gae_lambda) - values
            )
        columns = {
            "trust": np.exp(np.minimum(extras["logp"] - extras["behaviour"], np.log(config.max_importance_weight))),
            "distill": extras["distill"] * np.float32(trusted or config.search_mode == "expert"),
            "better": extras["better"],
            **({"edges": extras["edges"]} if "edges" in extras else {}),
        }
        return flatten_steps(model, batch, values, advantages, advantages + values, SearchedRows, columns)

    def losses(
        self, model: ActorCritic, target: nn.Module | None, batch: Minibatch, ctx: UpdateContext
    ) -> Iterator[LossOutput]:
        """Weighted clipped surrogate, value error, entropy bonus, and cross-entropy to the search's policy."""
        if not isinstance(batch, SearchedRows):
            yield from self.ppo.losses(model, target, batch, ctx)
            return
        assert batch.trust is not None
        assert batch.distill is not None
        config, clip = self.config.ppo, self.ppo.clip_coef(ctx.progress)
        params, values = model(batch.obs)
        log_prob, entropy = model.actions.evaluate(params, batch.action)
        ratio = (log_prob - batch.old_log_prob).clamp(max=20.0).exp()
        advantages = normalize(batch.advantages, batch.mask) if config.normalize_advantage else batch.advantages
        surrogate = torch.minimum(ratio * advantages, ratio.clamp(1 - clip, 1 + clip) * advantages)
        policy_loss = -(batch.trust * surrogate).mean()
        value_loss, entropy_mean = 0.5 * (values - batch.returns).square().mean(), entropy.mean()
        cross_entropy = self._cross_entropy(model, params, batch)
        distilled = (batch.distill * cross_entropy).mean()
        of_policy = distilled if self.config.search_mode == "expert" else policy_loss + distilled
        loss = of_policy + config.vf_coef * value_loss - config.ent_coef * entropy_mean
        with torch.no_grad():
            searched = batch.distill > 0
            approx_kl = (batch.trust * (ratio - 1 - ratio.log())).mean()  # weighted, as if pi_old had acted
            metrics = {
                "loss/policy": policy_loss,
                "loss/value": value_loss,
                "loss/entropy": entropy_mean,
                "loss/kl": approx_kl,
                "loss/clip_fraction": ((ratio - 1).abs() > clip).float().mean(),
                "search/cross_entropy": (cross_entropy * searched).sum() / searched.sum().clamp(min=1),
                "search/learned_fraction": searched.float().mean(),
            }
        stop = self.ppo.is_past_target_kl(approx_kl)
        yield LossOutput(loss, metrics, stop=stop, rows=num_valid(batch))

    def _cross_entropy(self, model: ActorCritic, params: Tensor, batch: SearchedRows) -> Tensor:
        """Per row, minus the sum over edges of pi_search log pi."""
        assert batch.better is not None
        edges = to_tensors(self._every_edge, params.device) if batch.edges is None else batch.edges
        edges = edges.expand(len(params), -1, -1)
        log_pi, _ = model.actions.evaluate(params.unsqueeze(1).expand(-1, edges.shape[1], -1), edges)
        return -(batch.better * log_pi).sum(1)


def bootstrap(after: Array, done: Array, search_value: Array, kappa: Array) -> Array:
    """(1 - kappa) V + kappa v_search for every successor that was searched, [T, B]."""
    weight = np.where(done[:-1], 0.0, kappa[1:])
    mixed = after.copy()
    mixed[:-1] += weight * (search_value[1:] - after[:-1])
    return mixed
