"""Learning claims of Corral: an algorithm, a task, the return to reach, and a number of steps."""

from __future__ import annotations

import math
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from corral.config import presets

_LOOKS = 200  # rows of metrics per run, so that the step at which the bar was reached is known to half a percent

Measure = Literal["train100", "eval"]
Table = Literal["learning", "sharing", "simulators", "planning", "precision"]


@dataclass(frozen=True)
class Claim:
    """`algo` reaches `bar` on `env` within `steps`, with the settings of its preset and `overrides`.

    `train100` is the mean return of the last 100 training episodes; `eval` that of a deterministic evaluation with
    other seeds.
    """

    algo: str
    env: str
    measure: Measure
    bar: float
    steps: int
    overrides: Mapping[str, str] = field(default_factory=dict)
    label: str = ""
    options: tuple[str, ...] = ()
    """Further command-line options."""
    once: bool = False
    """Test one seed only, because the same claim is tested on another runtime."""
    table: Table = "learning"
    """The table of BENCHMARKS.md that it belongs to."""
    simulator: str = ""
    """Example of the C++ SDK that simulates `env`."""
    within_s: float = math.inf
    """Time limit in seconds."""
    game: bool = False
    """Episodes are games: the table shows the fraction won."""
    rival: str = ""
    """Label of another claim on the same task, which should need more environment steps."""

    @property
    def name(self) -> str:
        """Algorithm and environment."""
        return f"{self.label or self.algo} {self.env.rpartition(':')[2]}"

    def command(self, seed: int, folder: Path) -> list[str]:
        """The `corral train` command that tests it; simulators are beside `folder`."""
        watching = {"log_every": max(1, self.steps // _LOOKS), "log_every_s": 0, "checkpoint_every_s": 0}
        settings = [f"{key}={value}" for key, value in {**self.overrides, **watching}.items()]
        args = ["train", self.algo, "--steps", self.steps, "--seed", seed, "--run-dir", folder, *self.options]
        if self.simulator:
            start = f"{shlex.quote(str(folder.parent / self.simulator))} --connect {{url}}"
            args += ["--env", _LISTEN, "--preset", self.env, "--sim", start, "--sims", _SIMULATORS]
        else:
            args += ["--env", self.env]
        return [sys.executable, "-m", "corral", *map(str, args), "--quiet", "--set", *settings]


_MOVE_OR_SHOOT, _STATELESS = "corral.testing.tasks:MoveOrShoot", "corral.testing.tasks:StatelessCartPole"
_HYBRID_WALK = "corral.testing.tasks:HybridWalk"
_LISTEN, _SIMULATORS = "zmq://127.0.0.1:0", 8
_OFTEN = {"eval_every": "2000", "eval_episodes": "20"}
# Without random actions an expert does not explore, and stays near 115.
_EXPERT = _OFTEN | {"search_mode": "expert", "random_action_fraction": "0.2"}
_FROM_PIXELS = {
    "ppo": {
        "steps": "10240", "num_envs": "8", "num_steps": "64", "num_minibatches": "4", "update_epochs": "4",
        "learning_rate": "5e-4", "eval_every": "1024", "eval_episodes": "10",
    },
    "dqn": {
        "steps": "10240", "num_envs": "8", "batch_size": "32", "buffer_size": "10000", "learning_starts": "1000",
        "train_frequency": "4", "target_update_period": "100", "exploration_fraction": "0.3",
        "learning_rate": "5e-4", "eval_every": "1024", "eval_episodes": "10",
    },
}  # fmt: skip
_BOTH: tuple[Measure, ...] = ("train100", "eval")
_RAY = ("--runtime", "ray", "--actors", "1")


def _sharing(algo: str, workers: int, label: str = "", times: int = 1, **overrides: str) -> Claim:
    """A claim for several learners, within `times` the steps of their preset."""
    args: tuple[str, ...] = ("--actors", str(workers))
    if algo == "paac":  # its workers only act
        args, overrides = (), {"workers": str(workers)}
    steps = times * int(presets.settings(algo, "CartPole-v1")["steps"])
    name = label or f"{algo}, {workers} workers"
    return Claim(algo, "CartPole-v1", "train100", 450, steps, overrides, name, args, table="sharing")


def _simulated(algo: str, env: str, simulator: str, measure: Measure, bar: float) -> Claim:
    """A claim on a C++ simulator, within the steps of its preset."""
    steps = int(presets.settings(algo, env)["steps"])
    return Claim(algo, env, measure, bar, steps, table="simulators", simulator=simulator)


def _planned(algo: str, env: str, measure: Measure, bar: float, **more: Any) -> Claim:
    """A claim for learning with search, or for its baseline, within the steps of its preset."""
    steps = int(presets.settings(algo, env)["steps"])
    return Claim(algo, env, measure, bar, steps, table="planning", **more)


def _precise(algo: str, task: str, best: float, precision: str) -> Claim:
    """A claim from pixels in a precision, within an evaluation's width of the best return; `rival` is fp32."""
    rival = "" if precision == "fp32" else f"{algo}, fp32"
    overrides = _FROM_PIXELS[algo] | {"precision": precision}
    steps = int(overrides.pop("steps"))
    return Claim(algo, f"benchmarks.learning.pixels:{task}", "eval", 0.98 * best, steps, overrides,
                 f"{algo}, {precision}", table="precision", rival=rival)  # fmt: skip


CLAIMS = (
    Claim("ppo", "CartPole-v1", "train100", 475, 100_000),
    Claim("a2c", "CartPole-v1", "train100", 475, 500_000),
    Claim("reinforce", "CartPole-v1", "train100", 475, 500_000),
    Claim("dqn", "CartPole-v1", "eval", 475, 50_000),
    Claim("ppo", "Acrobot-v1", "train100", -100, 100_000),
    Claim("dqn", "Acrobot-v1", "train100", -100, 50_000),
    Claim("ppo", "Pendulum-v1", "eval", -200, 100_000, {"eval_episodes": "50"}),  # episodes differ by 100
    Claim("ppo", _MOVE_OR_SHOOT, "eval", 0.85, 100_000),
    Claim("ppo", _STATELESS, "train100", 300, 200_000, label="ppo lstm"),
    Claim("impala", "CartPole-v1", "train100", 450, 200_000),
    Claim("appo", "CartPole-v1", "train100", 450, 200_000),
    Claim("apex", "CartPole-v1", "eval", 450, 100_000),
    Claim("seed_impala", "CartPole-v1", "train100", 450, 200_000),
    Claim("impala", "CartPole-v1", "train100", 450, 200_000, label="impala, ray", options=_RAY, once=True),
    Claim("appo", "CartPole-v1", "train100", 450, 200_000, label="appo, ray", options=_RAY, once=True),
    Claim("apex", "CartPole-v1", "eval", 450, 100_000, label="apex, ray", options=_RAY, once=True),
    Claim("seed_impala", "CartPole-v1", "train100", 450, 200_000, label="seed_impala, ray", options=_RAY, once=True),
    *(_sharing(algo, workers) for algo in ("dppo", "a3c", "paac", "ppo-ssp", "gala") for workers in (2, 4)),
    _sharing("dppo", 2, "dppo, 2 workers, topk:0.01", 2, compress="topk:0.01"),
    _sharing("dppo", 2, "dppo, 2 workers, qsgd:8", compress="qsgd:8"),
    _sharing("dppo", 2, "dppo, 2 workers, powersgd:2", compress="powersgd:2"),
    _simulated("ppo", "CartPole-v1", "cartpole", "train100", 475),
    _simulated("dppo", "CartPole-v1", "cartpole", "train100", 450),
    _simulated("impala", "CartPole-v1", "cartpole", "train100", 450),
    _simulated("ppo", _MOVE_OR_SHOOT, "hybrid", "eval", 0.85),
    *(_planned("ppo", "CartPole-v1", measure, 475, overrides=_OFTEN) for measure in _BOTH),
    *(
        _planned(
            "ppo-search", "CartPole-v1", measure, 475, label="ppo-search, ppo+distill", rival="ppo", overrides=_OFTEN
        )
        for measure in _BOTH
    ),
    _planned("ppo-search", "CartPole-v1", "eval", 475, label="ppo-search, expert", rival="ppo", overrides=_EXPERT),
    _planned("ppo", _HYBRID_WALK, "eval", -1.1),
    _planned("ppo-search", _HYBRID_WALK, "eval", -1.1, label="ppo-search, ppo+distill", rival="ppo"),
    _planned("alphazero", "corral/TicTacToe-v0", "eval", 0.0, game=True),
    _planned("alphazero", "corral/Connect4-v0", "eval", 0.6, once=True, within_s=3600, game=True),
    *(
        _precise(algo, task, best, precision)
        for algo in ("ppo", "dqn")
        for task, best in (("MatchQuadrant", 20.0), ("MatchQuadrantLong", 50.0))
        for precision in ("fp32", "auto")
    ),
)
"""All rows of the learning tables of BENCHMARKS.md."""
