"""The checks of `check_env`, in the order they run: each returns pass, warn or fail, and one line of detail."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import gymnasium
import numpy as np
from gymnasium import spaces as gs

from corral.core.errors import EnvFailed, UserError, describe_error
from corral.core.gym_env import OLD_GYM
from corral.core.machine import cores
from corral.core.seeding import env_seed
from corral.core.spaces import Layout
from corral.envs import auto
from corral.envs.make import make_vec
from corral.envs.resolve import EnvLike, resolve
from corral.envs.supervision import Supervision
from corral.envs.vec_env import VecEnv
from corral.testing.play import Env, RandomPlay, Step, first_difference, play_at_random, rollout

Status = Literal["pass", "warn", "fail"]
Outcome = tuple[Status, str]

_COMPARE_STEPS, _COMPARE_S = 200, 2.0
_WORKER_STEPS = 20
_STEP_TIMEOUT_S = 60.0


@dataclass
class Subject:
    """The environment under test, and the findings of the checks so far."""

    env: EnvLike
    kwargs: Mapping[str, Any]
    steps: int
    seed: int
    observation: Layout = field(init=False)
    action: Layout = field(init=False)
    instance: Any = field(init=False)  # not yet known to be an Env
    opened: list[Env] = field(default_factory=list)
    played: RandomPlay = field(default_factory=RandomPlay)
    reproducible: bool = False

    def start(self) -> None:
        """Resolve the factory, and build the instance that most checks use."""
        resolved = resolve(self.env, self.kwargs)
        self.name, self.factory = resolved.name, resolved.factory
        self.instance = self.build()

    def build(self) -> Env:
        built = self.factory()
        self.opened.append(built)
        return built

    def actions(self, count: int) -> list[Any]:
        self.instance.action_space.seed(self.seed)
        return [self.instance.action_space.sample() for _ in range(count)]

    def play(self, seed: int, env: Env | None = None) -> list[Step]:
        """A rollout of those actions, in a new instance unless one is given."""
        affordable = _COMPARE_S * self.played.steps / max(self.played.seconds, 1e-6)
        count = min(self.steps, _COMPARE_STEPS, max(5, int(affordable)))
        return rollout(env or self.build(), seed, self.actions(count))

    def close(self) -> None:
        for env in self.opened:
            with contextlib.suppress(Exception):  # a failed build or step has been reported by then
                env.close()
        self.opened.clear()


def _build(subject: Subject) -> Outcome:
    try:
        subject.start()
    except TypeError as error:
        if subject.kwargs and "keyword argument" in str(error):
            raise UserError(f"Wrong keyword arguments: {str(error).partition(' was raised from ')[0]}.") from error
        raise
    env = subject.instance
    if not isinstance(env, gymnasium.Env):
        subject.opened.clear()
        hint = f"; {OLD_GYM}" if callable(getattr(env, "step", None)) else ""
        kind = type(env)
        return "fail", f"{subject.name} returned {kind.__module__}.{kind.__name__}, not a gymnasium.Env{hint}"
    kind = type(env.unwrapped)
    return "pass", f"{kind.__module__}:{kind.__name__}"


def _spaces(subject: Subject) -> Outcome:
    env = subject.instance
    for name in ("observation_space", "action_space"):
        if not isinstance(getattr(env, name, None), gymnasium.Space):
            return "fail", f"{name} must be a gymnasium space, set in __init__ or passed to corral.envs.old_gym"
    subject.observation, subject.action = Layout(env.observation_space), Layout(env.action_space)
    if not all(any(np.prod(leaf.shape) for leaf in layout.leaves) for layout in (subject.observation, subject.action)):
        return "fail", f"a space without any number: {env.observation_space}, {env.action_space}"
    text = f"observation {_short(env.observation_space)}, action {_short(env.action_space)}"
    for leaf in subject.action.leaves:
        if isinstance(leaf.space, gs.Box) and not leaf.space.is_bounded():
            return "warn", f"{text}; the action space has no finite bounds to scale a policy to"
    return "pass", text


def _reset(subject: Subject) -> Outcome:
    result: Any = subject.instance.reset(seed=subject.seed)
    if not (isinstance(result, tuple) and len(result) == 2):
        return "fail", f"reset() must return (obs, info), got a {type(result).__name__}; {OLD_GYM}"
    if not isinstance(result[1], dict):
        return "fail", f"the info of reset() must be a dict, got a {type(result[1]).__name__}"
    if found := subject.observation.problem(result[0]):
        return "fail", found
    return "pass", "returns (obs, info), and the observation is in its space"


def _step(subject: Subject) -> Outcome:
    play = subject.played
    try:
        play_at_random(play, subject.instance, subject.observation, subject.steps, subject.seed)
    except (Exception, SystemExit) as error:
        return "fail", f"at step {play.steps + 1}, {describe_error(error)}"
    if play.step_problem:
        return "fail", play.step_problem
    if play.odd_flags:
        return "warn", f"terminated and truncated should be bool, got {play.odd_flags}"
    return "pass", f"{play.steps} random steps returned (obs, reward, terminated, truncated, info)"


def _observations(subject: Subject) -> Outcome:
    play = subject.played
    if play.obs_problem:
        return "fail", play.obs_problem
    if play.odd_dtype:
        return "warn", f"{play.odd_dtype}; Corral converts it at every step"
    return "pass", "finite and in their space"


def _rewards(subject: Subject) -> Outcome:
    play = subject.played
    if play.reward_problem:
        return "fail", play.reward_problem
    seen = f"from {play.reward_low:g} to {play.reward_high:g}"
    if play.odd_reward:
        return "warn", f"{seen}, but each is {play.odd_reward}; other libraries may break on it: return a float"
    if play.reward_low == play.reward_high:
        return "pass", f"finite numbers, always {play.reward_low:g} in random play"
    return "pass", f"finite numbers {seen} in random play"


def _ends(subject: Subject) -> Outcome:
    play, spec = subject.played, subject.instance.spec
    limit = spec.max_episode_steps if spec is not None else None
    bound = f"time limit {limit}" if limit else "no time limit declared"
    if not play.lengths:
        text = f"no episode ended in {play.steps} random steps; {bound}"
        return ("pass", text) if limit else ("warn", f"{text}, so episodes may never end")
    text = f"{play.terminated} terminated, {play.truncated} truncated"
    if play.both:
        text += f" ({play.both} of them both, which counts as terminated)"
    low, high = min(play.lengths), max(play.lengths)
    return "pass", f"{text}, after {low if low == high else f'{low} to {high}'} steps; {bound}"


def _buffers(subject: Subject) -> Outcome:
    if subject.played.overwrites:
        return "warn", (
            "step() overwrites the observation that it returned before; Corral copies each one, but other libraries "
            "keep the array and train on wrong data: return a copy"
        )
    return "pass", "observations keep their values after later steps"


def _determinism(subject: Subject) -> Outcome:
    env = subject.build()
    first = subject.play(subject.seed, env)
    where = first_difference(first, subject.play(subject.seed), subject.observation)
    if where is not None:
        text = f"two runs with seed {subject.seed} and the same actions differ in {where}"
        if subject.instance.spec is not None and subject.instance.spec.nondeterministic:
            return "warn", f"{text}, as its spec admits (nondeterministic)"
        if getattr(subject.instance.unwrapped, "seedless", False):
            return "warn", f"{text}: the class has neither seed() nor reset(seed), so runs are not reproducible"
        return "fail", f"{text}; call super().reset(seed=seed) and draw from self.np_random only"
    subject.reproducible = True
    where = first_difference(first, subject.play(subject.seed, env), subject.observation)
    if where is not None:
        return "warn", (
            f"new environments agree, but one that is reset again with the same seed differs in {where}: reset() "
            "does not reset the whole state"
        )
    return "pass", "the same seed and actions give the same steps"


def _seeds(subject: Subject) -> Outcome:
    a, b = subject.play(subject.seed), subject.play(subject.seed + 1)
    if first_difference(a[:1], b[:1], subject.observation) is None:
        if first_difference(a, b, subject.observation) is None:
            return "pass", "the seed changes nothing: this environment is deterministic"
        return "pass", "every seed starts with the same observation, then differs"
    env = subject.build()
    env.reset(seed=subject.seed)
    starts = [Step("", copy.deepcopy(env.reset()[0])) for _ in range(2)]
    if first_difference(starts[:1], starts[1:], subject.observation) is None:
        return "warn", (
            "different seeds start differently, but reset() without a seed starts every episode alike: it should "
            "keep drawing from its RNG"
        )
    return "pass", "different seeds start differently, and so do successive episodes"


def _worker(subject: Subject) -> Outcome:
    try:
        vec = _make(subject, "process")
    except UserError as error:
        return "warn", f"only backend='local' works: {error}"
    except EnvFailed as error:
        return "fail", _first_line(error)
    try:
        remote = _drive(subject, vec)
    except EnvFailed as error:
        return "fail", f"in a worker process, {_first_line(error)}"
    if not subject.reproducible:
        return "pass", "runs in a worker process"
    if _drive(subject, _make(subject, "local")) != remote:
        return "warn", "behaves differently in a worker process than in this one, with the same seed and actions"
    return "pass", "behaves the same in a worker process"


def _make(subject: Subject, backend: str) -> VecEnv:
    supervision = Supervision(step_timeout_s=30.0, start_timeout_s=60.0, restarts_in_a_row=1)
    return make_vec(subject.env, 1, backend, 1, subject.seed, env_kwargs=subject.kwargs, supervision=supervision)


def _drive(subject: Subject, vec: VecEnv) -> list[bytes]:
    layout, actions = subject.action, subject.actions(_WORKER_STEPS)
    if subject.played.masked:  # a backend does not show which actions are legal
        played = rollout(subject.build(), env_seed(subject.seed, "train", 0), actions)
        actions = [step.action for step in played if step.action is not None]
    seen: list[bytes] = []
    with vec:
        batch = vec.recv()
        for action in actions:
            vec.send(batch.env_ids, layout.unflatten([np.asarray(x)[None] for x in layout.flatten(action)]))
            batch = vec.recv()
            for fault in vec.faults:
                raise EnvFailed(str(fault))
            values = (*subject.observation.flatten(batch.next_obs), batch.reward)
            seen += [np.ascontiguousarray(value).tobytes() for value in values]
    return seen


def _speed(subject: Subject) -> Outcome:
    cost = auto.measure(subject.factory, "the environment", Supervision(step_timeout_s=_STEP_TIMEOUT_S))
    choice = auto.choose(cost, 8, None, cores())
    if cost is None:
        return "fail", "a step raised an exception while it was timed"
    return "pass", (
        f"a step takes {_time(cost.wall_s)}, {_time(cost.cpu_s)} of it computing; backend='auto' takes "
        f"'{choice.backend}' for 8 environments"
    )


def _short(space: gymnasium.Space[Any]) -> str:
    if isinstance(space, gs.Box):
        low, high = float(np.min(space.low)), float(np.max(space.high))
        return f"Box({low:g}, {high:g}, {space.shape}, {space.dtype})"
    text = str(space)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.0f} us"


def _first_line(error: object) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if len(lines) < 2 else f"{lines[0]}: {lines[-1]}"


CHECKS: dict[str, Callable[[Subject], Outcome]] = {
    "build": _build,
    "spaces": _spaces,
    "reset": _reset,
    "step": _step,
    "observations": _observations,
    "rewards": _rewards,
    "episode ends": _ends,
    "own buffers": _buffers,
    "determinism": _determinism,
    "seeds": _seeds,
    "worker process": _worker,
    "speed": _speed,
}
FOUNDATIONS = ("build", "connect", "spaces", "reset", "step")  # all later checks depend on these
