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
    simulator, seen = states.session.simulator, dict[bytes, int]()
    space = copy.deepcopy(simulator.spec.action_space)
    space.seed(0)

    def draw(rows: StateReplies, count: int) -> Tree:
        """A random action that is legal in the first row, for all rows."""
        action, obs = space.sample(), rows.obs
        if isinstance(obs, dict) and isinstance(space, Discrete):
            action = legal(action, {name: leaf[0] for name, leaf in obs.items()})
        return tree_map(lambda leaf: np.stack([leaf] * count), action)

    for seed in range(_SEEDS):
        (shown,) = states.reset(slots[:1], np.array([seed])).outcomes()
        if seen.setdefault(shown, seed) != seed:
            break
    rows = states.reset(slots, np.array([seed, seen[shown]]))
    root, _ = states.save(slots[:1])
    for _ in range(_STEPS):
        if not _alike(rows) or _ended(rows):
            break
        rows = states.step(slots, draw(rows, 2))
    if _alike(rows):
        return False
    parents, rng = np.repeat(root, _ROWS), np.random.default_rng(0)
    rows = states.load(slots[:1], root)
    for _ in range(_STEPS):
        seeds = rng.integers(1, 2**63, _ROWS, np.uint64) if "reseed" in simulator.hello.capabilities else None
        parents, rows = states.expand(parents, draw(rows, _ROWS), seeds=seeds)
        if not _alike(rows):
            return False
        if _ended(rows):
            break
    return True


def _alike(rows: StateReplies) -> bool:
    return len(set(rows.outcomes())) == 1


def _ended(rows: StateReplies) -> bool:
    """Whether an episode ended or a row failed."""
    return bool((rows.terminated | rows.truncated | (rows.status != 0)).any())
