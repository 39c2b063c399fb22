"""Interleaved rounds: every contestant runs several short slices in every round, in rotating order.

The speed of a shared machine drifts by more than the differences of interest. Contestants are therefore compared within
rounds, by the median and range of their ratios. The drift shows within seconds, so a round has several turns.
"""

from __future__ import annotations

import contextlib
import gc
import math
import multiprocessing
import statistics
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from benchmarks.common.deadline import TookTooLong, deadline
from corral.core.errors import UserError

Kind = Literal["corral", "peer", "bound", "layer"]
"""Corral; another library; an upper bound; a layer of Corral that only the layer table shows."""

_TIMEOUT_S = 120.0
_WARM_UP_S = 0.2
_TURNS = 5  # of every contestant in a round


@dataclass(frozen=True)
class Slice:
    """Steps that a contestant made, and the time that they took."""

    steps: int
    seconds: float

    @property
    def rate(self) -> float:
        """Steps per second."""
        return self.steps / self.seconds


class Contestant(Protocol):
    """Built once, runs in slices, and uses no CPU between them."""

    def run(self, seconds: float) -> Slice:
        """Run for about this long."""

    def close(self) -> None:
        """End its processes and threads."""


@dataclass(frozen=True)
class Entry:
    """A contestant that is built within `build_s`; `needs` tells what to install if its import fails."""

    name: str
    kind: Kind
    build: Callable[[], Contestant]
    needs: str = ""
    build_s: float = _TIMEOUT_S


@dataclass(frozen=True)
class Spread:
    """Median and range of a few values."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        """Spread of values; NaN if there are none."""
        known = sorted(values)
        if not known:
            return cls(math.nan, math.nan, math.nan)
        return cls(statistics.median(known), known[0], known[-1])


@dataclass(frozen=True)
class Outcome:
    """Rates by contestant, one per round, and the reasons why others were skipped."""

    rates: Mapping[str, Sequence[float]]
    skipped: Mapping[str, str]

    def spread(self, name: str) -> Spread:
        """Median and range of a contestant's rates."""
        return Spread.of(self.rates.get(name, ()))

    def ratios(self, name: str, base: str) -> list[float]:
        """A contestant's rate over another's, round by round."""
        pairs = zip(self.rates.get(name, ()), self.rates.get(base, ()), strict=False)
        return [ours / theirs for ours, theirs in pairs]

    def ratio(self, name: str, base: str) -> Spread:
        """Median and range of the ratios."""
        return Spread.of(self.ratios(name, base))

    def fastest(self, names: Iterable[str]) -> str | None:
        """The contestant with the highest median; None if none of them ran."""
        ran = [name for name in names if name in self.rates]
        return max(ran, key=lambda name: self.spread(name).median) if ran else None


def play(
    entries: Sequence[Entry], rounds: int, seconds: float, say: Callable[[str], None] = lambda text: None
) -> Outcome:
    """Build all contestants, run each for `seconds` per round, in turns, and close them.

    A contestant that cannot be imported, fails, or does not answer for two minutes is skipped, with the reason.
    """
    skipped: dict[str, str] = {}
    rates: dict[str, list[float]] = {}
    with contextlib.ExitStack() as stack:
        alive: dict[str, Contestant] = {}
        for entry in entries:
            say(f"building {entry.name}")
            with _leaving_out(entry, skipped, alive):
                alive[entry.name] = stack.enter_context(_built(entry))
                alive[entry.name].run(min(_WARM_UP_S, seconds))
        stack.enter_context(_no_old_garbage())
        for number in range(rounds):
            done: dict[str, list[Slice]] = {}
            for turn in range(_TURNS):
                for entry in rotated(entries, number * _TURNS + turn, rounds * _TURNS):
                    if entry.name not in alive:
                        continue
                    say(f"round {number + 1} of {rounds}: {entry.name}")
                    with _leaving_out(entry, skipped, alive), deadline(_TIMEOUT_S + 2 * seconds):
                        result = alive[entry.name].run(seconds / _TURNS)
                        done.setdefault(entry.name, []).append(result)
            for name, slices in done.items():
                total = Slice(sum(s.steps for s in slices), sum(s.seconds for s in slices))
                rates.setdefault(name, []).append(total.rate)
        say("closing")
    return Outcome({name: rates[name] for name in alive if name in rates}, skipped)


def rotated(entries: Sequence[Entry], number: int, rounds: int) -> list[Entry]:
    """All contestants; each round starts with a different one."""
    start = number * max(1, len(entries) // rounds) % len(entries)
    return [*entries[start:], *entries[:start]]


@contextlib.contextmanager
def _leaving_out(entry: Entry, skipped: dict[str, str], alive: dict[str, Contestant]) -> Iterator[None]:
    """Record why a contestant failed, and continue without it."""
    try:
        yield
    except UserError as error:
        skipped[entry.name] = str(error)
    except ImportError as error:
        skipped[entry.name] = f"not installed ({error.name or error}): {entry.needs}"
    except Exception as error:
        text = " ".join(str(error).split())
        skipped[entry.name] = f"failed: {type(error).__name__}: {text[:200]}"
    if entry.name in skipped:
        alive.pop(entry.name, None)


@contextlib.contextmanager
def _built(entry: Entry) -> Iterator[Contestant]:
    """A contestant, closed at the end, whose processes end even if closing fails."""
    before = {process.pid for process in multiprocessing.active_children()}
    try:
        with deadline(entry.build_s), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # warnings of other libraries are not for our user
            contestant = entry.build()
        try:
            yield contestant
        finally:
            # A peer that was interrupted may be unable to close itself; its processes are killed below.
            ignored = Exception if entry.kind == "peer" else TookTooLong
            with contextlib.suppress(ignored), deadline(_TIMEOUT_S):
                contestant.close()
    finally:
        # Contestants are closed in reverse order, so new processes belong to this one.
        for process in multiprocessing.active_children():
            if process.pid not in before:
                process.kill()
                process.join(_TIMEOUT_S)


@contextlib.contextmanager
def _no_old_garbage() -> Iterator[None]:
    """Exclude existing objects from garbage collection, or one library's imports would slow down all others."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
