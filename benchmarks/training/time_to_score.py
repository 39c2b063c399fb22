"""Wall time until PPO solves CartPole: Corral and Stable-Baselines3 in turns, both with rl-baselines3-zoo's settings.

Training pauses every 2,048 steps for an evaluation of 10 greedy episodes, and ends when their mean reaches 475. Only
training time counts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import torch
from rich.console import Console

from benchmarks.common.rounds import Spread
from benchmarks.training.peers import ENV
from corral.config.experiment import Experiment
from corral.envs.make import make_vec
from corral.runs.evaluation.evaluate import evaluate_policy
from corral.topologies.sync import Sync

BAR = 475.0
_STEPS, _EVERY, _EPISODES = 100_000, 2_048, 10
_ENVS, _LENGTH, _EPOCHS, _GAMMA, _LAM, _LR, _CLIP = 8, 32, 20, 0.98, 0.8, 1e-3, 0.2


@dataclass(frozen=True)
class Arrival:
    """When a run first reached the bar; None if it did not."""

    seed: int
    seconds: float | None
    steps: int | None


@dataclass(frozen=True)
class Race:
    """All runs by library, and the reasons why libraries were skipped."""

    arrivals: dict[str, list[Arrival]]
    skipped: dict[str, str]

    def ratio(self) -> Spread:
        """Stable-Baselines3's time over Corral's, for the seeds with which both reached the bar."""
        pairs = zip(self.arrivals.get("SB3", []), self.arrivals.get("corral", []), strict=False)
        return Spread.of(s.seconds / c.seconds for s, c in pairs if s.seconds and c.seconds)

    def to_json(self) -> dict[str, Any]:
        ratio = self.ratio()
        return {
            "arrivals": {name: [asdict(one) for one in found] for name, found in self.arrivals.items()},
            "skipped": self.skipped,
            "ratio": None if ratio.median != ratio.median else asdict(ratio),
        }


class _Learner(Protocol):
    def train(self, steps: int) -> int:
        """Train until about `steps` steps are done; returns the actual number."""

    def score(self) -> float:
        """Mean return of greedy episodes."""

    def close(self) -> None:
        """Close the environments."""


class _CorralLearner:
    def __init__(self, seed: int):
        settings = {
            "steps": _STEPS, "seed": seed, "num_envs": _ENVS, "num_steps": _LENGTH, "num_minibatches": 1,
            "update_epochs": _EPOCHS,
            "gamma": _GAMMA, "gae_lambda": _LAM, "ent_coef": 0.0, "learning_rate": _LR, "anneal_lr": True,
            "clip_coef": f"{_CLIP}:0",
            "backend": "local",
        }  # fmt: skip
        experiment = Experiment.make("ppo", ENV, preset="none", overrides=settings)
        self._sync, self._seed = Sync(experiment, note=lambda kind, text: None), seed
        self._eval = make_vec(ENV, _EPISODES, "local", seed=seed, role="eval")

    def train(self, steps: int) -> int:
        torch.set_num_threads(self._sync.threads)
        while self._sync.env_steps < steps:
            self._sync.advance()
        return self._sync.env_steps

    def score(self) -> float:
        policy = self._sync.eval_policy(deterministic=True, seed=self._seed)
        return evaluate_policy(self._eval, policy, _EPISODES, self._seed).mean

    def close(self) -> None:
        self._sync.close()
        self._eval.close()


class _Sb3Learner:
    def __init__(self, seed: int):
        from stable_baselines3 import PPO
        from stable_baselines3.common.env_util import make_vec_env

        torch.set_num_threads(1)
        self._env = make_vec_env(ENV, n_envs=_ENVS, seed=seed)
        self._eval = make_vec_env(ENV, n_envs=_EPISODES, seed=10_000 + seed)
        self._model = PPO(
            "MlpPolicy", self._env, n_steps=_LENGTH, batch_size=_ENVS * _LENGTH,
            n_epochs=_EPOCHS, gamma=_GAMMA, gae_lambda=_LAM, ent_coef=0.0, learning_rate=self._falling(_LR),
            clip_range=self._falling(_CLIP), device="cpu", seed=seed,
        )  # fmt: skip

    def _falling(self, start: float) -> Callable[[float], float]:
        """Linear over the whole run; SB3's own progress covers only one call of `learn`."""
        return lambda _: start * max(0.0, 1.0 - self._done() / _STEPS)

    def _done(self) -> int:
        return self._model.num_timesteps if hasattr(self, "_model") else 0

    def train(self, steps: int) -> int:
        torch.set_num_threads(1)
        self._model.learn(steps - self._done(), reset_num_timesteps=False)
        return self._done()

    def score(self) -> float:
        from stable_baselines3.common.evaluation import evaluate_policy

        found: Any = evaluate_policy(self._model, self._eval, n_eval_episodes=_EPISODES, deterministic=True)
        return float(found[0])

    def close(self) -> None:
        self._env.close()
        self._eval.close()


_RUNNERS: dict[str, Callable[[int], _Learner]] = {"corral": _CorralLearner, "SB3": _Sb3Learner}


def race(seeds: Iterable[int], say: Callable[[str], None]) -> Race:
    """Train both libraries with each seed, one after the other, alternating which begins."""
    arrivals: dict[str, list[Arrival]] = {}
    skipped: dict[str, str] = {}
    for k, seed in enumerate(seeds):
        for name in list(_RUNNERS)[:: 1 if k % 2 == 0 else -1]:
            if name in skipped:
                continue
            say(f"time to {BAR:g}, seed {seed}: {name}")
            try:
                arrivals.setdefault(name, []).append(_arrive(_RUNNERS[name], seed))
            except ImportError as error:
                skipped[name] = f"not installed ({error.name or error}): pip install 'corral-rl[sb3]'"
    return Race({name: found for name, found in arrivals.items() if found}, skipped)


def _arrive(build: Callable[[int], _Learner], seed: int) -> Arrival:
    runner, spent, steps = build(seed), 0.0, 0
    try:
        while steps < _STEPS:
            start = time.perf_counter()
            steps = runner.train(min(_STEPS, steps + _EVERY))
            spent += time.perf_counter() - start
            if runner.score() >= BAR:
                return Arrival(seed, spent, steps)
        return Arrival(seed, None, None)
    finally:
        runner.close()


def print_race(console: Console, result: Race) -> None:
    """Print when each seed reached the bar, and the ratio of the times."""
    console.print(f"\nPPO CartPole, zoo settings: training until an evaluation reaches {BAR:g}\n", style="bold")
    for name, found in result.arrivals.items():
        console.print(f"{name}: {', '.join(_text(found))}")
    for name, why in result.skipped.items():
        console.print(f"skipped {name}: {why}")
    ratio = result.ratio()
    if ratio.median == ratio.median:
        range_ = f"range {ratio.low:.2f} to {ratio.high:.2f}"
        console.print(f"SB3 takes {ratio.median:.2f} times as long as corral ({range_}).")


def _text(found: Sequence[Arrival]) -> list[str]:
    return [
        f"seed {one.seed} never in {_STEPS:,} steps"
        if one.seconds is None
        else f"seed {one.seed} {one.seconds:.1f} s ({one.steps:,} steps)"
        for one in found
    ]
