"""Checks of an external simulator, in the order they run: does it match its handshake, and can it be planned on?

Most of what breaks planners is in `save and load`: an incomplete state shows only after a reset, in another slot, or
after the end of an episode.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from corral.core.errors import EnvFailed
from corral.core.types import Array, Tree, tree_map
from corral.envs.backends.simulators.foresight import foresees
from corral.envs.backends.simulators.options import external_vec_env
from corral.envs.backends.simulators.vec_env import LinkVecEnv
from corral.envs.supervision import Supervision
from corral.link import protocol as clp
from corral.link.client.session import Simulator
from corral.link.client.states import StateClient, StateReplies
from corral.testing.checks.env import Outcome

_WALK, _AFTER = 7, 12  # steps before a state is saved, and after
_SPEED_S = 1.0
_WIDE = 64
_START_S, _ANSWER_S = 30.0, 30.0


@dataclass
class LinkSubject:
    """The simulator under test."""

    url: str
    kwargs: Mapping[str, Any]
    steps: int
    seed: int
    facts: dict[str, Any] = field(default_factory=dict)  # numbers for the report

    def start(self) -> None:
        supervision = Supervision(start_timeout_s=_START_S, step_timeout_s=_ANSWER_S)
        self.vec: LinkVecEnv = external_vec_env(self.url, 1, None, supervision, "eval", self.kwargs)
        self.states = StateClient(self.vec.fleet, next(iter(self.vec.fleet.sessions.values())), _ANSWER_S)
        self.simulator: Simulator = self.states.session.simulator
        self._space = self.simulator.spec.action_space
        self._space.seed(self.seed)

    def actions(self, count: int) -> Tree:
        return self.simulator.spec.action.stack([self._space.sample() for _ in range(count)]) if count else []

    def slots(self, count: int) -> Array:
        """Up to `count` free slots."""
        if not hasattr(self, "_slots"):
            most = self.simulator.hello.slots - self.states.session.used_slots
            self._slots = self.states.take_slots(max(0, min(_WIDE, most)))
        return self._slots[:count]

    def close(self) -> None:
        if hasattr(self, "vec"):
            self.vec.close()


def _walk(states: StateClient, slots: Array, moves: list[Tree]) -> list[StateReplies]:
    """Step slots through these actions; ended episodes are followed by new ones."""
    out = []
    for actions in moves:
        rows = states.step(slots, actions, autoreset=True)
        rows.require_good("STEP")
        out.append(rows)
    return out


def _difference(a: StateReplies, b: StateReplies, row_a: int | None = None, row_b: int | None = None) -> str | None:
    """What differs between two replies, or between one row of each."""
    left, right = (slice(None) if row is None else slice(row, row + 1) for row in (row_a, row_b))
    for name in ("reward", "terminated", "truncated"):
        x, y = getattr(a, name)[left], getattr(b, name)[right]
        if x.tobytes() != y.tobytes():
            return f"{name}s, {x.tolist()[:4]} and {y.tolist()[:4]}"
    same = (x[left].tobytes() == y[right].tobytes() for x, y in zip(a.leaves, b.leaves, strict=True))
    return None if all(same) else "observations"


def _first_difference(a: list[StateReplies], b: list[StateReplies]) -> str | None:
    for k, (left, right) in enumerate(zip(a, b, strict=True)):
        if found := _difference(left, right):
            return f"step {k + 1} differs in its {found}"
    return None


def check_connect(subject: LinkSubject) -> Outcome:
    """Handshake, and the simulator's description of itself."""
    subject.start()
    hello = subject.simulator.hello
    subject.facts |= {"env": hello.env, "env_version": hello.env_version, "sdk": hello.sdk, "level": hello.level}
    threads = f"{hello.threads} thread{'s' if hello.threads > 1 else ''}"
    return "pass", f"{hello.env} version {hello.env_version} ({hello.sdk}), up to {hello.slots} environments, {threads}"


def check_spaces(subject: LinkSubject) -> Outcome:
    """Its spaces, as Gymnasium prints them."""
    spec = subject.simulator.spec
    return "pass", f"observation {spec.observation_space}, action {spec.action_space}"


def check_observations(subject: LinkSubject) -> Outcome:
    """Random steps as a learner makes them: everything within its space."""
    vec, layout = subject.vec, subject.simulator.spec.observation
    vec.reset(subject.seed)
    batch, ends = vec.recv(), 0
    for step in range(subject.steps):
        row = tree_map(lambda leaf: leaf[0], batch.next_obs)
        if found := layout.problem(row):
            return "fail", f"at step {step}, {found}"
        if not np.isfinite(batch.reward).all():
            return "fail", f"at step {step}, the reward is {batch.reward[0]}"
        ends += int(batch.terminated[0] or batch.truncated[0])
        vec.send(batch.env_ids, subject.actions(1))
        batch = vec.recv()
        if batch.faulty[0]:
            return "fail", f"at step {step + 1}, {next(iter(vec.faults)).detail}"
    subject.facts["episodes"] = ends
    if not ends:
        return "warn", f"no episode ended in {subject.steps} steps: it may never end; set a time limit in the simulator"
    return "pass", f"{subject.steps} steps, {ends} episodes"


def check_determinism(subject: LinkSubject) -> Outcome:
    """The same seed and actions give the same results, another seed different ones."""
    states, slots = subject.states, subject.slots(2)
    if len(slots) < 2:
        return "warn", "it runs only one environment, so two cannot be compared"
    seeds = np.array([subject.seed + 17] * 2)
    first = states.reset(slots, seeds)
    first.require_good("RESET")
    moves = [tree_map(lambda leaf: np.repeat(leaf, 2, axis=0), subject.actions(1)) for _ in range(_AFTER)]
    seen = [first, *_walk(states, slots, moves)]
    for k, rows in enumerate(seen):
        if found := _difference(rows, rows, 0, 1):
            return "fail", f"with the same seed and actions, step {k} of two environments differs in its {found}"
    again = [states.reset(slots, seeds), *_walk(states, slots, moves)]
    if found := _first_difference(seen, again):
        return "fail", f"replayed from the same seed, {found}: RESET does not reset the whole state"
    other = states.reset(slots, np.array([subject.seed + 17, subject.seed + 18]))
    walked = _walk(states, slots, moves)
    if all(_difference(rows, rows, 0, 1) is None for rows in [other, *walked]):
        return "pass", "equal, and the seed changes nothing"
    return "pass", f"equal over {_AFTER} steps, in two slots and when replayed"


def check_episode_ends(subject: LinkSubject) -> Outcome:
    """Without AUTORESET an ended episode stays ended, and takes no step."""
    states, slots = subject.states, subject.slots(1)
    states.reset(slots, np.array([subject.seed])).require_good("RESET")
    for step in range(subject.steps):
        rows = states.step(slots, subject.actions(1))
        rows.require_good("STEP")
        if rows.terminated[0] or rows.truncated[0]:
            try:
                after = states.step(slots, subject.actions(1))
                refused = after.status[0] == clp.Status.E_NO_EPISODE
            except EnvFailed as error:
                if "E_NO_EPISODE" not in str(error):
                    return "fail", str(error)
                refused = True
            if refused:
                return "pass", f"ended after {step + 1} steps"
            return "fail", "a step after the end of an episode was answered as if the episode continued"
    return "warn", f"no episode ended in {subject.steps} steps"


def check_bad_requests(subject: LinkSubject) -> Outcome:
    """Malformed requests are refused, and change nothing."""
    states, slots = subject.states, subject.slots(2)
    seeds = np.full(len(slots), subject.seed)
    states.reset(slots, seeds)
    far = np.array([subject.simulator.hello.slots])
    if found := _expect_refusal(lambda: states.reset(far, np.array([1])), f"a slot beyond {far[0] - 1}"):
        return "fail", found
    twice = np.array([slots[0], slots[0]])
    if found := _expect_refusal(lambda: states.step(twice, subject.actions(2), autoreset=True), "a slot named twice"):
        return "fail", found
    moves = [subject.actions(len(slots)) for _ in range(3)]
    before = _walk(states, slots, moves)
    states.reset(slots, seeds)
    if found := _first_difference(before, _walk(states, slots, moves)):
        return "fail", f"after refused requests, {found}"
    return "pass", "refused, and nothing changed"


def _expect_refusal(ask: Callable[[], StateReplies], what: str) -> str | None:
    try:
        rows = ask()
    except EnvFailed as error:
        return None if "refused" in str(error) else str(error)
    return None if rows.status.all() else f"{what} was not refused"


def check_save_load(subject: LinkSubject) -> Outcome:
    """A state continues exactly as before, in any slot and at any time it is loaded."""
    if subject.states.level == 0:
        return "warn", "this simulator cannot save states: it can be used for training, not for planning"
    states, slots = subject.states, subject.slots(3)
    if len(slots) < 3:
        return "warn", f"it runs {len(slots) + 1} environments; the check needs 4"
    one, other, third = slots[:1], slots[1:2], slots[2:]
    states.reset(one, np.array([subject.seed])).require_good("RESET")
    _walk(states, one, [subject.actions(1) for _ in range(_WALK)])
    shown = states.step(one, subject.actions(1), autoreset=True)
    ids, saved = states.save(one)
    saved.require_good("SAVE")
    moves = [subject.actions(1) for _ in range(_AFTER)]
    expected = _walk(states, one, moves)
    loaded = states.load(one, ids)
    loaded.require_good("LOAD")
    if any(x.tobytes() != y.tobytes() for x, y in zip(loaded.leaves, shown.leaves, strict=True)):
        return "fail", "right after LOAD, the observation is not the one of SAVE"

    def into(slot: Array, prepare: Callable[[], Any]) -> str | None:
        prepare()
        states.load(slot, ids).require_good("LOAD")
        return _first_difference(expected, _walk(states, slot, moves))

    orders: dict[str, Callable[[], str | None]] = {
        "loaded where it was saved": lambda: into(one, lambda: None),
        "loaded a second time": lambda: into(one, lambda: None),
        "after a RESET": lambda: into(one, lambda: states.reset(one, np.array([subject.seed + 5]))),
        "into another slot": lambda: into(other, lambda: states.reset(other, np.array([subject.seed + 6]))),
        "into a slot that was never used": lambda: into(third, lambda: None),
        "after the end of an episode": lambda: into(other, lambda: _play_to_end(subject, other)),
    }
    exact = subject.simulator.hello.exact
    for description, attempt in orders.items():
        if found := attempt():
            return ("fail" if exact else "warn"), f"{description}, {found}"
    return "pass", f"continues bit for bit in {len(orders)} orders of loading"


def _play_to_end(subject: LinkSubject, slot: Array) -> None:
    subject.states.reset(slot, np.array([subject.seed + 7]))
    for _ in range(subject.steps):
        rows = subject.states.step(slot, subject.actions(1))
        if rows.terminated[0] or rows.truncated[0]:
            return


def check_expand(subject: LinkSubject) -> Outcome:
    """Many children at once equal the results of load, step and save one by one. Simulators that save only a key state
    do not promise equal steps, but that children keep their observations and ends.
    """
    if subject.states.level < 2:
        return "warn", "it saves no states in memory, which EXPAND needs"
    states, slots = subject.states, subject.slots(2)
    states.reset(slots[:1], np.array([subject.seed])).require_good("RESET")
    ids, _ = states.save(slots[:1])
    actions = subject.actions(_WIDE)
    children, wide = states.expand(np.repeat(ids, _WIDE), actions)
    wide.require_good("EXPAND")
    moves = subject.actions(_WIDE)
    deeper = states.expand(children, moves)[1]
    differs: str | None = None
    for row in range(0, _WIDE, 7):
        if (wide.terminated[row] or wide.truncated[row]) != (deeper.status[row] == clp.Status.E_NO_EPISODE):
            return "fail", "a state whose episode has ended was expanded, or one whose episode continues was not"
        shown = states.load(slots[:1], children[row : row + 1])
        if any(x[:1].tobytes() != y[row : row + 1].tobytes() for x, y in zip(shown.leaves, wide.leaves, strict=True)):
            return "fail", f"right after LOAD of child {row} of an EXPAND, the observation is not the one of that row"
        differs = differs or _compare_steps(subject, ids, row, (actions, wide), (moves, deeper))
    if differs is not None and subject.simulator.hello.exact:
        return "fail", differs
    states.drop(children)
    gone = states.expand(children[:1], tree_map(lambda leaf: leaf[:1], moves))[1].status
    if gone[0] != clp.Status.E_UNKNOWN_STATE:
        return "fail", "a dropped state can still be expanded"
    if differs is not None:
        return "warn", f"{differs}, as only a key state is saved; children keep their observations and ends"
    return "pass", f"{_WIDE} rows at once equal single steps"


def check_random_numbers(subject: LinkSubject) -> Outcome:
    """Planners do not foresee what it draws."""
    if subject.states.level == 0:
        return "warn", "not tried: it cannot save states"
    slots = subject.slots(2)
    if len(slots) < 2:
        return "warn", "it runs only one environment, so two cannot be compared"
    if foresees(subject.states, slots):
        reseeds = "reseed" in subject.simulator.hello.capabilities
        return "fail", (
            "a planner foresees what is not shown: steps depend on the seed of RESET, and "
            + ("chance seeds do not change them: reseed() must" if reseeds else "EXPAND takes no other: write reseed()")
        )
    return "pass", "none were found that a planner would foresee"


def _compare_steps(
    subject: LinkSubject, ids: Array, row: int, first: tuple[Tree, StateReplies], second: tuple[Tree, StateReplies]
) -> str | None:
    """How this row of two EXPANDs differs from two steps after a LOAD; each EXPAND is its actions and its rows."""
    states, slot = subject.states, subject.slots(1)
    states.load(slot, ids)
    for (actions, wide), text in ((first, "from a state"), (second, "from its child")):
        step = states.step(slot, tree_map(lambda leaf: leaf[row : row + 1], actions))
        if found := _difference(wide, step, row, 0):
            return f"row {row} of an EXPAND {text} and the same step after a LOAD differ in their {found}"
        if step.terminated[0] or step.truncated[0]:
            break
    return None


def check_memory(subject: LinkSubject) -> Outcome:
    """Dropped states are freed."""
    if subject.states.level < 2:
        return "warn", "it saves no states in memory"
    states, slots = subject.states, subject.slots(1)
    states.reset(slots, np.array([subject.seed]))
    for _ in range(50):
        ids, _ = states.save(slots)
    held = states.stats()
    states.next_generation()
    if states.load(slots, ids).status[0] != clp.Status.E_UNKNOWN_STATE:  # ordered after the drop, unlike STATS
        return "fail", "a state of a dropped generation can still be loaded"
    left = states.stats()
    if left.get("snapshots") or left.get("snapshot_bytes"):
        return "fail", f"after all drops, {left.get('snapshots')} states take {left.get('snapshot_bytes')} bytes"
    each = held.get("snapshot_bytes", 0) // max(1, held.get("snapshots", 1))
    subject.facts["state_bytes"] = each
    return "pass", f"a state takes {each:,} bytes; dropped states take none"


def check_export(subject: LinkSubject) -> Outcome:
    """States as bytes, and back; damaged ones are refused."""
    if subject.states.level < 4:
        return "warn", "states cannot be exported (no save and load functions)"
    states, slots = subject.states, subject.slots(2)
    states.reset(slots[:1], np.array([subject.seed]))
    _walk(states, slots[:1], [subject.actions(1) for _ in range(_WALK)])
    ids, _ = states.save(slots[:1])
    blobs, rows = states.export(ids)
    rows.require_good("EXPORT")
    copies, rows = states.import_states(blobs)
    rows.require_good("IMPORT")
    actions = subject.actions(1)
    if found := _difference(states.expand(ids, actions)[1], states.expand(copies, actions)[1]):
        return (
            "fail" if subject.simulator.hello.exact else "warn"
        ), f"an exported and imported state continues with different {found}"
    damaged = [blobs[0][: len(blobs[0]) // 2], b"", bytes(len(blobs[0]))]
    if not states.import_states(damaged)[1].status.all():
        return "fail", "a damaged state was imported"
    return "pass", f"{len(blobs[0]):,} bytes, and damaged ones are refused"


def check_speed(subject: LinkSubject) -> Outcome:
    """Steps per second of one row and of many, and the cost of the link."""
    states = subject.states
    single, _ = _measure(states, subject.slots(1), subject)
    slots = subject.slots(_WIDE)
    wide, overhead = _measure(states, slots, subject)
    subject.facts |= {"single_rows_per_s": single, "batch": len(slots), "batch_rows_per_s": wide}
    subject.facts["wire_us_per_row"] = overhead
    return "pass", (
        f"{single:,.0f} steps/s of one environment, {wide:,.0f} of {len(slots)} together; "
        f"{overhead:.1f} us per row outside the simulator"
    )


def _measure(states: StateClient, slots: Array, subject: LinkSubject) -> tuple[float, float]:
    states.reset(slots, np.arange(len(slots)))
    actions, count = subject.actions(len(slots)), 0
    started = time.perf_counter()
    before = states.session.row_s
    while time.perf_counter() - started < _SPEED_S:
        states.step(slots, actions, autoreset=True)
        count += len(slots)
    taken = time.perf_counter() - started
    return count / taken, max(0.0, taken / count - (states.session.row_s or before)) * 1e6


LINK_CHECKS: dict[str, Callable[[LinkSubject], Outcome]] = {
    "connect": check_connect,
    "spaces": check_spaces,
    "observations": check_observations,
    "determinism": check_determinism,
    "episode ends": check_episode_ends,
    "bad requests": check_bad_requests,
    "save and load": check_save_load,
    "expand": check_expand,
    "random numbers": check_random_numbers,
    "memory": check_memory,
    "export": check_export,
    "speed": check_speed,
}
