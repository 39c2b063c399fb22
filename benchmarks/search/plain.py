"""PUCT written directly from the paper, one simulation at a time: the reference for the compiled search."""

from __future__ import annotations

import math

import numpy as np

from benchmarks.search.task import C_BASE, C_INIT, COLUMNS, Array, Problem
from corral.envs.suites.games.connect4 import CONNECT4


class _Node:
    def __init__(self, board: Array, priors: dict[int, float], value: float, over: bool):
        self.board, self.priors, self.value, self.over = board, priors, value, over
        self.children: dict[int, _Node] = {}
        self.rewards: dict[int, float] = {}
        self.n, self.total = dict.fromkeys(priors, 0), dict.fromkeys(priors, 0.0)
        self.visits = 1


class PlainSearch:
    """One tree."""

    def __init__(self, problem: Problem, board: Array):
        self._problem = problem
        self.root = self._make(board, False)
        self._low = self._high = self.root.value

    def counts(self, sims: int) -> Array:
        """Visits of the root's edges after `sims` simulations."""
        for _ in range(sims):
            self._simulate()
        return np.array([self.root.n.get(column, 0) for column in range(COLUMNS)])

    def _simulate(self) -> None:
        path, node = [], self.root
        while not node.over:
            action = self._choose(node)
            path.append((node, action))
            if action not in node.children:
                board = node.board.copy()
                reward, over = CONNECT4.move(board[None], np.array([action]))
                node.rewards[action] = float(reward[0])
                node.children[action] = node = self._make(board, bool(over[0]))
                break
            node = node.children[action]
        result = node.value
        for above, action in reversed(path):
            result = above.rewards[action] - result  # the other player moves below
            above.n[action] += 1
            above.total[action] += result
            above.visits += 1
            self._low, self._high = min(self._low, result), max(self._high, result)

    def _choose(self, node: _Node) -> int:
        explore = (C_INIT + math.log((node.visits + C_BASE + 1) / C_BASE)) * math.sqrt(node.visits)
        unknown, span = (node.value + sum(node.total.values())) / node.visits, self._high - self._low

        def score(action: int) -> float:
            q = node.total[action] / node.n[action] if node.n[action] else unknown
            return ((q - self._low) / span if span > 0 else q) + explore * node.priors[action] / (1 + node.n[action])

        return max(sorted(node.priors), key=score)

    def _make(self, board: Array, over: bool) -> _Node:
        if over:
            return _Node(board, {}, 0.0, True)
        obs, legal = CONNECT4.look(board[None])
        out = self._problem.outputs(obs)[0]
        columns = np.flatnonzero(legal[0])
        weights = np.exp(out[columns].astype(np.float64) - float(out[columns].max()))
        shares = (weights / weights.sum()).astype(np.float32).tolist()
        return _Node(board, dict(zip(columns.tolist(), shares, strict=True)), float(out[COLUMNS]), False)
