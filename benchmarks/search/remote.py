"""The cost of a search whose states are in a C++ simulator, over the link on this machine.

`measure_remote` compiles the examples of the SDK, starts them, and runs the same search with three kinds of messages:
one per wave of leaves, one per step, and separate messages to load, step and save.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common.cpp import SDK, CannotCompile, compile_simulator
from benchmarks.common.rounds import Entry, Slice, Spread, play
from benchmarks.link.sims import free_port
from corral.core.errors import UserError
from corral.core.types import Array, Tree
from corral.envs.backends.simulators.states import LinkStates
from corral.envs.backends.simulators.vec_env import LinkVecEnv
from corral.envs.make import make_vec
from corral.link.client.states import StateClient
from corral.planning.mcts.evaluation import uniform_evaluation
from corral.planning.mcts.search import TreeSearch
from corral.planning.mcts.selection import Puct
from corral.snapshot.states import Expansion

TREES, LEAVES, SIMS = 64, 4, 100
BATCHED, EACH, APART = "one EXPAND for a wave", "one EXPAND for a step", "LOAD, STEP, SAVE for a step"
RAW, MOVES = "EXPAND without a tree", "CartPole, 8 environments"
_ROWS = TREES * LEAVES
_FEW_SIMS = LEAVES  # for slow searches: one wave, so that they end with their slice


@dataclass(frozen=True)
class RemoteFigure:
    """One result; `times` is how many times slower it is than the batched search, within rounds."""

    name: str
    unit: str
    rate: Spread
    times: Spread


@dataclass(frozen=True)
class Cost:
    """Microseconds per row of EXPAND: in total, and in the simulator."""

    row_us: float
    simulator_us: float


def measure_remote(
    folder: Path, rounds: int = 5, seconds: float = 2.0, say: Callable[[str], None] = lambda text: None
) -> tuple[list[RemoteFigure], Cost]:
    """Compile and start the simulators, and run the rounds; UserError if there is no compiler."""
    connect4, cartpole = (compiled(name, folder) for name in ("connect4", "cartpole"))
    entries = [
        Entry(BATCHED, "corral", lambda: RemoteSearch(connect4, LinkStates)),
        Entry(EACH, "layer", lambda: RemoteSearch(connect4, OneByOne, sims=_FEW_SIMS)),
        Entry(APART, "layer", lambda: RemoteSearch(connect4, Apart, sims=_FEW_SIMS)),
        Entry(RAW, "layer", lambda: Expanding(connect4)),
        Entry(MOVES, "corral", lambda: RemoteSearch(cartpole, LinkStates, trees=8, leaves=1, sims=25, moves=True)),
    ]
    outcome = play(entries, rounds, seconds, say)
    if outcome.skipped:
        name, why = next(iter(outcome.skipped.items()))
        raise UserError(f"{name}: {why}.")
    units = {RAW: "steps/s", MOVES: "decisions/s"}
    figures = [
        RemoteFigure(e.name, units.get(e.name, "sims/s"), outcome.spread(e.name), outcome.ratio(BATCHED, e.name))
        for e in entries
    ]
    return figures, row_cost(connect4)


def row_cost(program: Path, seconds: float = 1.0) -> Cost:
    """Where the time of a row goes."""
    expanding = Expanding(program)
    try:
        expanding.run(0.2)
        (session,) = expanding.vec.fleet.sessions.values()
        asked = StateClient(expanding.vec.fleet, session)
        before = asked.stats()["work_us"]
        done = expanding.run(seconds)
        work_us = asked.stats()["work_us"] - before
        return Cost(1e6 / done.rate, work_us / done.steps)
    finally:
        expanding.close()


class RemoteSearch:
    """Searches from the current states of the environments, without a network, one after the other."""

    def __init__(
        self,
        program: Path,
        kind: Callable[[LinkVecEnv], LinkStates],
        *,
        trees: int = TREES,
        leaves: int = LEAVES,
        sims: int = SIMS,
        moves: bool = False,
    ):
        self.vec = _started(program, trees)
        self._trees, self._each = np.arange(trees), trees * (1 if moves else sims)
        self._states = kind(self.vec)
        width = int(self.vec.spec.action_space.n)  # type: ignore[attr-defined]
        self.search = TreeSearch(self._states, uniform_evaluation, trees, width, sims, leaves)
        self.search.run(self._states.save(self._trees), Puct())

    def run(self, seconds: float) -> Slice:
        """As many searches as fit, at least one."""
        start, done = time.perf_counter(), 0
        while not done or time.perf_counter() - start < seconds:
            self.search.run(self._states.save(self._trees), Puct())
            done += self._each
        return Slice(done, time.perf_counter() - start)

    def close(self) -> None:
        self.vec.close()


class Expanding:
    """Expands the same rows repeatedly: the maximum rate of the link."""

    def __init__(self, program: Path):
        self.vec = _started(program, TREES)
        self._states = LinkStates(self.vec)
        self._parents = np.repeat(self._states.save(np.arange(TREES)), LEAVES)
        self._actions = np.arange(_ROWS) % 7

    def run(self, seconds: float) -> Slice:
        start, done, states = time.perf_counter(), 0, self._states
        while time.perf_counter() - start < seconds:
            steps = states.expand(self._parents, self._actions, states.new_ids(_ROWS))
            states.drop(steps.children)
            done += _ROWS
        return Slice(done, time.perf_counter() - start)

    def close(self) -> None:
        self.vec.close()


class OneByOne(LinkStates):
    """Sends one message per step."""

    def expand(self, parents: Array, actions: Tree, children: Array, seeds: Array | None = None) -> Expansion:
        return _joined(
            [self._one(parents[i : i + 1], actions[i : i + 1], children[i : i + 1]) for i in range(len(parents))]
        )

    def _one(self, parent: Array, action: Array, child: Array) -> Expansion:
        return super().expand(parent, action, child)


class Apart(OneByOne):
    """Loads, steps and saves a slot for every step, as a protocol without EXPAND would."""

    def __init__(self, vec: LinkVecEnv):
        super().__init__(vec)
        (session,) = vec.fleet.sessions.values()
        self._slots = StateClient(vec.fleet, session)
        self._slot = self._slots.take_slots(1)

    def _one(self, parent: Array, action: Array, child: Array) -> Expansion:
        base, slots = self._bases[0], self._slots
        slots.load(self._slot, parent | base).require_good("LOAD")
        rows = slots.step(self._slot, action)
        rows.require_good("STEP")
        slots.save(self._slot, child | base)[1].require_good("SAVE")
        reward = rows.reward[:, self._index.turn[parent[0]]]
        leaves = self.spec.observation.flatten(rows.obs)
        self._index.home[child] = 0
        self._index.put(child, rows.to_play, leaves)
        return Expansion(child, rows.obs, reward, rows.terminated, rows.truncated, self._legal(leaves), rows.to_play)


def _joined(rows: list[Expansion]) -> Expansion:
    def join(name: str) -> Any:
        return np.concatenate([getattr(row, name) for row in rows])

    obs = {key: np.concatenate([row.obs[key] for row in rows]) for key in rows[0].obs}
    return Expansion(join("children"), obs, *map(join, ("reward", "terminated", "truncated", "legal", "to_play")))


def compiled(name: str, folder: Path) -> Path:
    """An example of the C++ SDK, compiled into `folder`."""
    try:
        compile_simulator(SDK / "examples" / f"{name}.cpp", folder / name)
    except CannotCompile as error:
        raise UserError(
            f"A search over the link is measured with a C++ simulator, and {error}: install g++."
        ) from error
    return folder / name


def _started(program: Path, num_envs: int) -> LinkVecEnv:
    url = f"tcp://127.0.0.1:{free_port()}"  # a new address: environments at one address share its simulators
    vec = make_vec(url, num_envs, env_kwargs={"sim": f"{program} --connect {{url}} --envs {num_envs + 1}"})
    assert isinstance(vec, LinkVecEnv)
    vec.recv()
    return vec
