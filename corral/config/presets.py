"""Settings known to fit an algorithm to an environment, and whether anybody has checked that they do.

The numbers start from rl-baselines3-zoo (`hyperparams/*.yml`) and CleanRL, in Corral's names: a minibatch of 64 from
16 x 256 steps is `minibatches` 64, a linear schedule is `anneal_lr` or `anneal_clip`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class Preset:
    """Settings, by name. A verified preset's note says seeds, score, steps, wall time."""

    settings: Mapping[str, Any]
    status: Literal["untested", "verified"]
    note: str


ATARI = "atari"
"""The preset of every Atari game."""

MOVE_OR_SHOOT, STATELESS = "corral.testing.tasks:MoveOrShoot", "corral.testing.tasks:StatelessCartPole"
HYBRID_WALK = "corral.testing.tasks:HybridWalk"
_ZOO = "from rl-baselines3-zoo"


def _verified(bar: str, after: str, after_s: int, end: str, steps: str, whole_s: int, origin: str) -> str:
    """The note of a preset that the learning table of BENCHMARKS.md has measured: its medians over the seeds."""
    return (
        f"3 of 3 seeds reach {bar}, after {after} steps and {after_s} s; "
        f"{end} at the end, after {steps} steps and {whole_s} s; {origin}"
    )


_PPO_CARTPOLE = {
    "steps": 100_000,
    "num_envs": 8,
    "length": 32,
    "minibatches": 2,  # of 128 rows: less luck of the seed than one of 256
    "epochs": 10,
    "gamma": 0.98,
    "lam": 0.8,
    "entropy": 0.0,
    "lr": 1e-3,
    "anneal_lr": True,
    "clip": 0.2,
    "anneal_clip": True,
}
_DPPO_CARTPOLE = _PPO_CARTPOLE | {"steps": 150_000, "num_envs": 16}
_PPO_HYBRID_WALK = {
    "steps": 40_000,
    "num_envs": 8,
    "length": 64,
    "minibatches": 4,
    "epochs": 10,
    "gamma": 0.95,
    "lam": 0.95,
    "entropy": 0.0,
    "lr": 1e-3,
    "anneal_lr": True,
    "log_std": -0.7,
    "evaluation.episodes": 100,  # episodes differ by 1
    "evaluation.every_steps": 2_000,
}
_SEARCHING = {"mode": "ppo+distill", "sims": 16, "share": 0.5, "distill": 1.0}

PRESETS: dict[tuple[str, str], Preset] = {
    ("ppo", "CartPole-v1"): Preset(
        _PPO_CARTPOLE,
        "verified",
        _verified("475, mean of 100 training episodes", "69,632", 10, "500.0", "100,000", 15, _ZOO),
    ),
    ("ppo", "Acrobot-v1"): Preset(
        {
            "steps": 100_000,
            "num_envs": 16,
            "length": 128,
            "minibatches": 16,
            "epochs": 6,
            "gamma": 0.99,
            "lam": 0.94,
            "entropy": 0.0,
            "lr": 1e-3,
            "anneal_lr": True,
            "normalize_obs": True,
            "normalize_reward": True,
        },
        "verified",
        _verified(
            "-100, mean of 100 training episodes",
            "43,008",
            13,
            "-84.8",
            "100,000",
            26,
            f"{_ZOO}, with shorter rollouts and a higher rate that falls",
        ),
    ),
    ("ppo", "LunarLander-v3"): Preset(
        {
            "steps": 1_000_000,
            "num_envs": 16,
            "length": 1024,
            "minibatches": 256,
            "epochs": 4,
            "gamma": 0.999,
            "lam": 0.98,
            "entropy": 0.01,
            "lr": 3e-4,
            "anneal_lr": False,
        },
        "untested",
        _ZOO,
    ),
    ("ppo", "Pendulum-v1"): Preset(
        {
            "steps": 100_000,
            "num_envs": 8,
            "length": 256,
            "minibatches": 32,
            "epochs": 10,
            "gamma": 0.95,
            "lam": 0.95,
            "entropy": 0.0,
            "lr": 1e-3,
            "anneal_lr": True,
            "clip": 0.2,
            "log_std": -0.5,
            "normalize_reward": True,
        },
        "verified",
        _verified(
            "-200, evaluation",
            "30,720",
            10,
            "-163.7",
            "100,000",
            31,
            f"{_ZOO}, without its gSDE, with scaled rewards and a rate that falls",
        ),
    ),
    ("ppo", MOVE_OR_SHOOT): Preset(
        {
            "steps": 100_000,
            "num_envs": 16,
            "length": 128,
            "minibatches": 8,
            "epochs": 10,
            "gamma": 0.99,
            "lam": 0.95,
            "entropy": 0.005,
            "lr": 1e-3,
            "anneal_lr": True,
            "log_std": -0.7,
        },
        "verified",
        _verified("0.85, evaluation", "30,720", 3, "0.90", "100,000", 10, "found by trial"),
    ),
    ("ppo", STATELESS): Preset(
        {
            "steps": 200_000,
            "num_envs": 32,
            "length": 64,
            "minibatches": 4,
            "epochs": 6,
            "gamma": 0.99,
            "lam": 0.95,
            "entropy": 0.0,
            "lr": 1e-3,
            "anneal_lr": True,
            "core": "lstm",
            "core_size": 64,
            "hidden": (64,),
            "normalize_obs": True,  # without velocities the numbers are small, and their differences smaller
            "normalize_reward": True,
        },
        "verified",
        _verified("300, mean of 100 training episodes", "63,488", 34, "292.7", "200,000", 110, "found by trial"),
    ),
    ("ppo", ATARI): Preset(
        {
            "steps": 10_000_000,
            "num_envs": 8,
            "length": 128,
            "minibatches": 4,
            "epochs": 4,
            "gamma": 0.99,
            "lam": 0.95,
            "entropy": 0.01,
            "value_coef": 0.5,
            "lr": 2.5e-4,
            "anneal_lr": True,
            "clip": 0.1,
            "anneal_clip": True,
        },
        "untested",
        _ZOO,
    ),
    ("ppo", HYBRID_WALK): Preset(
        _PPO_HYBRID_WALK,
        "verified",
        _verified("-1.1, evaluation", "14,336", 2, "-1.00", "40,000", 5, "a first guess"),
    ),
    ("ppo-search", "CartPole-v1"): Preset(
        _PPO_CARTPOLE | _SEARCHING,
        "verified",
        _verified("475, mean of 100 training episodes", "60,160", 94, "500.0", "100,000", 182, "as ppo"),
    ),
    ("ppo-search", HYBRID_WALK): Preset(
        _PPO_HYBRID_WALK | _SEARCHING,
        "verified",
        _verified("-1.1, evaluation", "12,288", 10, "-0.93", "40,000", 36, "as ppo"),
    ),
    ("alphazero", "corral/TicTacToe-v0"): Preset(
        {
            "steps": 100_000,
            "num_envs": 32,
            "sims": 32,
            "learning_starts": 2_000,
            "batch_size": 256,
            "replays": 8,
            "hidden": (128, 128),
            "temperature_moves": 9,
            "evaluation.env_kwargs": {"opponent": "perfect"},
            "evaluation.episodes": 200,
        },
        "verified",
        _verified("0 against perfect play, no game of 200 lost", "30,208", 10, "0.00", "100,000", 31, "a first guess"),
    ),
    ("alphazero", "corral/Connect4-v0"): Preset(
        {
            "steps": 2_400_000,
            "num_envs": 128,
            "sims": 64,
            "root": "puct",
            "temperature_moves": 12,
            "replays": 16,
            "capacity": 300_000,
            "evaluation.env_kwargs": {"opponent": "mcts:1000"},
            "evaluation.episodes": 100,
            "evaluation.every_steps": 400_000,
        },
        "verified",
        "1 of 1 seeds reaches 0.6, evaluation of 100 games against a 1,000-simulation rollout MCTS, after 2,004,992 "
        "steps and 1,697 s; 83 % won at the end, after 2,400,000 steps and 2,048 s; a first guess",
    ),
    ("a2c", "CartPole-v1"): Preset(
        {"steps": 500_000, "num_envs": 8, "length": 5, "lam": 1.0, "entropy": 0.0, "lr": 7e-4},
        "verified",
        _verified("475, mean of 100 training episodes", "147,520", 14, "500.0", "500,000", 43, _ZOO),
    ),
    ("a2c", "Acrobot-v1"): Preset(
        {
            "steps": 500_000,
            "num_envs": 16,
            "length": 5,
            "lam": 1.0,
            "entropy": 0.0,
            "lr": 7e-4,
            "normalize_obs": True,
            "normalize_reward": True,
        },
        "untested",
        _ZOO,
    ),
    ("a2c", ATARI): Preset(
        {
            "steps": 10_000_000,
            "num_envs": 16,
            "length": 5,
            "lam": 1.0,
            "entropy": 0.01,
            "value_coef": 0.5,  # the zoo's 0.25 of the squared error
            "lr": 7e-4,
        },
        "untested",
        f"{_ZOO}, with torch's RMSProp instead of TensorFlow's",
    ),
    ("impala", "CartPole-v1"): Preset(
        {
            "steps": 200_000,
            "num_envs": 16,
            "length": 20,
            "batch_size": 16,
            "entropy": 0.0,
            "lr": 2e-3,
            "normalize_reward": True,  # with values of 100 it gets there, and falls back now and then
        },
        "verified",
        _verified("450, mean of 100 training episodes", "86,080", 6, "500.0", "200,000", 15, "found by trial"),
    ),
    ("appo", "CartPole-v1"): Preset(
        {
            "steps": 200_000,
            "num_envs": 16,
            "length": 32,
            "batch_size": 16,
            "minibatches": 4,
            "epochs": 4,
            "entropy": 0.0,
            "lr": 1e-3,
            "normalize_reward": True,
        },
        "verified",
        _verified("450, mean of 100 training episodes", "77,312", 6, "500.0", "200,000", 14, "found by trial"),
    ),
    ("seed_impala", "CartPole-v1"): Preset(
        {
            "steps": 200_000,
            "num_envs": 16,
            "length": 20,
            "batch_size": 16,
            "entropy": 0.0,
            "lr": 2e-3,
            "normalize_reward": True,
        },
        "verified",
        _verified("450, mean of 100 training episodes", "93,120", 7, "500.0", "200,000", 14, "as impala"),
    ),
    ("apex", "CartPole-v1"): Preset(
        {
            "steps": 100_000,
            "num_envs": 16,
            "lr": 1e-3,
            "anneal_lr": True,
            "batch_size": 128,
            "capacity": 50_000,
            "learning_starts": 1_000,
            "train_every": 64,
            "updates": 16,
            "target_every": 64,
            "dueling": False,
            "hidden": (128, 128),
            "normalize_reward": True,
        },
        "verified",
        _verified("450, evaluation", "70,016", 24, "500.0", "100,000", 33, "as dqn, with the exploration of Ape-X"),
    ),
    ("dppo", "CartPole-v1"): Preset(
        _DPPO_CARTPOLE,
        "verified",
        _verified(
            "450, mean of 100 training episodes",
            "87,040",
            12,
            "500.0",
            "150,000",
            25,
            "as ppo, on 16 environments, 2 workers",
        ),
    ),
    ("ppo-ssp", "CartPole-v1"): Preset(
        _DPPO_CARTPOLE,
        "verified",
        _verified("450, mean of 100 training episodes", "73,216", 12, "500.0", "150,000", 22, "as dppo"),
    ),
    ("a3c", "CartPole-v1"): Preset(
        {
            "steps": 300_000,
            "num_envs": 16,
            "length": 16,
            "lam": 1.0,
            "entropy": 0.0,
            "lr": 2e-3,
            "anneal_lr": True,
            "normalize_advantage": True,
            "normalize_reward": True,
        },
        "verified",
        _verified(
            "450, mean of 100 training episodes", "79,872", 9, "500.0", "300,000", 21, "found by trial, 2 workers"
        ),
    ),
    ("gala", "CartPole-v1"): Preset(
        {
            "steps": 300_000,
            "num_envs": 16,
            "length": 16,
            "lam": 1.0,
            "entropy": 0.0,
            "lr": 1.4e-3,
            "normalize_reward": True,
        },
        "verified",
        _verified(
            "450, mean of 100 training episodes", "117,248", 8, "500.0", "300,000", 18, "found by trial, 2 workers"
        ),
    ),
    ("paac", "CartPole-v1"): Preset(
        {"steps": 500_000, "num_envs": 32, "workers": 2, "length": 5, "lam": 1.0, "entropy": 0.0, "lr": 1.4e-3},
        "verified",
        _verified(
            "450, mean of 100 training episodes", "207,520", 13, "500.0", "500,000", 31, "as a2c, with the rate of PAAC"
        ),
    ),
    ("reinforce", "CartPole-v1"): Preset(
        {"steps": 500_000, "num_envs": 8, "algorithm.episodes": 8, "lr": 1e-2, "anneal_lr": True, "gamma": 0.99},
        "verified",
        _verified("475, mean of 100 training episodes", "92,672", 5, "500.0", "500,000", 29, "found by trial"),
    ),
    ("dqn", "CartPole-v1"): Preset(
        {
            "steps": 50_000,
            "num_envs": 8,
            "lr": 1e-3,
            "anneal_lr": True,
            "batch_size": 128,
            "capacity": 100_000,
            "learning_starts": 1_000,
            "train_every": 64,
            "updates": 32,
            "target_every": 64,
            "n_step": 3,
            "epsilon_fraction": 0.16,
            "epsilon_end": 0.04,
            "hidden": (128, 128),
            "normalize_reward": True,  # values of 100 overshoot again and again, values of a few do not
        },
        "verified",
        _verified("475, evaluation", "15,040", 12, "500.0", "50,000", 39, "found by trial"),
    ),
    ("dqn", "Acrobot-v1"): Preset(
        {
            "steps": 50_000,
            "num_envs": 8,
            "lr": 1e-3,
            "anneal_lr": True,
            "batch_size": 128,
            "capacity": 50_000,
            "learning_starts": 1_000,
            "train_every": 32,
            "updates": 8,
            "target_every": 100,
            "n_step": 3,
            "epsilon_fraction": 0.2,
            "epsilon_end": 0.05,
            "hidden": (128, 128),
        },
        "verified",
        _verified("-100, mean of 100 training episodes", "19,264", 10, "-88.9", "50,000", 26, "found by trial"),
    ),
    ("dqn", "LunarLander-v3"): Preset(
        {
            "steps": 100_000,
            "num_envs": 4,
            "lr": 6.3e-4,
            "batch_size": 128,
            "capacity": 50_000,
            "learning_starts": 128,  # one batch: the zoo starts at once
            "train_every": 4,
            "updates": 4,
            "target_every": 250,
            "epsilon_fraction": 0.12,
            "epsilon_end": 0.1,
            "hidden": (256, 256),
        },
        "untested",
        f"{_ZOO}, on 4 environments instead of 1",
    ),
    ("dqn", ATARI): Preset(
        {
            "steps": 10_000_000,
            "num_envs": 4,
            "lr": 1e-4,
            "batch_size": 32,
            "capacity": 100_000,
            "learning_starts": 100_000,
            "train_every": 4,
            "updates": 1,
            "target_every": 250,  # 1000 environment steps
            "epsilon_fraction": 0.1,
            "epsilon_end": 0.01,
        },
        "untested",
        f"{_ZOO}, on 4 environments instead of 1",
    ),
}
"""(algorithm, environment) -> preset."""


def find(algo: str, env: str) -> str | None:
    """Name of the preset of this algorithm for an environment, None when there is none."""
    from corral.envs.suites.atari import is_atari_id

    name = ATARI if is_atari_id(env) else env
    return name if (algo, name) in PRESETS else None


def settings(algo: str, name: str) -> Mapping[str, Any]:
    """Settings of a preset; those of "none" are empty."""
    return {} if name == "none" else PRESETS[algo, name].settings


def describe(algo: str, name: str) -> str:
    """A preset in a few words, its status among them; of a run of another version, it may be gone by now."""
    if name == "none":
        return "no preset"
    preset = PRESETS.get((algo, name))
    return f"preset {name}, {preset.status if preset else 'unknown'}"


def verified(algo: str) -> list[str]:
    """Names of the verified presets of an algorithm."""
    return [name for (owner, name), preset in PRESETS.items() if owner == algo and preset.status == "verified"]
