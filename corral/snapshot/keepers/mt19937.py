"""The Mersenne twister as C++ writes it, and the numbers in [0, 1) that it gave last or gives next."""

from __future__ import annotations

_SIZE, _SHIFT, _TWIST = 624, 397, 0x9908B0DF
_WORD, _HIGH = 0xFFFFFFFF, 0x80000000
_DIGITS = b"0123456789"


class Words:
    """The state that a text ends with: 624 words and a position. A word gives a number in [0, 1)."""

    def __init__(self, text: bytes):
        first, *rest = text.rsplit(b" ", _SIZE)
        begin = len(first)
        while begin and first[begin - 1] in _DIGITS:
            begin -= 1
        self._words = [first[begin:], *rest[:-1]]
        self._at = int(rest[-1])

    def drawn(self, back: int) -> float:
        """The number that was given `back` numbers before the last; of the last 200."""
        return _temper(self._word(self._at - 1 - back)) / 2.0**32

    def next(self) -> float:
        """The number that comes next; 0 when that needs new words."""
        return _temper(self._word(self._at)) / 2.0**32 if self._at < _SIZE else 0.0

    def _word(self, at: int) -> int:
        """A word; below 0, one of those before these."""
        if at >= 0:
            return int(self._words[at])
        at += _SIZE
        return _untwist(self._mixed(at)) & _HIGH | _untwist(self._mixed(at - 1)) & (_HIGH - 1)

    def _mixed(self, at: int) -> int:
        """What a word was mixed from, beside the word of its own place before."""
        return int(self._words[at]) ^ int(self._words[at - _SIZE + _SHIFT])


def _untwist(word: int) -> int:
    """What a word was before it was shifted and mixed."""
    odd = word >> 31
    return ((word ^ (_TWIST if odd else 0)) << 1 | odd) & _WORD


def _temper(word: int) -> int:
    word ^= word >> 11
    word ^= word << 7 & 0x9D2C5680
    word ^= word << 15 & 0xEFC60000
    return (word ^ word >> 18) & _WORD
