"""Interleaved rounds: every contestant runs several short slices in every round, in rotating order.

A shared machine drifts by more than the differences of interest, so a contestant is compared with another
within each round, and the median and range of those ratios is what counts. The drift is felt within seconds,
so a round goes around several times.
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
"""Ours; another library; an upper bound; a part of ours that only the layer table shows."""

_TIMEOUT_S = 120.0
_WARM_UP_S = 0.2
_TURNS = 5  # of every contestant in a round


@dataclass(frozen=True)
class Slice:
    """What a contestant got done, and the time that it took."""

    steps: int
    seconds: float

    @property
    def rate(self) -> float:
        """Steps per second."""
        return self.steps / self.seconds


class Contestant(Protocol):
    """Something built once that works in slices and uses no CPU between them."""

    def run(self, seconds: float) -> Slice:
        """Work for about that long."""

    def close(self) -> None:
        """End its processes and threads."""


@dataclass(frozen=True)
class Entry:
    """A contestant that can be built within `build_s`; `needs` is what to install when its import fails."""

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
        """Spread of values; of none, all NaN."""
        known = sorted(values)
        if not known:
            return cls(math.nan, math.nan, math.nan)
        return cls(statistics.median(known), known[0], known[-1])


@dataclass(frozen=True)
class Outcome:
    """Rates by contestant, one per round, and why others have none."""

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


def play(
    entries: Sequence[Entry], rounds: int, seconds: float, say: Callable[[str], None] = lambda text: None
) -> Outcome:
    """Build every contestant, let each run for `seconds` per round, in turns, and close them all.

    One that cannot be imported, fails, or gives no answer for two minutes is left out, with the reason.
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
    """All contestants; each round begins with another one."""
    start = number * max(1, len(entries) // rounds) % len(entries)
    return [*entries[start:], *entries[:start]]


@contextlib.contextmanager
def _leaving_out(entry: Entry, skipped: dict[str, str], alive: dict[str, Contestant]) -> Iterator[None]:
    """Note why a contestant failed, and continue without it."""
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
            warnings.simplefilter("ignore")  # peers' advice on how they are used is not for our user
            contestant = entry.build()
        try:
            yield contestant
        finally:
            # A peer that was interrupted may be unable to close itself; its processes end all the same.
            ignored = Exception if entry.kind == "peer" else TookTooLong
            with contextlib.suppress(ignored), deadline(_TIMEOUT_S):
                contestant.close()
    finally:
        # Contestants end in reverse order, so new processes belong to this one.
        for process in multiprocessing.active_children():
            if process.pid not in before:
                process.kill()
                process.join(_TIMEOUT_S)


@contextlib.contextmanager
def _no_old_garbage() -> Iterator[None]:
    """Keep what exists out of garbage collections, or one library's imports would slow down all of them."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
