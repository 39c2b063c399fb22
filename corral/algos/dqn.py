"""Deep Q-networks (Mnih et al. 2015): double (van Hasselt), dueling (Wang), n-step, prioritised (Schaul, all 2016).

Regresses `Q(s, a)` to `R_n + gamma^n Q_target(s', argmax_a Q(s', a))` by the Huber loss, with importance weights if
replay is prioritised. Explores epsilon-greedily with linearly decaying epsilon. Truncated episodes bootstrap from their
final observation. Discrete actions only; several choices form one joint action.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import nn

from corral.acting.model_policy import EpsilonGreedyPolicy, LadderPolicy, q_values, to_tensors
from corral.acting.policy import Policy
from corral.algos.base import Algorithm, ParamGroup, UpdateContext, require
from corral.algos.schedule import one_group
from corral.algos.trajectories import join_obs
from corral.core.errors import UserError
from corral.core.types import Array, DataSpec, EnvSpec, LossOutput, Trajectory, Transitions, tree_map
from corral.nets.config import NetConfig
from corral.nets.q_network import Dueling, QNetwork
from corral.ops.distributions import JointChoices
from corral.ops.optim import adam
from corral.ops.returns import nstep_return


@dataclass(frozen=True)
class Config:
    """Settings of DQN."""

    learning_rate: float = 1e-4
    """Learning rate of Adam."""
    anneal_lr: bool = False
    """Decay the learning rate linearly to 0."""
    gamma: float = 0.99
    """Discount."""
    batch_size: int = 32
    """Transitions in an update."""
    buffer_size: int = 100_000
    """Transitions in the replay buffer."""
    learning_starts: int = 1_000
    """Transitions before the first update."""
    train_frequency: int = 4
    """Environment steps, over all environments, between updates."""
    gradient_steps: int = 1
    """Updates every train_frequency steps."""
    target_update_period: int = 1_000
    """Updates (not environment steps) between updates of the target network."""
    tau: float = 1.0
    """Fraction of the online weights that the target network takes: 1 copies them, less is a soft update, usually with
    target_update_period=1."""
    n_step: int = 1
    """Steps of reward in a target."""
    double_q: bool = True
    """Select the next action by the online network, evaluate it by the target network."""
    dueling: Dueling = False
    """Separate value and advantage streams with a hidden layer each; shared: the one head of earlier versions."""
    prioritized_replay: bool = False
    """Sample transitions by their last TD error."""
    prioritized_replay_alpha: float = 0.6
    """Exponent of priorities: 0 samples uniformly."""
    prioritized_replay_beta: float = 0.4
    """Exponent of importance weights at the start; it rises linearly to 1 over the run."""
    prioritized_replay_eps: float = 1e-6
    """Added to every priority, so that none is 0."""
    exploration_initial_eps: float = 1.0
    """Fraction of random actions at the start."""
    exploration_final_eps: float = 0.05
    """Fraction of random actions after the schedule."""
    exploration_fraction: float = 0.1
    """Fraction of the run over which epsilon decays."""
    epsilon_ladder: bool = False
    """Instead of the schedule, a constant epsilon per environment: 0.4^(1 + 7 i / (N - 1)), as in Ape-X."""
    max_grad_norm: float = 10.0
    """Maximum gradient norm."""
    net: NetConfig = field(default_factory=lambda: NetConfig(activation="relu"))
    """The network."""

    def __post_init__(self) -> None:
        require("learning_rate", self.learning_rate, above=0, maximum=100)
        require("gamma", self.gamma, minimum=0, maximum=1)
        for name in ("batch_size", "buffer_size", "train_frequency", "gradient_steps", "target_update_period", "n_step",
                     "learning_starts"):  # fmt: skip
            require(name, getattr(self, name), minimum=1)
        require("tau", self.tau, above=0, maximum=1)
        require("prioritized_replay_eps", self.prioritized_replay_eps, above=0)
        for name in ("prioritized_replay_alpha", "prioritized_replay_beta"):
            require(name, getattr(self, name), minimum=0, maximum=1)
        for name in ("exploration_initial_eps", "exploration_final_eps", "exploration_fraction"):
            require(name, getattr(self, name), minimum=0, maximum=1)
        if self.net.rnn != "none":
            raise UserError("dqn does not support recurrent networks: set rnn=none, or use a2c or ppo.")


class Dqn(Algorithm):
    """DQN for one environment specification."""

    uses_target = True

    def __init__(self, config: Config, spec: EnvSpec, num_envs: int):
        self.config, self.spec, self._num_envs = config, spec, num_envs
        self.choices = JointChoices(spec.action, "dqn")
        self.data = DataSpec(
            "transition", config.n_step, config.batch_size, "replay",
            samples_per_insert=config.gradient_steps * config.batch_size / config.train_frequency,
            prioritised=config.prioritized_replay, priority_alpha=config.prioritized_replay_alpha,
            priority_beta=config.prioritized_replay_beta, priority_eps=config.prioritized_replay_eps,
            capacity=config.buffer_size,
            min_size=max(config.learning_starts, config.batch_size), gamma=config.gamma,
        )  # fmt: skip

    def fragment_steps(self, num_envs: int) -> int:
        return max(1, self.config.train_frequency // num_envs)

    def build_model(self) -> QNetwork:
        return QNetwork(self.spec, self.choices.count, self.config.net, self.config.dueling)

    def make_policy(self, model: QNetwork, *, explore: bool, rng: np.random.Generator, index: int = 0) -> Policy:
        if explore and self.config.epsilon_ladder:
            rungs = epsilon_ladder(self._num_envs)
            return LadderPolicy(model, self.choices.to_env, self.choices.count, rungs, index, rng)
        epsilon = self.epsilon if explore else lambda progress: 0.0
        return EpsilonGreedyPolicy(model, self.choices.to_env, self.choices.count, epsilon, rng)

    def epsilon(self, progress: float) -> float:
        config = self.config
        done = min(1.0, progress / config.exploration_fraction) if config.exploration_fraction else 1.0
        return config.exploration_initial_eps + done * (config.exploration_final_eps - config.exploration_initial_eps)

    def groups(self) -> Sequence[ParamGroup]:
        return one_group(self.config, adam)

    def losses(
        self, model: QNetwork, target: nn.Module | None, batch: Transitions, ctx: UpdateContext
    ) -> Iterator[LossOutput]:
        """Weighted Huber loss of the TD error, whose magnitude is the priority."""
        assert target is not None
        device = next(model.parameters()).device
        obs, next_obs = to_tensors(batch.obs, device), to_tensors(batch.next_obs, device)
        action_index = to_tensors(np.ascontiguousarray(self.choices.from_env(batch.action)), device).unsqueeze(-1)
        reward, discount = to_tensors(batch.reward, device), to_tensors(batch.discount, device)
        with torch.no_grad():
            next_q = target(next_obs)
            best = (model(next_obs) if self.config.double_q else next_q).argmax(-1, keepdim=True)
            td_target = reward + discount * next_q.gather(-1, best).squeeze(-1)
        q = model(obs).gather(-1, action_index).squeeze(-1)
        loss = nn.functional.smooth_l1_loss(
            q, td_target, reduction="none" if self.config.prioritized_replay else "mean"
        )
        if self.config.prioritized_replay:
            loss = (loss * to_tensors(batch.weight, device)).mean()
        priorities = (q.detach() - td_target).abs() if self.config.prioritized_replay else None
        yield LossOutput(loss, {"loss/td": loss, "loss/q": q.detach().mean()}, priorities, rows=len(batch.reward))

    def priorities(self, model: QNetwork, traj: Trajectory) -> Array | None:
        """Magnitudes of the n-step TD errors by the network that acted (Horgan et al. 2018, Ape-X).

        A window that is cut short by the end of the fragment bootstraps there.
        """
        if not self.config.prioritized_replay:
            return None
        q = q_values(model, join_obs(traj))
        count, (steps, width) = traj.first.size, traj.shape
        value = q.max(-1)
        after = value[width:count].reshape(steps, width).copy()
        after[traj.final_at[:, 0], traj.final_at[:, 1]] = value[count:]
        action_index = self.choices.from_env(tree_map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), traj.action))
        taken = q[np.arange(steps * width), action_index].reshape(steps, width)
        ends = traj.terminated, traj.truncated, traj.faulty
        td_target = nstep_return(traj.reward, after, *ends, self.config.gamma, self.config.n_step)
        return np.where(traj.faulty, np.nan, np.abs(td_target - taken))

    def update_target(self, model: QNetwork, target: nn.Module, version: int) -> None:
        if version % self.config.target_update_period == 0:
            for old, new in zip(target.state_dict().values(), model.state_dict().values(), strict=True):
                old.lerp_(new, self.config.tau) if old.is_floating_point() else old.copy_(new)


def epsilon_ladder(count: int) -> Array:
    """`0.4^(1 + 7 i / (N - 1))` for `i` from 0 to `N - 1`: from exploratory to almost greedy (Horgan et al. 2018)."""
    return 0.4 ** (1 + 7 * np.arange(count) / max(1, count - 1))
