"""AlphaZero (Silver et al. 2018): a search plays against itself, and the network learns what it found and who won.

    L = CE(pi_search, pi) + c_v (z - V)^2,   weights decaying

over positions of whole games, drawn evenly from the last ones; z is the game's outcome for who was to move. The search
is the one that plays afterwards: by default Gumbel's (Danihelka et al. 2022), which learns from few simulations. Moves
that got a full search are learned from as a policy; with `fast_sims` the others get a quick one without noise, and only
their outcome counts (Wu 2020, playout cap randomisation). Games may be played against past selves and scripted players
in shares that schedules set; their moves are learned from as outcomes only.
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
from corral.algos.base import Algorithm, ParamGroup, UpdateContext, require
from corral.algos.schedule import Schedule, read_schedule
from corral.algos.search.self_play import SelfPlay
from corral.core.errors import UserError
from corral.core.types import DataSpec, EnvSpec, LossOutput, Positions
from corral.nets.actor_critic import ActorCritic
from corral.nets.config import NetConfig
from corral.ops.optim import adamw
from corral.planning.action_set import Choices, choose_action_set
from corral.planning.planner import SearchConfig
from corral.planning.search_policy import Search


@dataclass(frozen=True)
class Config:
    """Settings of AlphaZero. Those that say so may be schedules: 0.5, 8->64, 1->0.1@0.3."""

    sims: float | str = 64
    """Simulations of a full search; schedule."""
    fast_sims: int = 0
    """Simulations of a quick search; 0: every move gets a full one."""
    full_share: float = 0.25
    """Share of the moves that get a full search, with fast_sims."""
    noise: float | str = 1.0
    """How much roots explore, 0 to 1; schedule."""
    temperature: float | str = 1.0
    """Of the first moves, which are drawn from the search's policy; schedule."""
    temperature_moves: int = 8
    """Moves of each game that are drawn; the others are the best."""
    past_share: float | str = 0.0
    """Share of the games against a past self; schedule."""
    past_every: float = 0.05
    """Share of the run after which another self is kept."""
    past_kept: int = 10
    """Past selves that are kept, the oldest going."""
    scripted: tuple[str, ...] = ("random",)
    """Players of the game to play against: random, mcts:100, perfect."""
    scripted_share: float | str = 0.0
    """Share of the games against one of them; schedule."""
    search: SearchConfig = field(default_factory=SearchConfig)
    lr: float = 1e-3
    """Learning rate of Adam."""
    anneal_lr: bool = True
    """Let the learning rate fall linearly to a tenth."""
    weight_decay: float = 1e-4
    """Of all weights, each update."""
    value_coef: float = 1.0
    """Weight of the value's squared error."""
    batch_size: int = 512
    """Positions in an update."""
    capacity: int = 200_000
    """Positions kept."""
    learning_starts: int = 5_000
    """Positions before the first update."""
    replays: float = 4.0
    """How often a position is learned from, on average."""
    steps_per_turn: int = 8
    """Moves of each environment between two looks at the store."""
    max_grad_norm: float = 10.0
    """Gradients are scaled down to this norm."""
    net: NetConfig = field(default_factory=lambda: NetConfig(hidden=(256, 256), activation="relu"))
    """The network."""

    def __post_init__(self) -> None:
        """Refuse what cannot be."""
        require("lr", self.lr, above=0, most=100)
        require("full_share", self.full_share, above=0, most=1)
        require("replays", self.replays, above=0)
        for name in ("batch_size", "capacity", "learning_starts", "steps_per_turn", "past_kept"):
            require(name, getattr(self, name), least=1)
        require("max_grad_norm", self.max_grad_norm, above=0)
        for name in ("fast_sims", "temperature_moves", "weight_decay", "value_coef"):
            require(name, getattr(self, name), least=0)
        require("past_every", self.past_every, above=0, most=1)
        past, scripted = (self.schedules()[name] for name in ("past_share", "scripted_share"))
        if any(past(at) + scripted(at) > 1 for at in (0.0, past.until, scripted.until)):  # straight in between
            raise UserError("past_share and scripted_share are shares of all games: together at most 1.")
        if scripted.most > 0 and not self.scripted:
            raise UserError("scripted_share needs somebody to play against: name them by scripted, such as mcts:100.")
        if self.net.core != "none":
            raise UserError("A search evaluates positions by themselves, so alphazero has no memory: use core=none.")

    def schedules(self) -> dict[str, Schedule]:
        """The settings that change over a run, by name."""
        bounds = {"sims": (1, 1e6), "temperature": (0, 100)}
        names = ("sims", "noise", "temperature", "past_share", "scripted_share")
        return {name: read_schedule(name, getattr(self, name), *bounds.get(name, (0, 1))) for name in names}

    @property
    def gamma(self) -> float:
        """Games are not discounted."""
        return 1.0


class AlphaZero(Algorithm):
    """AlphaZero for one game."""

    def __init__(self, config: Config, spec: EnvSpec, num_envs: int):
        self.config, self.spec = config, spec
        self._schedules = config.schedules()
        actions = choose_action_set(spec.action, config.search.samples)
        if not isinstance(actions, Choices):
            raise UserError(
                f"alphazero plays games with moves that can be counted, and {spec.name} has {spec.action.space}."
            )
        self._actions = actions
        self.data = DataSpec(
            "episode", 1, config.batch_size, "replay", ("better", "legal", "searched"),
            samples_per_insert=config.replays, capacity=config.capacity,
            min_size=min(config.learning_starts, config.capacity),
        )  # fmt: skip

    def fragment_steps(self, num_envs: int) -> int:
        """Moves between two looks at the store."""
        return self.config.steps_per_turn

    def build_model(self) -> ActorCritic:
        """Policy and value of who is to move."""
        return ActorCritic(self.spec, self.config.net)

    def make_policy(self, model: nn.Module, *, explore: bool, rng: np.random.Generator, index: int = 0) -> Policy:
        """A search against itself and others; or one that plays as well as it can."""
        assert isinstance(model, ActorCritic)
        if explore:
            return SelfPlay(model, self._actions, self.config, self._schedules, rng)
        return self.eval_policy(model, deterministic=True, rng=rng)

    def eval_policy(self, model: nn.Module, *, deterministic: bool, rng: np.random.Generator) -> Policy:
        """A search that plays as well as it can, or draws from what it finds."""
        sims = round(self._schedules["sims"].most)
        return Search.of_model(model, sims, self.config.gamma, self.config.search, rng, deterministic=deterministic)

    def groups(self) -> Sequence[ParamGroup]:
        """Adam with decoupled weight decay; the learning rate is constant, or falls to a tenth."""
        config = self.config
        optimizer = partial(adamw, lr=config.lr, weight_decay=config.weight_decay)
        return [ParamGroup(optimizer, self._learning_rate, config.max_grad_norm)]

    def _learning_rate(self, progress: float) -> float:
        return self.config.lr * (1 - 0.9 * progress if self.config.anneal_lr else 1.0)

    def losses(
        self, model: nn.Module, target: nn.Module | None, batch: Positions, ctx: UpdateContext
    ) -> Iterator[LossOutput]:
        """Cross-entropy to what searches found, and the squared error of the value."""
        device = next(model.parameters()).device
        params, value = model(to_tensors(batch.obs, device))
        extras = {name: to_tensors(column, device) for name, column in batch.extras.items()}
        log_pi = torch.log_softmax(params.float().masked_fill(~extras["legal"], -1e9), -1)
        apart = -(extras["better"] * log_pi).sum(-1)
        searched = extras["searched"].float()
        policy_loss = (searched * apart).sum() / searched.sum().clamp(min=1)
        value_loss = (value.float() - to_tensors(batch.outcome, device)).square().mean()
        with torch.no_grad():
            spread = -(extras["better"] * extras["better"].clamp(min=1e-9).log()).sum(-1)
            floor = (searched * spread).sum() / searched.sum().clamp(min=1)
        metrics = {"loss/policy": policy_loss, "loss/value": value_loss, "loss/policy_gap": policy_loss - floor}
        yield LossOutput(policy_loss + self.config.value_coef * value_loss, metrics, rows=len(value))
