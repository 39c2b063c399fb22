"""Connect Four solver: alpha-beta on bitboards, within a budget of positions.

The score of a position is the result of perfect play for the player to move: 0 a draw, n > 0 a win with the (n + 1)th
last of one's own 21 stones, so earlier wins score higher, and -n a loss. Moves that let the opponent win at once are
skipped, moves with most threats come first and central ones before others, score bounds are kept in a table, and the
score is found by null-window searches (after Pascal Pons, blog.gamesolver.org).
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import numpy as np

from corral.core.jit import compiled
from corral.core.types import Array
from corral.envs.suites.games.connect4 import COLUMNS, ROWS

_H = ROWS + 1
_SQUARES = ROWS * COLUMNS
_BOTTOM = sum(1 << (_H * column) for column in range(COLUMNS))
_BOARD = _BOTTOM * ((1 << ROWS) - 1)
_ORDER = np.array([3, 2, 4, 1, 5, 0, 6])
ILLEGAL, UNKNOWN = np.int64(-127), np.int64(127)  # scores of illegal moves, and of those that exceeded the budget
_SPENT, _AGE = 0, 1  # indices of `clock`: positions visited, and the age of valid table entries
_LOWER = 64  # added to lower bounds in the table


class Memory(NamedTuple):
    """A solver's working arrays."""

    keys: Array  # [2^bits] int64, positions and ages of the table's entries
    bounds: Array  # [2^bits] int8, upper bounds, or lower ones plus `_LOWER`
    clock: Array  # [2] int64
    tries: Array  # [stones, column] squares to try, the best last
    worth: Array


@partial(compiled, inline="always")
def _count(bits: Any) -> Any:
    n = 0
    while bits:
        bits &= bits - 1
        n += 1
    return n


@compiled
def _threats(stones: Any, every: Any) -> Any:
    """Empty squares that would complete four of these stones."""
    found = (stones << 1) & (stones << 2) & (stones << 3)  # upwards
    for shift in (_H, _H - 1, _H + 1):
        pair = (stones << shift) & (stones << 2 * shift)
        found |= pair & ((stones << 3 * shift) | (stones >> shift))
        pair = (stones >> shift) & (stones >> 2 * shift)
        found |= pair & ((stones << shift) | (stones >> 3 * shift))
    return found & (_BOARD ^ every)


@compiled
def _safe(own: Any, every: Any) -> Any:
    """Squares that can be taken without letting the opponent win at once; neither player can win at once here."""
    squares = (every + _BOTTOM) & _BOARD
    against = _threats(own ^ every, every)
    forced = squares & against
    if forced:
        if forced & (forced - 1):
            return np.int64(0)  # two threats cannot be stopped
        squares = forced
    return squares & ~(against >> 1)  # not below a square that the opponent needs


@compiled
def _order(own: Any, every: Any, squares: Any, tries: Array, worth: Array) -> Any:
    """Sort squares by their threats, central ones last among equals; returns how many."""
    n = 0
    for k in range(COLUMNS - 1, -1, -1):
        square = squares & (((1 << ROWS) - 1) << _H * _ORDER[k])
        if square:
            threatened, at = _count(_threats(own | square, every)), n
            while at and worth[at - 1] > threatened:
                tries[at], worth[at] = tries[at - 1], worth[at - 1]
                at -= 1
            tries[at], worth[at] = square, threatened
            n += 1
    return n


@partial(compiled, nogil=True)
def _negamax(own: Any, every: Any, stones: Any, alpha: Any, beta: Any, memory: Memory, budget: Any) -> Any:
    """The score if it is between alpha and beta, else a bound on the same side; no player can win at once."""
    memory.clock[_SPENT] += 1
    if memory.clock[_SPENT] > budget:
        return UNKNOWN
    squares = _safe(own, every)
    if squares == 0:
        return -((_SQUARES - stones) // 2)  # the opponent wins with the next stone
    if stones >= _SQUARES - 2:
        return np.int64(0)
    alpha, high = max(alpha, -((_SQUARES - 2 - stones) // 2)), (_SQUARES - 1 - stones) // 2
    key = own + every  # one number for each position, of 49 bits
    place = (key * np.int64(0x9E3779B97F4A7C1) >> 12) & (len(memory.keys) - 1)
    stamp = key | memory.clock[_AGE] << 49
    if memory.keys[place] == stamp:
        known = np.int64(memory.bounds[place])
        if known > _LOWER // 2:
            alpha = max(alpha, known - _LOWER)
        else:
            high = min(high, known)
    if alpha >= beta:
        return alpha
    beta = min(beta, high)
    if alpha >= beta:
        return beta
    tries = memory.tries[stones]
    for k in range(_order(own, every, squares, tries, memory.worth[stones]) - 1, -1, -1):
        value = _negamax(own ^ every, every | tries[k], stones + 1, -beta, -alpha, memory, budget)
        if value == UNKNOWN:
            return UNKNOWN
        if -value >= beta:
            memory.keys[place], memory.bounds[place] = stamp, _LOWER - value
            return -value
        alpha = max(alpha, -value)
    memory.keys[place], memory.bounds[place] = stamp, alpha
    return alpha


@partial(compiled, nogil=True)
def _score(own: Any, every: Any, stones: Any, widest: Any, memory: Memory, budget: Any) -> Any:
    if stones == _SQUARES:
        return np.int64(0)
    if _threats(own, every) & (every + _BOTTOM):
        return min((_SQUARES + 1 - stones) // 2, widest)
    low, high = max(-((_SQUARES - stones) // 2), -widest), min((_SQUARES + 1 - stones) // 2, widest)
    while low < high:
        middle = low + (high - low) // 2
        if middle <= 0 and -(-low // 2) < middle:  # near 0 first: the winner is cheaper to find than the length
            middle = -(-low // 2)
        elif middle >= 0 and high // 2 > middle:
            middle = high // 2
        found = _negamax(own, every, stones, middle, middle + 1, memory, budget)
        if found == UNKNOWN:
            return UNKNOWN
        if found <= middle:
            high = found
        else:
            low = found
    return max(-widest, min(low, widest))


@partial(compiled, nogil=True)
def _score_moves(positions: Array, widest: Any, memory: Memory, budget: Any, out: Array) -> None:
    """Scores of all moves, for their player. Every position gets the whole budget and an empty table."""
    for i in range(len(positions)):
        own, every = positions[i]
        stones = _count(every)
        memory.clock[_SPENT], memory.clock[_AGE] = 0, memory.clock[_AGE] + 1
        if memory.clock[_AGE] == 1 << 14:
            memory.keys[:], memory.clock[_AGE] = 0, 1
        for k in range(COLUMNS):
            column = _ORDER[k]
            square = (every + (np.int64(1) << _H * column)) & (np.int64((1 << ROWS) - 1) << _H * column) & ~every
            if square == 0:
                out[i, column] = ILLEGAL
            elif square & _threats(own, every):
                out[i, column] = min((_SQUARES + 1 - stones) // 2, widest)
            else:
                found = _score(own ^ every, every | square, stones + 1, widest, memory, budget)
                out[i, column] = UNKNOWN if found == UNKNOWN else -found


class Connect4Solver:
    """Solves positions that are not over, with a table of 2^bits entries of 9 bytes."""

    def __init__(self, bits: int = 20):
        lists = np.zeros((2, _SQUARES, COLUMNS), np.int64)
        self._memory = Memory(
            np.zeros(1 << bits, np.int64), np.zeros(1 << bits, np.int8), np.zeros(2, np.int64), lists[0], lists[1]
        )

    def scores(self, positions: Array, budget: int) -> Array:
        """Exact scores of all moves [n, 7], for their player; ILLEGAL or UNKNOWN where there is none."""
        return self._solve(positions, _SQUARES, budget)

    def values(self, positions: Array, budget: int) -> Array:
        """1 for moves that win, 0 for draws and -1 for losses; much cheaper than scores."""
        return self._solve(positions, 1, budget)

    def _solve(self, positions: Array, widest: int, budget: int) -> Array:
        out = np.zeros((len(positions), COLUMNS), np.int64)
        _score_moves(np.asarray(positions, np.int64), widest, self._memory, budget, out)
        return out
