"""How PPO with search acts in training: a mixture of policy, search and uniform exploration, which is recorded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from corral.acting.model_policy import to_tensors
from corral.acting.policy import ActContext
from corral.algos.schedule import Schedule
from corral.core.errors import UserError
from corral.core.types import Array, Tree
from corral.envs.normalize import NormalizedVecEnv
from corral.envs.vec_env import VecEnv
from corral.nets.actor_critic import ActorCritic
from corral.planning.action_set import ActionSet, Choices
from corral.planning.config import SearchConfig
from corral.planning.mcts.network import NetworkEvaluation
from corral.planning.planner import Plan, Planner, known_scale
from corral.planning.search_policy import draw, sharpened


class SearchBehaviour:
    """Acts by mu = (1 - e) ((1 - b) pi + b pi_search) + e uniform, and searches a fraction of the steps.

    Records `action` in the network's representation, its `logp` by pi, and `behaviour`, the log of mu; a continuous
    action that pi did not choose has no density, and its `behaviour` is infinite. For searches: `better`, their
    policies, over `edges` where actions are sampled, and `search_value`; `distill` and `kappa` are their weights in
    learning, 0 without a search.
    """

    def __init__(
        self, model: ActorCritic, actions: ActionSet, config: SearchConfig, schedules: Mapping[str, Schedule],
        gamma: float, expert: bool, rng: np.random.Generator,
    ):  # fmt: skip
        self._model, self._actions, self._config, self._schedules = model, actions, config, schedules
        self._gamma, self._expert, self._rng = gamma, expert, rng
        self._vec: VecEnv | None = None
        self._planner: Planner | None = None
        self._ctx = ActContext()

    def set_context(self, ctx: ActContext) -> None:
        self._ctx = ctx

    def bind_envs(self, vec: VecEnv) -> None:
        states = vec.states(self._config.memory_mb)
        if states.players > 1:
            raise UserError(f"{vec.spec.name} is a two-player game: train it with alphazero.")
        evaluate = NetworkEvaluation(self._model, self._actions, self._rng)
        self._vec = vec
        self._planner = Planner(
            states, self._actions, evaluate, self._config, vec.num_envs,
            round(self._schedules["num_simulations"].maximum),
            discount=self._gamma, rng=self._rng,
        )  # fmt: skip

    def initial_state(self, n: int) -> Tree:
        return np.arange(n)

    def act(self, obs: Tree, state: Tree, first: Array) -> tuple[Tree, Tree, dict[str, Any]]:
        now = {name: schedule(self._ctx.progress) for name, schedule in self._schedules.items()}
        if self._expert:
            now |= {"search_fraction": 1.0, "search_acts_fraction": 1.0}
        n, width = len(state), self._actions.width
        rows = np.flatnonzero(self._rng.random(n) < now["search_fraction"])
        extras: dict[str, Any] = {name: np.zeros(n, np.float32) for name in ("search_value", "distill", "kappa")}
        extras["better"], plan = np.zeros((n, width), np.float32), None
        if len(rows):
            plan = self._plan(state[rows], first[rows], now)
            extras["better"][rows], extras["search_value"][rows] = plan.policy, plan.values
            extras["distill"][rows], extras["kappa"][rows] = now["distill_coef"], now["search_value_fraction"]
        act = self._act_discrete if isinstance(self._actions, Choices) else self._act_sampled
        params = self._model.numpy_params(obs) if self._model.numpy_towers else self._params(obs)
        action, edges = act(params, rows, plan, now, extras)
        if self._planner is not None:  # trees of unsearched steps refer to past states
            self._planner.set_taken(state, np.where(np.isin(np.arange(n), rows), edges, -1))
        return self._model.actions.to_env(action), state, extras | {"action": action}

    @property
    def simulator_steps(self) -> int:
        return 0 if self._planner is None else self._planner.simulator_steps

    def _plan(self, env_ids: Array, first: Array, now: dict[str, float]) -> Plan:
        assert self._planner is not None, "call bind_envs() first"
        scale = self._vec.learning_scale if isinstance(self._vec, NormalizedVecEnv) else self._ctx.reward_scale
        sims, noise = round(now["num_simulations"]), now["root_noise"]
        return self._planner.plan(env_ids, first, sims, noise, reward_scale=known_scale(scale))

    def _act_discrete(
        self, params: Array, rows: Array, plan: Plan | None, now: dict[str, float], extras: dict[str, Any]
    ) -> tuple[Array, Array]:
        """Sample from the mixture of policy, search and uniform distributions; its probability is exact."""
        n, width = len(params), self._actions.width
        offered, _ = self._actions.offer(params, np.ones((n, width), np.bool_), self._rng)
        pi = offered.astype(np.float64)
        mu = pi.copy()
        if plan is not None:
            mu[rows] += now["search_acts_fraction"] * (sharpened(plan.policy, now["temperature"]) - mu[rows])
        mu += now["random_action_fraction"] * (1.0 / width - mu)
        edges, every = draw(mu, self._rng), np.arange(n)
        with np.errstate(divide="ignore"):  # a search may choose an action of probability 0 under pi
            extras["logp"] = np.log(pi[every, edges]).astype(np.float32).clip(min=-1e4)
        extras["behaviour"] = np.log(mu[every, edges]).astype(np.float32)
        return self._actions.to_model(edges), edges

    def _act_sampled(
        self, params: Array, rows: Array, plan: Plan | None, now: dict[str, float], extras: dict[str, Any]
    ) -> tuple[Array, Array]:
        """Actions selected by search or at random have no density: their `behaviour` is set to inf."""
        rng, n = self._rng, len(params)
        action, logp = self._model.actions.sample(params, rng)
        edges = np.zeros((n, self._actions.width, action.shape[1]), np.float32)
        taken, dense = np.full(n, -1), np.ones(n, np.bool_)
        if plan is not None:
            assert plan.actions is not None
            edges[rows] = plan.actions
            by_search = rng.random(len(rows)) < now["search_acts_fraction"]
            drawn = draw(sharpened(plan.policy, now["temperature"]), rng)
            acting = rows[by_search]
            action[acting] = plan.to_action_rows(drawn)[by_search]
            taken[acting], dense[acting] = drawn[by_search], False
        by_chance = np.flatnonzero(rng.random(n) < now["random_action_fraction"])
        if len(by_chance):
            _, even = self._actions.uniform(np.ones((len(by_chance), self._actions.width), np.bool_), rng)
            assert even is not None
            action[by_chance], taken[by_chance], dense[by_chance] = even[:, 0], -1, False
        extras["logp"], extras["edges"] = logp, edges
        extras["behaviour"] = np.where(dense, logp, np.float32(np.inf))
        return action, taken

    def _params(self, obs: Tree) -> Array:
        import torch

        device = self._model.value_head.weight.device
        with torch.inference_mode():
            params: Array = self._model.act(to_tensors(obs, device), None, None)[0].cpu().numpy()
        return params
