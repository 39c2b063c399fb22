"""`Versus`: a policy against an opponent, in games that are moved for both sides, such as those of simulators."""

from __future__ import annotations

from typing import Any

import numpy as np

from corral.acting.policy import ActContext, Policy, bind_envs, set_context, simulator_steps, to_numpy
from corral.core.errors import UserError
from corral.core.types import Array, Tree, tree_map
from corral.envs.vec_env import VecEnv
from corral.planning.action_set import Choices
from corral.planning.config import SearchConfig
from corral.planning.planner import Planner, make_evaluation

_LONGEST = 10_000  # moves of a random game


class Versus:
    """Moves for `policy` and for `opponent`, `random` or `mcts:1000` (a search by random games). The first player
    alternates between games, as in `BoardEnv`. `extras["agent"]` marks the moves of `policy`.
    """

    def __init__(self, policy: Policy, opponent: str, seed: int):
        self._policy, self._sims, self._rng = policy, read_opponent(opponent), np.random.default_rng(seed)
        self._planner: Planner | None = None

    @property
    def simulator_steps(self) -> int:
        return simulator_steps(self._policy) or 0

    def set_context(self, ctx: ActContext) -> None:
        set_context(self._policy, ctx)

    def bind_envs(self, vec: VecEnv) -> None:
        bind_envs(self._policy, vec)
        self._states = states = vec.states()
        if states.players != 2:
            raise UserError(f"{vec.spec.name} has one player: an opponent needs a two-player game.")
        self._actions = actions = Choices(states.spec.action)
        if self._sims:
            evaluate = make_evaluation(None, states, actions, _LONGEST, 1.0, self._rng)
            config = SearchConfig(root_selection="puct", reuse_tree=False)
            self._planner = Planner(
                states, actions, evaluate, config, vec.num_envs, self._sims, discount=1.0, rng=self._rng
            )

    def initial_state(self, n: int) -> Tree:
        """Environment numbers, the policy's state, its side, and whether it has yet to move in this game."""
        state = {"env": np.arange(n), "side": self._rng.integers(2, size=n), "fresh": np.ones(n, np.bool_)}
        own = self._policy.initial_state(n)
        return state if own is None else state | {"policy": tree_map(np.array, to_numpy(own))}

    def act(self, obs: Tree, state: Tree, first: Array) -> tuple[Tree, Tree, dict[str, Any]]:
        env, fresh = state["env"], state["fresh"] | first
        side = np.where(first, 1 - state["side"], state["side"])
        roots = self._states.save(env)
        views = self._states.look(roots)
        mine = views.to_play == side
        rows, theirs, moves = np.flatnonzero(mine), np.flatnonzero(~mine), np.zeros(len(env), np.int64)
        if len(theirs):
            legal = np.ones((len(env), self._actions.width)) if views.legal is None else views.legal
            moves[theirs] = self._reply(env[theirs], first[theirs], roots[theirs], legal[theirs])
            if (planner := getattr(self._policy, "planner", None)) is not None:
                planner.set_taken(env[theirs], np.full(len(theirs), -1))  # its trees do not contain the next position
        self._states.drop(roots[rows])
        actions, own = self._actions.to_env(moves), state.get("policy")
        if len(rows):
            seen = tree_map(lambda leaf: leaf[rows], obs)
            held = None if own is None else tree_map(lambda leaf: leaf[rows], own)
            chosen, after, _ = self._policy.act(seen, held, fresh[rows])
            actions = tree_map(lambda leaf, new: _put(leaf, rows, new), actions, to_numpy(chosen))
            own = None if own is None else tree_map(lambda leaf, new: _put(leaf, rows, new), own, to_numpy(after))
        state = {"env": env, "side": side, "fresh": fresh & ~mine} | ({} if own is None else {"policy": own})
        return actions, state, {"agent": mine}

    def _reply(self, env_ids: Array, first: Array, roots: Array, legal: Array) -> Array:
        """The opponent's moves from these states, which are no longer needed."""
        if self._planner is not None:
            return self._planner.plan(env_ids, first, roots=roots).best
        self._states.drop(roots)
        moves: Array = np.argmax(legal * (1.0 - self._rng.random(legal.shape)), axis=1)
        return moves


def read_opponent(name: str) -> int:
    """Simulations of an opponent, 0 for `random`; UserError for names that need the rules of the game here."""
    kind, _, sims = name.partition(":")
    if name == "random":
        return 0
    if kind == "mcts" and sims.isdecimal() and int(sims) > 0:
        return int(sims)
    raise UserError(
        f"opponent={name!r} cannot play a simulator's game, whose rules are not known here: use random or mcts:1000."
    )


def _put(leaf: Array, rows: Array, values: Array) -> Array:
    leaf = np.array(leaf)
    leaf[rows] = values
    return leaf
