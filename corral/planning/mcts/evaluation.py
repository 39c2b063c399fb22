"""Leaf evaluation: action priors, and the value for the player to move."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np

from corral.acting.policy import Policy, to_numpy
from corral.core.types import Array, Tree, tree_map
from corral.planning.action_set import NO_EDGE, ActionSet
from corral.snapshot.states import Expansion, States


class LeafValues(NamedTuple):
    """Evaluated rows; `actions` are the sampled actions of the edges, if any."""

    priors: Array  # [B, edges] float32, -1 where there is no such edge
    values: Array  # [B] float32
    actions: Array | None = None  # [B, edges, ...]


class Evaluate(Protocol):
    """Maps rows of observations, legal actions and state ids (0 if the episode ended) to LeafValues."""

    def __call__(self, obs: Tree, legal: Array, ids: Array) -> LeafValues: ...


def uniform(legal: Array) -> Array:
    """Equal priors for all legal actions."""
    share = np.float32(1) / np.maximum(np.count_nonzero(legal, axis=1, keepdims=True), 1).astype(np.float32)
    return np.where(legal, share, np.float32(NO_EDGE))


def uniform_evaluation(obs: Tree, legal: Array, ids: Array) -> LeafValues:
    """Evaluation without a model: uniform priors, zero values."""
    return LeafValues(uniform(legal), np.zeros(len(legal), np.float32))


class RolloutEvaluation:
    """Uniform priors, and the return of `horizon` random steps or steps of `policy`, from its initial state."""

    def __init__(
        self,
        states: States,
        actions: ActionSet,
        horizon: int,
        discount: float,
        rng: np.random.Generator,
        policy: Policy | None = None,
    ):
        self._states, self._actions, self._horizon, self._discount, self._rng = states, actions, horizon, discount, rng
        self._policy = policy
        self._masked: bool | None = None  # unknown until there are states
        self.steps = 0  # environment steps so far

    def __call__(self, obs: Tree, legal: Array, ids: Array) -> LeafValues:
        values = np.zeros(len(ids), np.float32)
        live = np.flatnonzero((ids > 0) & legal.any(1))
        if len(live):
            free = self._policy is None and self._states.players == 1 and self._always_legal(ids[live])
            seen = tree_map(lambda leaf: leaf[live], obs)
            values[live] = self._at_once(ids[live]) if free else self._step_by_step(ids[live], seen, legal[live])
        priors, drawn = self._actions.uniform(legal, self._rng)
        return LeafValues(priors, values, drawn)

    def _at_once(self, ids: Array) -> Array:
        count, horizon = len(ids), self._horizon
        drawn = self._actions.random_env_actions(count * horizon, self._rng)
        shaped = tree_map(lambda leaf: leaf.reshape(count, horizon, *leaf.shape[1:]), drawn)
        found = self._states.rollout(ids, shaped, self._seeds(count))
        self.steps += int(found.length.sum())
        returns: Array = found.reward @ self._discount ** np.arange(horizon)
        return returns

    def _step_by_step(self, ids: Array, obs: Tree, legal: Array) -> Array:
        """Needed for action masks and for policies, which act on observations; returns are the first mover's."""
        states, count = self._states, len(ids)
        returns, rows, weight, on = np.zeros(count), np.arange(count), 1.0, np.ones(count, np.bool_)
        mover = turn = states.look(ids).to_play
        policy_state = None if self._policy is None else self._policy.initial_state(count)
        kept: list[Array] = []
        try:
            for t in range(self._horizon):
                action, policy_state = self._choose(obs, legal, policy_state, np.full(len(rows), t == 0))
                kept.append(states.new_ids(len(rows)))
                steps = states.expand(ids, action, kept[-1], self._seeds(len(rows)))
                self.steps += len(rows)
                returns[rows] += weight * np.where(turn == mover[rows], 1.0, -1.0) * steps.reward
                legal = self._legal(steps)
                on = ~(steps.terminated | steps.truncated) & legal.any(1)
                rows, ids, turn, weight = rows[on], steps.children[on], steps.to_play[on], weight * self._discount
                if not len(rows):
                    break
                obs, legal = tree_map(lambda leaf: leaf[on], steps.obs), legal[on]  # noqa: B023
                policy_state = None if policy_state is None else tree_map(lambda leaf: leaf[on], policy_state)  # noqa: B023
        finally:
            states.drop(np.concatenate([ids[:0], *kept]))
        return returns

    def _choose(self, obs: Tree, legal: Array, policy_state: Tree, first: Array) -> tuple[Tree, Tree]:
        if self._policy is not None:
            action, policy_state, _ = self._policy.act(obs, policy_state, first)
            return to_numpy(action), to_numpy(policy_state)
        if legal.all():
            return self._actions.random_env_actions(len(first), self._rng), None
        return self._actions.to_env(np.argmax(legal * self._rng.random(legal.shape), axis=1)), None

    def _always_legal(self, ids: Array) -> bool:
        """Whether every action is legal in every state, not only in these."""
        if self._masked is None:
            self._masked = self._states.look(ids[:1]).legal is not None
        return not self._masked

    def _legal(self, steps: Expansion) -> Array:
        return np.ones((len(steps.reward), self._actions.width), np.bool_) if steps.legal is None else steps.legal

    def _seeds(self, count: int) -> Array:
        return self._rng.integers(1, 2**63, count, np.uint64)
