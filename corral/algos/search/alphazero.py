"""AlphaZero (Silver et al. 2018): self-play with search; the network learns the search's policy and the result.

    L = CE(pi_search, pi) + c_v (z - V)^2,   with weight decay

over positions of whole games, sampled uniformly from the replay buffer; z is the game's result for the player to move.
The search is also the one used for playing: by default Gumbel's (Danihelka et al. 2022), which needs few simulations.
Moves with a full search are policy targets; with `fast_simulations` the others get a fast search without noise, and
only their result counts (Wu 2020, playout cap randomization). Fractions of the games, which may be schedules, are
played against past selves and scripted players, whose moves are used for their results only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from torch import nn

from corral.acting.model_policy import to_tensors
from corral.acting.policy import Policy
from corral.algos.base import ParamGroup, UpdateContext, require
from corral.algos.schedule import Schedule, read_schedule
from corral.algos.search.self_play import SelfPlay
from corral.algos.trajectories import ActorCriticAlgorithm, explained_variance
from corral.core.errors import UserError
from corral.core.types import DataSpec, EnvSpec, LossOutput, Positions
from corral.nets.actor_critic import ActorCritic
from corral.nets.config import NetConfig
from corral.ops.optim import adamw
from corral.planning.action_set import Choices, choose_action_set
from corral.planning.config import SearchConfig
from corral.planning.search_policy import Search

_FRAGMENT_STEPS = 8  # moves of each environment per fragment
_WEIGHT_DECAY = 1e-4


@dataclass(frozen=True)
class Config:
    """Settings of AlphaZero. Those marked "schedule" take 0.5, 8:64 or 1:0.1@0.3."""

    num_simulations: float | str = 64
    """Simulations of a full search; schedule."""
    fast_simulations: int = 0
    """Simulations of a fast search (playout cap randomization); 0: every move gets a full search."""
    full_search_fraction: float = 0.25
    """Fraction of moves that get a full search, with fast_simulations."""
    root_noise: float | str = 1.0
    """Exploration noise at the roots, 0 to 1; schedule."""
    temperature: float | str = 1.0
    """Temperature of the first moves, which are sampled from the search's policy; schedule."""
    temperature_moves: int = 8
    """Moves of each game that are sampled; later moves are the best ones."""
    past_self_fraction: float | str = 0.0
    """Fraction of games against a past version of the network; schedule."""
    opponents: tuple[str, ...] = ("random",)
    """Scripted players to play against: random, mcts:100, perfect."""
    opponent_fraction: float | str = 0.0
    """Fraction of games against one of the opponents; schedule."""
    search: SearchConfig = field(default_factory=SearchConfig)
    learning_rate: float = 1e-3
    """Learning rate of Adam."""
    final_lr_fraction: float = 0.1
    """The learning rate falls linearly to this fraction of itself; 1: constant."""
    value_coef: float = 1.0
    """Weight of the squared error of the value."""
    batch_size: int = 512
    """Positions in an update."""
    buffer_size: int = 200_000
    """Positions in the replay buffer."""
    learning_starts: int = 5_000
    """Positions before the first update."""
    replay_ratio: float = 4.0
    """How often each position is sampled, on average."""
    max_grad_norm: float = 10.0
    """Maximum gradient norm."""
    net: NetConfig = field(default_factory=lambda: NetConfig(hidden_sizes=(256, 256), activation="relu"))
    """The network."""

    def __post_init__(self) -> None:
        require("learning_rate", self.learning_rate, above=0, maximum=100)
        require("final_lr_fraction", self.final_lr_fraction, minimum=0, maximum=1)
        require("full_search_fraction", self.full_search_fraction, above=0, maximum=1)
        require("replay_ratio", self.replay_ratio, above=0)
        for name in ("batch_size", "buffer_size", "learning_starts"):
            require(name, getattr(self, name), minimum=1)
        require("max_grad_norm", self.max_grad_norm, above=0)
        for name in ("fast_simulations", "temperature_moves", "value_coef"):
            require(name, getattr(self, name), minimum=0)
        past, scripted = (self.schedules()[name] for name in ("past_self_fraction", "opponent_fraction"))
        if any(past(at) + scripted(at) > 1 for at in (0.0, past.until, scripted.until)):  # linear in between
            raise UserError("past_self_fraction + opponent_fraction, both fractions of all games, exceed 1: lower one.")
        if scripted.maximum > 0 and not self.opponents:
            raise UserError("opponent_fraction needs opponents: set opponents, such as mcts:100.")
        if self.net.rnn != "none":
            raise UserError(
                "alphazero does not support recurrent networks, because a search evaluates single positions: set "
                "rnn=none."
            )

    def schedules(self) -> dict[str, Schedule]:
        bounds = {"num_simulations": (1, 1e6), "temperature": (0, 100)}
        names = ("num_simulations", "root_noise", "temperature", "past_self_fraction", "opponent_fraction")
        return {name: read_schedule(name, getattr(self, name), *bounds.get(name, (0, 1))) for name in names}

    @property
    def gamma(self) -> float:
        """Games are not discounted."""
        return 1.0


class AlphaZero(ActorCriticAlgorithm[Config]):
    """AlphaZero for one game."""

    uses_action_masks = True

    def __init__(self, config: Config, spec: EnvSpec, num_envs: int):
        self.config, self.spec = config, spec
        self._schedules = config.schedules()
        actions = choose_action_set(spec.action, config.search.num_sampled_actions)
        if not isinstance(actions, Choices):
            space = spec.action.space
            raise UserError(f"alphazero needs discrete actions, and {spec.name} has {space}: use ppo-search.")
        self._actions = actions
        self.data = DataSpec(
            "episode", 1, config.batch_size, "replay", ("better", "legal", "searched"),
            samples_per_insert=config.replay_ratio, capacity=config.buffer_size,
            min_size=min(config.learning_starts, config.buffer_size),
        )  # fmt: skip

    def fragment_steps(self, num_envs: int) -> int:
        return _FRAGMENT_STEPS

    def make_policy(self, model: ActorCritic, *, explore: bool, rng: np.random.Generator, index: int = 0) -> Policy:
        """Self-play with search and opponents; without `explore`, the best move of a search."""
        if explore:
            return SelfPlay(model, self._actions, self.config, self._schedules, rng)
        return self.eval_policy(model, deterministic=True, rng=rng)

    def eval_policy(self, model: ActorCritic, *, deterministic: bool, rng: np.random.Generator) -> Policy:
        """The best move of a search, or a sample from its policy."""
        sims = round(self._schedules["num_simulations"].maximum)
        return Search.of_model(model, sims, self.config.gamma, self.config.search, rng, deterministic=deterministic)

    def groups(self) -> Sequence[ParamGroup]:
        """Adam with decoupled weight decay; the learning rate decays linearly to the fraction `final_lr_fraction`."""
        config = self.config
        optimizer = partial(adamw, lr=config.learning_rate, weight_decay=_WEIGHT_DECAY)
        return [ParamGroup(optimizer, self._learning_rate, config.max_grad_norm)]

    def _learning_rate(self, progress: float) -> float:
        return self.config.learning_rate * (1 - (1 - self.config.final_lr_fraction) * progress)

    def losses(
        self, model: ActorCritic, target: nn.Module | None, batch: Positions, ctx: UpdateContext
    ) -> Iterator[LossOutput]:
        device = next(model.parameters()).device
        params, value = model(to_tensors(batch.obs, device))
        extras = {name: to_tensors(column, device) for name, column in batch.extras.items()}
        log_pi = torch.log_softmax(params.masked_fill(~extras["legal"], -1e9), -1)
        cross_entropy = -(extras["better"] * log_pi).sum(-1)
        searched = extras["searched"].float()
        searched_rows = max(1, int(batch.extras["searched"].sum()))  # what the policy loss is a mean of
        policy_loss = (searched * cross_entropy).sum() / searched.sum().clamp(min=1)
        outcome = to_tensors(batch.outcome, device)
        value_loss = (value - outcome).square().mean()
        with torch.no_grad():
            target_entropy = -(extras["better"] * extras["better"].clamp(min=1e-9).log()).sum(-1)
            floor = (searched * target_entropy).sum() / searched.sum().clamp(min=1)
            metrics = {
                "loss/policy": policy_loss,
                "loss/value": value_loss,
                "loss/policy_gap": policy_loss - floor,
                "loss/entropy": -(log_pi.exp() * log_pi).sum(-1).mean(),
                "loss/explained_variance": explained_variance(value.detach(), outcome),
            }
        yield LossOutput(policy_loss + self.config.value_coef * value_loss, metrics, rows=searched_rows)
