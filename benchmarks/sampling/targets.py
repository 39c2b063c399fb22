"""Targets of sampling, whether they are met, and their bounds."""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchmarks.common.report import Verdict
from benchmarks.common.rounds import Outcome, Spread
from benchmarks.sampling import names
from corral.core.machine import cores

if TYPE_CHECKING:
    from benchmarks.sampling.cases import SamplingCase

_CARTPOLE_ENVS, _SLOW_ENVS = 64, 16


def verdicts(case: SamplingCase, outcome: Outcome) -> list[Verdict]:
    """The targets of a case at its size; none if their contestants were skipped."""
    if case.name == "cartpole" and case.num_envs == _CARTPOLE_ENVS:
        return _cartpole(case, outcome)
    if case.name == "pong" and names.ALE in outcome.rates and names.NATIVE in outcome.rates:
        figure = outcome.ratio(names.NATIVE, names.ALE)
        target = f"{case.label}, native over ALE's vector env"
        bound = "Bound: 1, because native is ALE's vector env plus Corral's overhead."
        return [Verdict(target, 0.95, figure, names.NATIVE, bound)]
    if case.name == "slow" and case.num_envs == _SLOW_ENVS and names.FIRST in outcome.rates and case.ideal:
        figure = Spread.of(rate / case.ideal for rate in outcome.rates[names.FIRST])
        target = f"{case.label}, min_ready over the ideal rate"
        bound = f"The ideal is {case.ideal:.0f} steps/s, with no environment waiting for another."
        return [Verdict(target, 0.95, figure, names.FIRST, bound)]
    return []


def _cartpole(case: SamplingCase, outcome: Outcome) -> list[Verdict]:
    ours = [name for name in (names.LOCKSTEP, names.FIRST, names.HALVES) if name in outcome.rates]
    found = []
    for base, needed in ((names.SYNC, 1.6), (names.ASYNC, 10.0)):
        if base in outcome.rates and ours:
            best = max(ours, key=lambda name: outcome.ratio(name, base).median)
            target = f"{case.label}, process over {base}"
            bound = _process_bound(case, outcome, base)
            found.append(Verdict(target, needed, outcome.ratio(best, base), best, bound))
    return found


def _process_bound(case: SamplingCase, outcome: Outcome, base: str) -> str:
    """How fast the same environments step in processes that exchange nothing, and in lockstep."""
    if not {names.BARE_ALL, names.BARE_ONE, names.BARE_LOCKSTEP} <= set(outcome.rates):
        return ""
    silent, lockstep = (outcome.ratio(name, base).median for name in (names.BARE_ALL, names.BARE_LOCKSTEP))
    scaling = outcome.ratio(names.BARE_ALL, names.BARE_ONE).median
    return (
        f"Bound: bare loops in {cores()} processes reach {silent:.2f} without communication ({scaling:.2f} times one "
        f"process), and {lockstep:.2f} if they are woken once per step of all {case.num_envs}, without actions or "
        "results."
    )
