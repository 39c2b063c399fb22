"""Checks of an environment's states: can it be planned on, and at what cost?"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import gymnasium
import numpy as np
from gymnasium.wrappers import TimeLimit

from corral.core.errors import EnvFailed, UserError
from corral.core.gym_env import legal, sample_actions
from corral.core.machine import resident_bytes
from corral.core.spaces import Layout
from corral.core.types import tree_map
from corral.planning.snapshots import Snapshots
from corral.snapshot.env_states import EnvStates
from corral.snapshot.keepers.trial import SharedState
from corral.snapshot.states import Level
from corral.testing.checks.env import Outcome, Subject

Env = gymnasium.Env[Any, Any]


@dataclass
class Observed:
    """Results of one step, as bytes where they must be equal."""

    obs: bytes
    reward: float
    terminated: bool
    truncated: bool
    info: dict[str, Any] = field(default_factory=dict, compare=False)

    @property
    def ended(self) -> bool:
        return self.terminated or self.truncated


class UninterruptedRun:
    """A run that saves, loads and expansions must reproduce: random legal actions, with a reset after every end."""

    def __init__(self, env: Env, steps: int):
        self.actions: list[Any] = []
        self.seen: list[Observed] = []
        _, info = env.reset(seed=0)
        for action in sample_actions(env, steps, 5):
            if self.seen and self.seen[-1].ended:
                _, info = env.reset()
            self.actions.append(legal(action, info))
            self.seen.append(make_step(env, self.actions[-1]))
            info = self.seen[-1].info
        env.close()

    def follow(self, env: Any, at: int) -> Observed:
        """Make step `at` of the run, after a reset if the step before ended an episode."""
        if at and self.seen[at - 1].ended:
            env.reset()
        return make_step(env, self.actions[at])

    def expand_along(self, snapshots: Snapshots, state: int, at: int) -> str | None:
        """Step from a state that was saved before step `at`; returns how that differs from the run, or None."""
        made: list[int] = []
        for k in range(at, min(at + _ALONG, len(self.actions))):
            steps = snapshots.expand(state, self.actions[k])
            if steps.faulty is not None:
                return f"a step from a saved state fails: {k - at + 1} after step {at}"
            obs = obs_bytes(snapshots.states.spec.observation, tree_map(lambda leaf: leaf[0], steps.obs))
            if Observed(obs, *(row[0] for row in (steps.reward, steps.terminated, steps.truncated))) != self.seen[k]:
                return f"a step from a saved state differs from the environment's: {k - at + 1} after step {at}"
            made.append(state := int(steps.children[0]))
            if self.seen[k].ended:
                break
        snapshots.drop(made)
        return None


def make_step(env: Any, action: Any) -> Observed:
    """Make a step and record its results."""
    obs, reward, terminated, truncated, info = env.step(action)
    value = float(np.asarray(reward).reshape(()))
    return Observed(obs_bytes(Layout(env.observation_space), obs), value, bool(terminated), bool(truncated), info)


def obs_bytes(layout: Layout, obs: Any) -> bytes:
    """An observation as bytes."""
    return b"".join(leaf.tobytes() for leaf in layout.arrays(obs))


_STEPS, _SAVES, _ALONG = 200, 10, 5
_LIMIT, _SAVED_AT = 10, 7
_CYCLES, _CYCLES_S = 3000, 3.0
_ROWS = 16
FLAT_BYTES = 8e6
_LEVELS = {
    Level.REPLAY: "restored by replaying the episode's actions, which takes as long as they took",
    Level.MEMORY: "kept in memory",
    Level.CONCURRENT: "kept in memory, and stepped on several threads",
    Level.PORTABLE: "bytes, as the environment declares them",
}


def save_and_load(subject: Subject) -> Outcome:
    """A state continues as the environment did, from a load and in an expansion."""
    if not subject.reproducible:
        return "warn", "not tried: the same seed and actions do not give the same steps, so states cannot be compared"
    if getattr(subject.instance.unwrapped, "answered", False):
        return "pass", "not compared: its steps include the opponent's replies, but states are single moves"
    run = UninterruptedRun(subject.build(), _affordable(subject))
    try:
        snapshots = Snapshots(subject.factory, rng="replay")
    except UserError as error:
        return "warn", f"it can be used for training, not for planning: {error}"
    with snapshots:
        found = _first_difference(snapshots, run)
        level = f"level {snapshots.level.value}, {_LEVELS[snapshots.level]}"
        if found is not None:
            exact = getattr(snapshots.states, "exact", True)
            return ("fail" if exact else "warn"), f"{level}; but {found}"
        random = "its steps are random" if snapshots.stochastic else "its steps drew no random numbers"
    return "pass", f"{level}; bit-equal after loads and in expansions; {random}"


def _first_difference(snapshots: Snapshots, run: UninterruptedRun) -> str | None:
    saved: dict[int, int] = {}
    count = len(run.actions)
    for at in range(count):
        if run.follow(snapshots.env, at) != run.seen[at]:
            return f"saving changes the environment: step {at + 1} differs"
        if at % max(1, count // _SAVES) == 0 and not run.seen[at].ended:
            saved[at + 1] = snapshots.save()
    for at, state in sorted(saved.items(), reverse=True):
        if found := run.expand_along(snapshots, state, at):
            return found
        shown = snapshots.load(state)
        if obs_bytes(snapshots.states.spec.observation, shown) != run.seen[at - 1].obs:
            return f"the observation after a load is not that of the save, after step {at}"
        for k in range(at, min(at + _ALONG, count)):
            if run.follow(snapshots.env, k) != run.seen[k]:
                return f"after a load, the environment continues differently: {k - at + 1} after step {at}"
    return None


def wrappers(subject: Subject) -> Outcome:
    """A time limit continues counting from its value in the saved state."""
    try:
        Snapshots(subject.factory).close()
    except UserError:
        return "warn", "not tried: its states cannot be saved"
    try:
        snapshots = Snapshots(lambda: TimeLimit(subject.factory(), _LIMIT))
    except UserError as error:
        return "pass", f"a time limit is refused, not ignored: {error}"
    with snapshots:
        env: Any = snapshots.env
        actions = subject.actions(_LIMIT)
        _, info = env.reset(seed=subject.seed)
        for action in actions[:_SAVED_AT]:
            step = make_step(env, legal(action, info))
            if step.ended:
                return "pass", f"not tried: an episode ended within {_SAVED_AT} steps"
            info = step.info
        state = snapshots.save()
        make_step(env, legal(actions[_SAVED_AT], info))
        env.reset()
        snapshots.load(state)
        for k, action in enumerate(actions[_SAVED_AT:], _SAVED_AT + 1):
            step = make_step(env, legal(action, info))
            info = step.info
            if step.truncated != (k == _LIMIT) and not step.terminated:
                return "fail", f"a limit of {_LIMIT} steps, loaded after {_SAVED_AT}, truncates after {k}"
            if step.terminated:
                break
    return "pass", f"a limit of {_LIMIT} steps, saved after {_SAVED_AT} and loaded, still truncates after {_LIMIT}"


def planning(subject: Subject) -> Outcome:
    """Planning leaves the live environment unchanged."""
    try:
        snapshots = Snapshots(subject.factory)
    except SharedState as error:
        return "fail", str(error)
    except UserError:
        return "warn", "not tried: its states cannot be saved"
    with snapshots:
        if not subject.reproducible:
            return "warn", "not tried: there is nothing to compare"
        run = UninterruptedRun(subject.build(), min(50, _affordable(subject)))
        for at, action in enumerate(run.actions):
            if at == 0 or not run.seen[at - 1].ended:
                state = snapshots.save()
                snapshots.drop([state, *snapshots.expand([state, state], [action, action]).children])
            if run.follow(snapshots.env, at) != run.seen[at]:
                return "fail", f"planning changes the environment: step {at + 1} differs"
    return "pass", "planning leaves the environment bit-equal"


def random_numbers(subject: Subject) -> Outcome:
    """Planners do not foresee what it draws."""
    try:
        snapshots = Snapshots(subject.factory)
    except UserError:
        return "warn", "not tried: its states cannot be saved"
    with snapshots:
        found, base = snapshots.states.foreseen, subject.instance.unwrapped
        # What looks like foreseen numbers may be a hidden map, unless the author says how states are kept.
        own = snapshots.level == Level.PORTABLE or hasattr(base, "state_keeper")
    if found:
        return "fail" if own else "warn", found
    return "pass", "none were found that a planner would foresee"


def cost(subject: Subject) -> Outcome:
    """Bytes and time per state, and whether memory use stays flat."""
    try:
        snapshots = Snapshots(subject.factory)
    except UserError:
        return "warn", "not measured: its states cannot be saved"
    with snapshots:
        env: Any = snapshots.env
        _, info = env.reset(seed=subject.seed)
        root, action = snapshots.save(), legal(subject.actions(1)[0], info)
        states = snapshots.states
        size = f"{states.nbytes / 1e3:.3g} kB per state, " if isinstance(states, EnvStates) else ""
        save_s, _ = time_cycles(lambda: snapshots.drop(snapshots.save()))
        roots, actions = [root] * _ROWS, [action] * _ROWS
        try:
            expand_s, grown = time_cycles(lambda: snapshots.drop(snapshots.expand(roots, actions).children), _ROWS)
        except EnvFailed as error:
            return "fail", str(error)
    text = f"{size}{save_s * 1e6:.0f} us to save and drop one, {expand_s * 1e6:.0f} us to step from one"
    if grown > FLAT_BYTES:
        return "fail", f"{text}; memory grew by {grown / 1e6:.0f} MB although every state was dropped"
    return "pass", f"{text}; memory stays flat"


def time_cycles(
    call: Callable[[], None], rows: int = 1, most: int = _CYCLES, seconds: float = _CYCLES_S
) -> tuple[float, float]:
    """Seconds per row of a call, and the growth of this process in bytes over many calls, after the first ones."""
    begin, before, count = time.perf_counter(), resident_bytes(), 0
    while count < most and time.perf_counter() - begin < seconds:
        call()
        count += rows
        if count - rows < most // 4 <= count:
            before = resident_bytes()
    return (time.perf_counter() - begin) / count, (resident_bytes() - before if count > most // 4 else 0.0)


def _affordable(subject: Subject) -> int:
    return int(np.clip(subject.played.steps / max(subject.played.seconds, 1e-6), 20, _STEPS))


STATE_CHECKS: dict[str, Callable[[Subject], Outcome]] = {
    "save and load": save_and_load,
    "wrappers": wrappers,
    "planning": planning,
    "random numbers": random_numbers,
    "state cost": cost,
}
