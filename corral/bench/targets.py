"""What sampling must reach, whether it did, and what bounds it."""

from __future__ import annotations

from dataclasses import dataclass

from corral.bench import cases
from corral.bench.cases import Case
from corral.bench.rounds import Outcome, Spread
from corral.core.machine import cores

_CARTPOLE_ENVS, _SLOW_ENVS = 64, 16


@dataclass(frozen=True)
class Verdict:
    """A target and the figure measured for it, both as ratios; `bound` is what limits the figure."""

    target: str
    needed: float
    figure: Spread
    contestant: str
    bound: str

    @property
    def reached(self) -> bool:
        """Whether the median reaches the target."""
        return self.figure.median >= self.needed

    def __str__(self) -> str:
        word = "reached" if self.reached else "NOT reached"
        figure = f"{self.figure.median:.2f} (range {self.figure.low:.2f} to {self.figure.high:.2f})"
        return f"{word}: {self.target} >= {self.needed:g}: {figure}, by {self.contestant}. {self.bound}"


def verdicts(case: Case, outcome: Outcome) -> list[Verdict]:
    """The targets of a case at its size; none when what they speak of was left out."""
    if case.name == "cartpole" and case.num_envs == _CARTPOLE_ENVS:
        return _cartpole(case, outcome)
    if case.name == "pong" and cases.ALE in outcome.rates and cases.NATIVE in outcome.rates:
        figure = outcome.ratio(cases.NATIVE, cases.ALE)
        target = f"{case.label}, native over ALE's vector env"
        bound = "Native is ALE's vector env and what Corral adds to it, so 1 is the bound."
        return [Verdict(target, 0.95, figure, cases.NATIVE, bound)]
    if case.name == "slow" and case.num_envs == _SLOW_ENVS and cases.FIRST in outcome.rates and case.ideal:
        figure = Spread.of(rate / case.ideal for rate in outcome.rates[cases.FIRST])
        target = f"{case.label}, min_ready over the ideal rate"
        bound = f"The ideal is {case.ideal:.0f} steps/s: nobody ever waits for anybody."
        return [Verdict(target, 0.95, figure, cases.FIRST, bound)]
    return []


def _cartpole(case: Case, outcome: Outcome) -> list[Verdict]:
    ours = [name for name in (cases.LOCKSTEP, cases.FIRST, cases.HALVES) if name in outcome.rates]
    found = []
    for base, needed in ((cases.SYNC, 1.6), (cases.ASYNC, 10.0)):
        if base in outcome.rates and ours:
            best = max(ours, key=lambda name: outcome.ratio(name, base).median)
            target = f"{case.label}, process over {base}"
            bound = _process_bound(case, outcome, base)
            found.append(Verdict(target, needed, outcome.ratio(best, base), best, bound))
    return found


def _process_bound(case: Case, outcome: Outcome, base: str) -> str:
    """How fast the same environments step in processes that exchange nothing, and next to nothing."""
    if not {cases.BARE_ALL, cases.BARE_ONE, cases.BARE_LOCKSTEP} <= set(outcome.rates):
        return ""
    silent, lockstep = (outcome.ratio(name, base).median for name in (cases.BARE_ALL, cases.BARE_LOCKSTEP))
    scaling = outcome.ratio(cases.BARE_ALL, cases.BARE_ONE).median
    return (
        f"Bound: bare loops in {cores()} processes reach {silent:.2f} without any communication ({scaling:.2f} "
        f"times one such loop), and {lockstep:.2f} when they are only woken once for each step of all "
        f"{case.num_envs}, without actions or results."
    )
