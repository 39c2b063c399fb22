"""Whether planners foresee what a simulator draws: resets that look alike continue differently for another seed, and
chance seeds do not change that (the same trial as in `corral/snapshot/keepers/trial.py`).
"""

from __future__ import annotations

import copy

import numpy as np
from gymnasium.spaces import Discrete

from corral.core.gym_env import legal
from corral.core.types import Array, Tree, tree_map
from corral.link.client.states import StateClient, StateReplies

_STEPS, _SEEDS, _ROWS = 12, 8, 16


def foresees(states: StateClient, slots: Array) -> bool:
    """Try it in two free slots; False as well if no two of some seeds look alike, or if a row fails."""
    pair = _find_alike(states, slots[:1])
    if pair is None:
        return False
    draw = _LegalActions(states)
    shown = states.reset(slots, np.array(pair))
    root, _ = states.save(slots[:1])
    taken: list[Tree] = []
    while _alike(shown):
        if len(taken) == _STEPS or _over(shown):
            return False
        taken.append(draw(shown))
        shown = states.step(slots, _repeat(taken[-1], 2))
    parents, rng = np.repeat(root, _ROWS), np.random.default_rng(0)
    reseeds = "reseed" in states.session.simulator.hello.capabilities
    for k in range(_STEPS):
        action = taken[k] if k < len(taken) else draw(shown)
        seeds = rng.integers(1, 2**63, _ROWS, np.uint64) if reseeds else None
        parents, shown = states.expand(parents, _repeat(action, _ROWS), seeds=seeds)
        if not _alike(shown):
            return False
        if _over(shown):
            break
    return True


class _LegalActions:
    """Random actions that are legal in the first of some rows."""

    def __init__(self, states: StateClient):
        self._space = copy.deepcopy(states.session.simulator.spec.action_space)
        self._space.seed(0)

    def __call__(self, rows: StateReplies) -> Tree:
        action, obs = self._space.sample(), rows.obs
        if isinstance(obs, dict) and isinstance(self._space, Discrete):
            return legal(action, {name: leaf[0] for name, leaf in obs.items()})
        return action


def _repeat(action: Tree, count: int) -> Tree:
    return tree_map(lambda leaf: np.stack([leaf] * count), action)


def _over(rows: StateReplies) -> bool:
    return bool((rows.terminated | rows.truncated | (rows.status != 0)).any())


def _find_alike(states: StateClient, slot: Array) -> tuple[int, int] | None:
    """Two seeds whose resets show the same."""
    seen: dict[bytes, int] = {}
    for seed in range(_SEEDS):
        shown = b"".join(leaf.tobytes() for leaf in states.reset(slot, np.array([seed])).leaves)
        if shown in seen:
            return seen[shown], seed
        seen[shown] = seed
    return None


def _alike(rows: StateReplies) -> bool:
    """Whether all rows are equal."""
    columns: list[Array] = [rows.reward, rows.flags, rows.to_play, *rows.leaves]
    return all(row.tobytes() == column[0].tobytes() for column in columns for row in column[1:])
