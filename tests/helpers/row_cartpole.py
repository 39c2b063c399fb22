"""Gymnasium's CartPole as a function of rows: the same numbers, many states at once."""

import math

import gymnasium
import numpy as np
from gymnasium.envs.classic_control.cartpole import CartPoleEnv

GRAVITY, POLE_MASS, TOTAL, HALF, FORCE, TAU = 9.8, 0.1, 1.1, 0.5, 10.0, 0.02
X_LIMIT, ANGLE_LIMIT = 2.4, 12 * 2 * math.pi / 360


class CartPoleRows:
    width, stochastic = 4, False

    def look(self, rows):
        return rows.astype(np.float32)

    def step(self, rows, actions, seeds):
        x, v, angle, spin = rows.T
        force = np.where(actions == 1, FORCE, -FORCE)
        cos, sin = np.cos(angle), np.sin(angle)
        temp = (force + POLE_MASS * HALF * np.square(spin) * sin) / TOTAL
        turn = (GRAVITY * sin - cos * temp) / (HALF * (4.0 / 3.0 - POLE_MASS * np.square(cos) / TOTAL))
        push = temp - POLE_MASS * HALF * turn * cos / TOTAL
        rows[:] = np.stack([x + TAU * v, v + TAU * push, angle + TAU * spin, spin + TAU * turn], 1)
        fallen = (np.abs(rows[:, 0]) > X_LIMIT) | (np.abs(rows[:, 2]) > ANGLE_LIMIT)
        return np.ones(len(rows)), fallen, np.zeros(len(rows), np.bool_)


class RowCartPole(CartPoleEnv):
    rows = CartPoleRows()

    @property
    def row(self):
        return np.array(self.state, np.float64)

    @row.setter
    def row(self, row):
        self.state, self.steps_beyond_terminated = np.array(row), None


def make():
    """As Gymnasium makes it."""
    return gymnasium.wrappers.TimeLimit(RowCartPole(), 500)
