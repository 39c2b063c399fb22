"""LightZero's C++ tree for MuZero as an engine of `python -m benchmarks search`, with the real game as its model.

The loop is that of its `MuZeroMCTSCtree.search`. Its tree has no illegal actions below the root and no terminal nodes:
an illegal action leaves the game unchanged. The extension is loaded without its package, which has many more
dependencies.
"""

from __future__ import annotations

import copy
import importlib.util
from importlib import metadata
from importlib.machinery import ExtensionFileLoader
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.search.board import boards_of, count_games
from benchmarks.search.engine import Work
from benchmarks.search.task import C_BASE, C_INIT, COLUMNS, Array, Problem, SearchTask
from corral.core.errors import UserError
from corral.envs.suites.games.connect4 import CONNECT4

_NEVER = -1e9  # as a logit
_MIN_MAX_DELTA = 0.01  # its default


class LightZero:
    """One tree per position, with one simulation at a time in each; leaves of all trees are evaluated together."""

    version = ""
    node_bytes: float | None = None

    def __init__(self, problem: Problem):
        self._tree, self._problem = _load_tree(), problem
        self.version = metadata.version("LightZero")
        self._boards = boards_of(problem)

    def perft(self, depth: int) -> list[int]:
        """With Corral's rules, which it searches with."""
        return count_games(depth)

    def outputs(self) -> Array:
        """With Corral's observations."""
        return self._problem.outputs(CONNECT4.look(self._boards)[0])

    def prepare(self, task: SearchTask) -> LightZeroSearcher:
        return LightZeroSearcher(self._tree, self._problem, self._boards, task)


class LightZeroSearcher:
    """LightZero's search loop."""

    def __init__(self, tree: Any, problem: Problem, boards: Array, task: SearchTask):
        self._tree, self._problem, self._boards, self._task = tree, problem, boards, task
        self.work = Work()

    def decide(self, rows: Array) -> Array:
        """Traverse, step, evaluate and back up, once per simulation."""
        tree, count, sims = self._tree, len(rows), self._task.sims
        boards = np.zeros((sims + 1, count, CONNECT4.width), np.int64)
        over = np.zeros((sims + 1, count), np.bool_)
        boards[0] = self._boards[rows]
        logits, _, legal = self._judge(boards[0], over[0])
        choices = [np.flatnonzero(row).tolist() for row in legal]
        roots = tree.Roots(count, choices)
        roots.prepare_no_noise([0.0] * count, logits.tolist(), [1] * count)
        stats = tree.MinMaxStatsList(count)
        stats.set_delta(_MIN_MAX_DELTA)
        for k in range(sims):
            results = tree.ResultsWrapper(num=count)
            paths, places, actions, turns = tree.batch_traverse(
                roots, C_BASE, C_INIT, 1.0, stats, results, copy.deepcopy([1] * count)
            )
            before, ended = boards[paths, places], over[paths, places]
            boards[k + 1], reward, over[k + 1] = _step(before, ended, np.array(actions))
            logits, values, _ = self._judge(boards[k + 1], over[k + 1])
            tree.batch_backpropagate(
                k + 1, 1.0, reward.tolist(), values.tolist(), logits.tolist(), stats, results, turns
            )
        calls = sims + 1 if self._task.evaluator == "network" else 0
        self.work.add(calls, calls * count, sims * count)
        visits = roots.get_distributions()
        return np.array([legal[int(np.argmax(n))] for legal, n in zip(choices, visits, strict=True)])

    def _judge(self, boards: Array, over: Array) -> tuple[Array, Array, Array]:
        obs, legal = CONNECT4.look(boards)
        if self._task.evaluator == "network":
            out = self._problem.outputs(obs)
            logits, values = out[:, :COLUMNS], out[:, COLUMNS]
        else:
            logits, values = np.zeros((len(boards), COLUMNS), np.float32), np.zeros(len(boards), np.float32)
        return np.where(legal, logits, _NEVER), np.where(over, 0.0, values), legal


def _step(boards: Array, over: Array, columns: Array) -> tuple[Array, Array, Array]:
    """Move where that is legal and the game is not over; other boards stay unchanged."""
    _, legal = CONNECT4.look(boards)
    on = np.flatnonzero(legal[np.arange(len(boards)), columns] & ~over)
    after, reward, ended = boards.copy(), np.zeros(len(boards)), over.copy()
    moved = boards[on]
    reward[on], ended[on] = CONNECT4.move(moved, columns[on])
    after[on] = moved
    return after, reward, ended


def _load_tree() -> Any:
    package = importlib.util.find_spec("lzero")
    if package is None or not package.submodule_search_locations:
        raise ModuleNotFoundError("No module named 'lzero'", name="lzero")
    folder = Path(package.submodule_search_locations[0]) / "mcts" / "ctree" / "ctree_muzero"
    files = sorted(folder.glob("mz_tree*.so"))
    if not files:
        raise UserError("LightZero is installed without its compiled C++ tree (mz_tree): install a wheel that has it.")
    spec = importlib.util.spec_from_loader("mz_tree", ExtensionFileLoader("mz_tree", str(files[0])))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
