"""Corral's search as an engine of `python -m benchmarks search`."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
from threadpoolctl import threadpool_limits

from benchmarks.search.board import boards_of, count_games
from benchmarks.search.engine import Work, measure
from benchmarks.search.playouts import RandomPlayouts
from benchmarks.search.task import C_INIT, Array, Problem, SearchTask
from corral import __version__
from corral.core.types import Tree
from corral.envs.suites.games.connect4 import CONNECT4
from corral.nets.numpy_mlp import NumpyMlp
from corral.planning.action_set import Choices
from corral.planning.mcts.evaluation import Evaluate, uniform_evaluation
from corral.planning.mcts.network import FunctionEvaluation
from corral.planning.mcts.search import TreeSearch
from corral.planning.mcts.selection import Puct


class CorralEngine:
    """Trees over positions of Corral's game; the network runs in NumPy."""

    version = __version__

    def __init__(self, problem: Problem):
        threadpool_limits(1, "blas")  # as in training: for small networks, more threads cost more than they gain
        self._network, self.boards = _network(problem), boards_of(problem)
        self.node_bytes: float | None = None

    def perft(self, depth: int) -> list[int]:
        return count_games(depth)

    def outputs(self) -> Array:
        logits, values = self._network(CONNECT4.look(self.boards)[0])
        return np.concatenate([logits, values[:, None]], 1)

    def counts(self, searcher: CorralSearcher, task: SearchTask) -> Array:
        """Visits of the roots' edges for all positions."""
        parts = []
        for at in range(0, len(self.boards), task.trees):
            searcher.decide(np.arange(at, at + task.trees))
            parts.append(searcher.counts(task.trees).copy())
        return np.concatenate(parts)

    def parts(self, task: SearchTask, seconds: float) -> dict[str, float]:
        """Microseconds per simulation of network, simulator and tree."""
        searcher = self.prepare(task)
        searcher.decide(np.arange(task.trees) % len(self.boards))
        searcher.watch()
        found = measure(searcher, task, seconds, 0)
        micros = {name: 1e6 * spent / found["sims"] for name, spent in searcher.parts.items()}
        return {**micros, "tree": 1e6 * found["seconds"] / found["sims"] - sum(micros.values())}

    def prepare(self, task: SearchTask) -> CorralSearcher:
        searcher = CorralSearcher(self.boards, self._network, task)
        forest = searcher.search.forest
        self.node_bytes = (forest.nbytes + 8.0 * CONNECT4.width * forest.state.size) / forest.state.size
        return searcher


class CorralSearcher:
    """A prepared task; `parts` are the seconds of its network and its simulator."""

    def __init__(self, boards: Array, network: Callable[[Tree], tuple[Array, Array]], task: SearchTask):
        self._boards, self._task = boards, task
        self.states = CONNECT4.states()
        self.parts = {"network": 0.0, "simulator": 0.0}
        evaluate: Evaluate
        match task.evaluator:
            case "network":
                actions = Choices(self.states.spec.action)
                evaluate = FunctionEvaluation(network, actions, np.random.default_rng(0))
            case "zero":
                evaluate = uniform_evaluation
            case "rollouts":
                evaluate = RandomPlayouts(self.states, 0)
        self.search = TreeSearch(self.states, evaluate, task.trees, CONNECT4.actions, task.sims, task.leaves)
        self.work = Work()

    def decide(self, rows: Array) -> Array:
        """Plant trees, grow them, and take the most visited moves."""
        search = self.search
        waves, steps = search.waves, search.steps
        trees, roots = np.arange(len(rows)), self.states.put(self._boards[rows])
        search.plant(trees, roots)
        forest = search.forest
        if self._task.bounded:
            forest.low[trees], forest.high[trees] = -1.0, 1.0
        search.grow(trees, Puct(C_INIT))
        stepped = search.steps - steps
        evaluated = (search.waves - waves + 1, stepped + len(rows)) if self._task.evaluator == "network" else (0, 0)
        self.work.add(*evaluated, stepped)
        moves: Array = self.counts(len(rows)).argmax(1)
        return moves

    def counts(self, trees: int) -> Array:
        """Visits of the roots' edges in the last search."""
        visits: Array = self.search.forest.n[:trees, 0]
        return visits

    def watch(self) -> None:
        """Measure the time of the network and of the simulator from now on."""
        self.search.evaluate = self._timed("network", self.search.evaluate)
        states: Any = self.states
        states.expand = self._timed("simulator", states.expand)

    def _timed(self, name: str, function: Any) -> Any:
        def call(*args: Any) -> Any:
            begin = time.perf_counter()
            try:
                return function(*args)
            finally:
                self.parts[name] += time.perf_counter() - begin

        return call


def _network(problem: Problem) -> Callable[[Tree], tuple[Array, Array]]:
    import torch

    layers = []
    for weight, bias in problem.layers:
        layer = torch.nn.Linear(*weight.shape)
        with torch.no_grad():
            layer.weight.copy_(torch.from_numpy(weight.T))
            layer.bias.copy_(torch.from_numpy(bias))
        layers.append(layer)
    mlp = NumpyMlp(layers, "relu")

    def outputs(obs: Tree) -> tuple[Array, Array]:
        out = mlp.forward(obs.reshape(len(obs), -1))[-1]
        return out[:, :-1], out[:, -1]

    return outputs
