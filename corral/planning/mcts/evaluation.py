"""Evaluation of leaves: which actions are thought to be good, and what a position is worth to who is to move."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np

from corral.acting.policy import Policy, to_numpy
from corral.core.types import Array, Tree, tree_map
from corral.envs.suites.games.game import Game
from corral.planning.action_set import ActionSet
from corral.planning.mcts.forest import NOT_THERE
from corral.snapshot.array_states import ArrayStates
from corral.snapshot.states import Expansion, States


class LeafValues(NamedTuple):
    """What an evaluation says of rows; `actions` are those that edges stand for, where they are sampled."""

    priors: Array  # [B, edges] float32, -1 where there is no such edge
    values: Array  # [B] float32
    actions: Array | None = None  # [B, edges, ...]


class Evaluate(Protocol):
    """Rows of observations, legal actions and states' ids, 0 where the episode has ended -> a Verdict."""

    def __call__(self, obs: Tree, legal: Array, ids: Array) -> LeafValues:
        """Called once for all leaves of a wave."""


def uniform(legal: Array) -> Array:
    """The same prior for every legal action."""
    share = np.float32(1) / np.maximum(np.count_nonzero(legal, axis=1, keepdims=True), 1).astype(np.float32)
    return np.where(legal, share, np.float32(NOT_THERE))


def know_nothing(obs: Tree, legal: Array, ids: Array) -> LeafValues:
    """Uniform priors, and values of 0: what is left is what the tree itself finds."""
    return LeafValues(uniform(legal), np.zeros(len(legal), np.float32))


class RandomGames:
    """Uniform priors, and the result of a game in which both sides move at random.

    What `RolloutEvaluation` finds with a horizon as long as the game, three times as fast: positions need no ids here.
    """

    def __init__(self, states: ArrayStates, seed: int):
        assert isinstance(states.model, Game)
        self._game, self._states, self._rng = states.model, states, np.random.default_rng(seed)

    def __call__(self, obs: Tree, legal: Array, ids: Array) -> LeafValues:
        """Play on from each position."""
        return LeafValues(uniform(legal), self._play_on(self._states.rows[ids], ids > 0).astype(np.float32))

    def _play_on(self, boards: Array, playing: Array) -> Array:
        """Results to who is to move in each of these positions at first; 0 where nobody plays."""
        game = self._game
        results, sign = np.zeros(len(boards)), 1.0
        rows = np.flatnonzero(playing)
        boards = boards[rows]
        while len(rows):
            _, legal = game.look(boards)
            chosen = np.argmax(legal * self._rng.random(legal.shape), axis=1)
            reward, over = game.move(boards, chosen)
            results[rows] += sign * reward
            rows, boards, sign = rows[~over], boards[~over], -sign
        return results


# Evaluation without a network: what comes of acting on from a leaf, at random or by a policy of the user's own.


class RolloutEvaluation:
    """Priors that prefer nothing, and the discounted return of `horizon` steps: random ones, or those of `policy`.

    A policy begins every rollout without a memory.
    """

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
        self._masked: bool | None = None  # known when there are states
        self.steps = 0
        """Steps that were made."""

    def __call__(self, obs: Tree, legal: Array, ids: Array) -> LeafValues:
        """Act on from every state that has not ended."""
        values = np.zeros(len(ids), np.float32)
        live = np.flatnonzero((ids > 0) & legal.any(1))
        if len(live):
            free = self._policy is None and self._states.players == 1 and self._always_legal(ids[live])
            seen = tree_map(lambda leaf: leaf[live], obs)
            values[live] = self._at_once(ids[live]) if free else self._step_by_step(ids[live], seen, legal[live])
        priors, drawn = self._actions.uniform(legal, self._rng)
        return LeafValues(priors, values, drawn)

    def _at_once(self, ids: Array) -> Array:
        """Random steps, all in one call."""
        count, horizon = len(ids), self._horizon
        drawn = self._actions.random_env_actions(count * horizon, self._rng)
        shaped = tree_map(lambda leaf: leaf.reshape(count, horizon, *leaf.shape[1:]), drawn)
        found = self._states.rollout(ids, shaped, self._seeds(count))
        self.steps += int(found.length.sum())
        returns: Array = found.reward @ self._discount ** np.arange(horizon)
        return returns

    def _step_by_step(self, ids: Array, obs: Tree, legal: Array) -> Array:
        """Since what is legal, and what is seen, is only known then; returns are of who was to move at first."""
        states, count = self._states, len(ids)
        returns, rows, weight, on = np.zeros(count), np.arange(count), 1.0, np.ones(count, np.bool_)
        mover = turn = states.look(ids).to_play
        memory = None if self._policy is None else self._policy.initial_state(count)
        kept: list[Array] = []
        try:
            for t in range(self._horizon):
                action, memory = self._choose(obs, legal, memory, np.full(len(rows), t == 0))
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
                memory = None if memory is None else tree_map(lambda leaf: leaf[on], memory)  # noqa: B023
        finally:
            states.drop(np.concatenate([ids[:0], *kept]))
        return returns

    def _choose(self, obs: Tree, legal: Array, memory: Tree, first: Array) -> tuple[Tree, Tree]:
        if self._policy is None:
            free = legal.all()
            some = (
                self._actions.random_env_actions(len(first), self._rng)
                if free
                else self._actions.to_env(np.argmax(legal * self._rng.random(legal.shape), axis=1))
            )
            return some, None
        action, memory, _ = self._policy.act(obs, memory, first)
        return to_numpy(action), None if memory is None else to_numpy(memory)

    def _always_legal(self, ids: Array) -> bool:
        """Whether every action is legal in every state, not only in those that are looked at."""
        if self._masked is None:
            self._masked = self._states.look(ids[:1]).legal is not None
        return not self._masked

    def _legal(self, steps: Expansion) -> Array:
        return np.ones((len(steps.reward), self._actions.width), np.bool_) if steps.legal is None else steps.legal

    def _seeds(self, count: int) -> Array:
        return self._rng.integers(1, 2**63, count, np.uint64)
