"""The search: waves of simulations in many trees; a wave steps all its states at once, and evaluates them at once."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from corral.errors import UserError
from corral.planning.game_states import GameStates
from corral.planning.mcts.backup import backup
from corral.planning.mcts.evaluation import Evaluate
from corral.planning.mcts.expansion import expand, plant, reserve
from corral.planning.mcts.forest import Forest, make_forest, make_wave
from corral.planning.mcts.gumbel import Gumbel
from corral.planning.mcts.puct import Puct
from corral.planning.mcts.selection import select_gumbel, select_puct
from corral.types import Array


@dataclass
class Search:
    """Trees over positions of a game, with up to `leaves` simulations of each on their way; 1 is the plain search."""

    states: GameStates
    evaluate: Evaluate
    trees: int
    sims: int
    leaves: int = 1
    discount: float = 1.0
    waves: int = field(default=0, init=False)
    """How many there were, each with one call of `evaluate`."""

    def __post_init__(self) -> None:
        if self.sims < 1 or self.leaves < 1:
            raise UserError(
                f"A search makes at least 1 simulation and has 1 under way, got {self.sims}, {self.leaves}."
            )
        self._nodes = self.sims + 1
        self.forest: Forest = make_forest(self.trees, self._nodes, self.states.game.actions)
        self._wave = make_wave(self.trees * self.leaves)

    @property
    def room(self) -> int:
        """How many states a search takes."""
        return self.trees * self._nodes

    def run(self, positions: Array, rule: Puct | Gumbel) -> Forest:
        """Search from these positions, one tree each; who is to move there is player 0."""
        forest, trees = self.forest, len(positions)
        roots = np.arange(trees) * self._nodes
        obs, legal = self.states.put(roots, positions)
        plant(forest, np.zeros(trees, np.int8), *self.evaluate(obs, legal, roots))
        wanted = np.full(trees, self.sims)
        while wanted.any():
            self._run_wave(wanted, rule)
        return forest

    def _run_wave(self, wanted: Array, rule: Puct | Gumbel) -> None:
        forest, nodes = self.forest, self._nodes
        select = select_gumbel if isinstance(rule, Gumbel) else select_puct
        wave = self._wave.first(select(forest, wanted, self.leaves, rule, self._wave))
        reserve(forest, wave)
        wanted -= np.bincount(wave.tree, minlength=len(wanted))
        live = np.flatnonzero(wave.edge >= 0)
        if len(live):
            fresh = wave if len(live) == len(wave.edge) else wave.at(live)
            children = fresh.tree * nodes + fresh.new
            steps = self.states.expand(fresh.tree * nodes + fresh.node, fresh.edge, children)
            priors, values = self.evaluate(steps.obs, steps.legal, children)
            values[steps.over] = 0.0
            turns = 1 - forest.to_play[fresh.tree, fresh.node]
            expand(forest, fresh, steps.reward, steps.over, turns, priors, values)
        backup(forest, wave, self.discount)
        self.waves += 1
