"""States of Atari games: the emulator's own clone, with its RNGs and the action that may stick.

With sticky actions a frame may repeat the action that took effect before it. No clone contains that action, so it is
reconstructed from the requested actions and from the RNG, which is in the clone.
"""

from __future__ import annotations

import sys
import weakref
from collections import deque
from typing import Any

from corral.snapshot.keeper import Env
from corral.snapshot.keepers.fields import Native

_SIZE, _SHIFT, _TWIST = 624, 397, 0x9908B0DF
_WORD, _HIGH = 0xFFFFFFFF, 0x80000000
_DIGITS = b"0123456789"


class MersenneTwister:
    """The RNG whose state, 624 words and a position as C++ writes them, is at the end of a text."""

    def __init__(self, text: bytes):
        first, *rest = text.rsplit(b" ", _SIZE)
        begin = len(first)
        while begin and first[begin - 1] in _DIGITS:
            begin -= 1
        self._state = [first[begin:], *rest[:-1]]
        self._at = int(rest[-1])

    def drawn(self, back: int) -> float:
        """The number drawn `back` numbers before the last; of the last 200."""
        return _temper(self._word(self._at - 1 - back)) / 2.0**32

    def next(self) -> float:
        """The next number; 0 if that needs new words."""
        return _temper(self._word(self._at)) / 2.0**32 if self._at < _SIZE else 0.0

    def _word(self, at: int) -> int:
        """A word; negative indices are words of the previous block."""
        if at >= 0:
            return int(self._state[at])
        at += _SIZE
        return _untwist(self._mixed(at)) & _HIGH | _untwist(self._mixed(at - 1)) & (_HIGH - 1)

    def _mixed(self, at: int) -> int:
        """The value a word was mixed from, besides its predecessor in the same place."""
        return int(self._state[at]) ^ int(self._state[at - _SIZE + _SHIFT])


def _untwist(word: int) -> int:
    odd = word >> 31
    return ((word ^ (_TWIST if odd else 0)) << 1 | odd) & _WORD


def _temper(word: int) -> int:
    word ^= word >> 11
    word ^= word << 7 & 0x9D2C5680
    word ^= word << 15 & 0xEFC60000
    return (word ^ word >> 18) & _WORD


_SEEDS, _DRAWS = 64, 16  # RNGs to choose from, and draws between them
_STATE_BYTES = 15_000
_REMEMBERED = 64  # frames
Asked = tuple[Any, ...]  # an action, and perhaps its strength
_NOTHING: Asked = (0,)
_PADDLES = 8  # bytes after the RNG, in a clone


class WatchedAle:
    """An emulator that records its last actions."""

    def __init__(self, ale: Any):
        self.ale = ale
        self.asked: deque[Asked] = deque([_NOTHING], maxlen=_REMEMBERED)

    def act(self, *asked: Any) -> Any:
        self.asked.append(asked)
        return self.ale.act(*asked)

    def loadROM(self, *path: Any) -> Any:
        self.asked = deque([_NOTHING], maxlen=_REMEMBERED)
        return self.ale.loadROM(*path)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.ale, name)


class AleNative(Native):
    """ALE's clone of its state. The screen is not in it until the next step, so observations are kept separately."""

    def __init__(self, env: Env):
        self._stick: float = _raw(env).getFloat("repeat_action_probability")
        self.is_random = self._stick > 0
        self._seeds: weakref.WeakKeyDictionary[Env, list[Any]] = weakref.WeakKeyDictionary()

    def parts(self, env: Env) -> list[Any]:
        base: Any = env.unwrapped
        if self.is_random and not isinstance(base.ale, WatchedAle):
            base.ale = WatchedAle(base.ale)
        return [base.ale, _raw(env)]

    def save(self, env: Env) -> tuple[Any, Asked]:
        clone = _raw(env).cloneState(include_rng=True)
        return clone, self._took_effect(env, clone) if self.is_random else _NOTHING

    def load(self, env: Env, kept: tuple[Any, Asked]) -> None:
        """Make the action take effect in some state, then restore the clone."""
        (clone, asked), ale, base = kept, _raw(env), env.unwrapped
        if self.is_random:
            ale.restoreState(self._generators(env)[0])
            ale.act(*asked)
            base.ale.asked = deque([asked], maxlen=_REMEMBERED)  # type: ignore[attr-defined]
        ale.restoreState(clone)

    def nbytes(self, kept: tuple[Any, Asked]) -> int:
        return _STATE_BYTES

    def reseed(self, env: Env, seed: int) -> None:
        """Restore another RNG first and then the rest: ALE takes no seeds during a game."""
        if self.is_random:
            ale = _raw(env)
            rest = ale.cloneState(include_rng=False)
            ale.restoreState(self._generators(env)[seed % _SEEDS])
            ale.restoreState(rest)

    def _took_effect(self, env: Env, clone: Any) -> Asked:
        """The last requested action in a frame that did not repeat the one before."""
        twister, remembered = _twister(clone), env.unwrapped.ale.asked  # type: ignore[attr-defined]
        for back, asked in enumerate(reversed(remembered)):
            if twister.drawn(2 * back + 1) >= self._stick:  # a frame draws for both players, the first one first
                return tuple(asked)
        return tuple(remembered[0])

    def _generators(self, env: Env) -> list[Any]:
        """States of an idle game whose RNGs all differ; the first one's next action does not stick."""
        found = self._seeds.get(env)
        if found is None:
            ale, found = _raw(env), []
            before = ale.cloneState(include_rng=True)
            while len(found) < _SEEDS:
                if ale.game_over():
                    ale.reset_game()
                for _ in range(_DRAWS):
                    ale.act(0)
                state = ale.cloneState(include_rng=True)
                if found or _twister(state).next() >= self._stick:
                    found.append(state)
            ale.restoreState(before)
            self._seeds[env] = found
        return found


def ale_native(env: Env) -> AleNative | None:
    """For an environment that is an ALE game."""
    module = sys.modules.get("ale_py")
    found = module is not None and isinstance(_raw(env), module.ALEInterface)
    return AleNative(env) if found else None


def _raw(env: Env) -> Any:
    ale = getattr(env.unwrapped, "ale", None)
    return ale.ale if isinstance(ale, WatchedAle) else ale


def _twister(clone: Any) -> MersenneTwister:
    return MersenneTwister(bytes(clone.serialize())[:-_PADDLES])
