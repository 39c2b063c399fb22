"""How AlphaZero acts in training: games of a search against itself, its past selves, and scripted players."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from corral.acting.policy import ActContext
from corral.algos.schedule import Schedule
from corral.core.errors import UserError
from corral.core.types import Array, Tree
from corral.envs.normalize import NormalizedVecEnv
from corral.envs.suites.games.game import Game
from corral.envs.suites.games.players import Player, make_player
from corral.envs.vec_env import VecEnv
from corral.nets.actor_critic import ActorCritic
from corral.planning.action_set import Choices
from corral.planning.mcts.network import NetworkEvaluation
from corral.planning.planner import Plan, Planner
from corral.planning.search_policy import draw, sharpened
from corral.snapshot.array_states import ArrayStates
from corral.snapshot.states import States

if TYPE_CHECKING:
    from corral.algos.search.alphazero import Config

_SELF, _PAST = 0, 1  # opponents; scripted ones follow
_PAST_SELVES = 10  # kept; the oldest is dropped first
_PAST_SELF_EVERY = 0.05  # fraction of the run between two of them


class SelfPlay:
    """Plays both sides. Its state holds the opponent and the number of moves of every game.

    Records `to_play`, the player who moved; `legal` moves; `better`, the policy found by a full search where there was
    one (`searched`).
    """

    def __init__(
        self, model: ActorCritic, actions: Choices, config: Config, schedules: Mapping[str, Schedule],
        rng: np.random.Generator,
    ):  # fmt: skip
        self._model, self._actions, self._config, self._schedules, self._rng = model, actions, config, schedules, rng
        self._progress = 0.0
        self._past: deque[dict[str, Any]] = deque(maxlen=_PAST_SELVES)  # weights
        self._next_past = 0.0
        self._planner: Planner | None = None
        self._past_planner: Planner | None = None

    def set_context(self, ctx: ActContext) -> None:
        self._progress = ctx.progress

    def bind_envs(self, vec: VecEnv) -> None:
        if isinstance(vec, NormalizedVecEnv):
            raise UserError("alphazero learns from unscaled game results: set normalize_reward=false.")
        states, config = vec.states(self._config.search.memory_mb), self._config
        if states.players != 2:
            raise UserError(f"alphazero needs a two-player game, and {vec.spec.name} has one player: use ppo-search.")
        self._scripted = self._players(states) if self._schedules["opponent_fraction"].maximum > 0 else []
        self._past_model = copy.deepcopy(self._model)
        self._past_model.use_numpy()
        most = max(round(self._schedules["num_simulations"].maximum), config.fast_simulations)

        def planner(model: ActorCritic) -> Planner:
            evaluate = NetworkEvaluation(model, self._actions, self._rng)
            search = config.search
            return Planner(states, self._actions, evaluate, search, vec.num_envs, most, discount=1.0, rng=self._rng)

        self._planner, self._states = planner(self._model), states
        self._past_planner = planner(self._past_model) if self._schedules["past_self_fraction"].maximum > 0 else None

    @property
    def simulator_steps(self) -> int:
        return sum(planner.simulator_steps for planner in (self._planner, self._past_planner) if planner is not None)

    def initial_state(self, n: int) -> Tree:
        """Environment numbers, moves made, the opponent, and the opponent's side."""
        zeros = np.zeros(n, np.int64)
        return {"env": np.arange(n), "moves": zeros, "opponent": zeros.copy(), "side": zeros.copy()}

    def act(self, obs: Tree, state: Tree, first: Array) -> tuple[Tree, Tree, dict[str, Any]]:
        self._keep_self()
        state = self._begin(state, first)
        env, n = state["env"], len(first)
        roots = self._states.save(env)
        turn = self._states.look(roots).to_play
        extras: dict[str, Any] = {
            "to_play": turn,
            "searched": np.zeros(n, np.bool_),
            "better": np.zeros((n, self._actions.width), np.float32),
            "legal": np.ones((n, self._actions.width), np.bool_),
        }
        moves = np.full(n, -1)
        theirs = (state["opponent"] != _SELF) & (turn == state["side"])
        for kind in np.unique(state["opponent"][theirs]).tolist():
            rows = np.flatnonzero(theirs & (state["opponent"] == kind))
            moves[rows] = self._opponent_moves(kind, env[rows], first[rows], roots[rows])
        mine = np.flatnonzero(~theirs)
        self._invalidate_trees(env[theirs], env[mine])
        full = np.ones(len(mine), np.bool_)
        if self._config.fast_simulations:
            full = self._rng.random(len(mine)) < self._config.full_search_fraction
            fast = mine[~full]
            if len(fast):
                plan = self._plan(env[fast], first[fast], self._config.fast_simulations, 0.0, roots[fast])
                moves[fast] = self._select_moves(plan, state, fast)
        rows = mine[full]
        if len(rows):
            sims, noise = round(self._scheduled("num_simulations")), self._scheduled("root_noise")
            plan = self._plan(env[rows], first[rows], sims, noise, roots[rows])
            moves[rows] = self._select_moves(plan, state, rows)
            extras["better"][rows], extras["legal"][rows], extras["searched"][rows] = plan.policy, plan.legal, True
        return self._actions.to_env(moves), state | {"moves": state["moves"] + 1}, extras

    def _begin(self, state: Tree, first: Array) -> dict[str, Array]:
        rng, n = self._rng, len(first)
        past = self._scheduled("past_self_fraction") if self._past else 0.0
        scripted = self._scheduled("opponent_fraction")
        drawn, side = rng.random(n), rng.integers(2, size=n)
        opponent = np.where(drawn < past, _PAST, _SELF)
        if self._scripted:
            named = _PAST + 1 + rng.integers(len(self._scripted), size=n)
            opponent = np.where((drawn >= past) & (drawn < past + scripted), named, opponent)
        return {
            "env": state["env"],
            "moves": np.where(first, 0, state["moves"]),
            "opponent": np.where(first, opponent, state["opponent"]),
            "side": np.where(first, side, state["side"]),
        }

    def _plan(self, env_ids: Array, first: Array, sims: int, noise: float, roots: Array) -> Plan:
        assert self._planner is not None, "call bind_envs() first"
        return self._planner.plan(env_ids, first, sims, noise, roots)

    def _invalidate_trees(self, theirs: Array, mine: Array) -> None:
        """Invalidate the trees of planners that did not choose the move: they do not contain the next position."""
        for planner, boards in ((self._planner, theirs), (self._past_planner, mine)):
            if planner is not None:
                planner.set_taken(boards, np.full(len(boards), -1))

    def _select_moves(self, plan: Plan, state: dict[str, Array], rows: Array) -> Array:
        """Sample the first moves of a game, and play the best ones afterwards."""
        early = state["moves"][rows] < self._config.temperature_moves
        drawn = draw(sharpened(plan.policy, max(self._scheduled("temperature"), 1e-3)), self._rng)
        edges = np.where(early, drawn, plan.best)
        assert self._planner is not None
        self._planner.set_taken(state["env"][rows], edges)
        return edges

    def _opponent_moves(self, kind: int, env_ids: Array, first: Array, roots: Array) -> Array:
        if kind == _PAST:
            assert self._past_planner is not None
            plan = self._past_planner.plan(env_ids, first, round(self._scheduled("num_simulations")), roots=roots)
            edges = draw(plan.policy, self._rng)
            self._past_planner.set_taken(env_ids, edges)
            return edges
        assert isinstance(self._states, ArrayStates)
        positions = self._states.rows[roots].copy()
        self._states.drop(roots)
        moves: Array = self._scripted[kind - _PAST - 1](positions, self._rng)
        return moves

    def _keep_self(self) -> None:
        """Periodically save the network, and draw which past self plays from now on."""
        if self._past_planner is None or self._progress < self._next_past:
            return
        self._next_past = self._progress + _PAST_SELF_EVERY  # a resumed run begins with none
        self._past.append({name: value.clone() for name, value in self._model.state_dict().items()})
        self._past_model.load_state_dict(self._past[self._rng.integers(len(self._past))])

    def _players(self, states: States) -> list[Player]:
        if not isinstance(states, ArrayStates) or not isinstance(states.model, Game):
            raise UserError(
                "Scripted players exist for Corral's own games only: use past_self_fraction, not opponent_fraction."
            )
        return [make_player(states.model, name) for name in self._config.opponents]

    def _scheduled(self, name: str) -> float:
        return self._schedules[name](self._progress)
