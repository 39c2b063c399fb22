"""Rows of an expansion do not depend on each other, even if children take the places of parents."""

from functools import partial

import numpy as np
import pytest
from helpers.row_cartpole import make as make_row_cartpole
from helpers.snapshot_envs import DeclaredWalk, LockedWalk, Walk

import corral
from corral.envs.suites.games import PettingZoo

TIC_TAC_TOE = pytest.param(partial(PettingZoo, "tictactoe_v3"), id="pettingzoo")
ENVS = ["CartPole-v1", "corral/Connect4-v0", TIC_TAC_TOE, Walk, DeclaredWalk, LockedWalk, make_row_cartpole]


@pytest.mark.parametrize("env", ENVS)
def test_children_may_take_the_places_of_parents(env):
    if isinstance(env, partial):
        pytest.importorskip("pettingzoo")
    with corral.Snapshots(env, rng="replay") as snapshots:
        root = snapshots.save()
        first, second = snapshots.expand([root, root], [0, 1]).children
        apart = snapshots.expand([first, second], [1, 0])
        together = snapshots.expand([first, second], [1, 0], children=[second, first])
        np.testing.assert_array_equal(together.obs, apart.obs)
        np.testing.assert_array_equal(together.reward, apart.reward)
        np.testing.assert_array_equal(snapshots.states.look(np.array([second, first])).obs, apart.obs)
