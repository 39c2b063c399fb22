"""Settings known to fit an algorithm to an environment, and whether anybody has checked that they do.

The numbers start from rl-baselines3-zoo (`hyperparams/*.yml`) and CleanRL, in Corral's names: a minibatch of 64 from
16 x 256 steps is `num_minibatches` 64, a linear schedule is `anneal_lr` or `clip_coef: 0.2:0`.
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
    "num_steps": 32,
    "num_minibatches": 2,  # of 128 rows: less luck of the seed than one of 256
    "update_epochs": 10,
    "gamma": 0.98,
    "gae_lambda": 0.8,
    "ent_coef": 0.0,
    "learning_rate": 1e-3,
    "anneal_lr": True,
    "clip_coef": "0.2:0",
}
_DPPO_CARTPOLE = _PPO_CARTPOLE | {"steps": 150_000, "num_envs": 16}
_PPO_HYBRID_WALK = {
    "steps": 40_000,
    "num_envs": 8,
    "num_steps": 64,
    "num_minibatches": 4,
    "update_epochs": 10,
    "gamma": 0.95,
    "gae_lambda": 0.95,
    "ent_coef": 0.0,
    "learning_rate": 1e-3,
    "anneal_lr": True,
    "log_std_init": -0.7,
    "eval_episodes": 100,  # episodes differ by 1
    "eval_every": 2_000,
}
_SEARCHING = {"search_mode": "ppo+distill", "num_simulations": 16, "search_fraction": 0.5, "distill_coef": 1.0}

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
            "num_steps": 128,
            "num_minibatches": 16,
            "update_epochs": 6,
            "gamma": 0.99,
            "gae_lambda": 0.94,
            "ent_coef": 0.0,
            "learning_rate": 1e-3,
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
            "num_steps": 1024,
            "num_minibatches": 256,
            "update_epochs": 4,
            "gamma": 0.999,
            "gae_lambda": 0.98,
            "ent_coef": 0.01,
            "learning_rate": 3e-4,
            "anneal_lr": False,
        },
        "untested",
        _ZOO,
    ),
    ("ppo", "Pendulum-v1"): Preset(
        {
            "steps": 100_000,
            "num_envs": 8,
            "num_steps": 256,
            "num_minibatches": 32,
            "update_epochs": 10,
            "gamma": 0.95,
            "gae_lambda": 0.95,
            "ent_coef": 0.0,
            "learning_rate": 1e-3,
            "anneal_lr": True,
            "clip_coef": 0.2,
            "log_std_init": -0.5,
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
            "num_steps": 128,
            "num_minibatches": 8,
            "update_epochs": 10,
            "gamma": 0.99,
            "gae_lambda": 0.95,
            "ent_coef": 0.005,
            "learning_rate": 1e-3,
            "anneal_lr": True,
            "log_std_init": -0.7,
        },
        "verified",
        _verified("0.85, evaluation", "30,720", 3, "0.90", "100,000", 10, "found by trial"),
    ),
    ("ppo", STATELESS): Preset(
        {
            "steps": 200_000,
            "num_envs": 32,
            "num_steps": 64,
            "num_minibatches": 4,
            "update_epochs": 6,
            "gamma": 0.99,
            "gae_lambda": 0.95,
            "ent_coef": 0.0,
            "learning_rate": 1e-3,
            "anneal_lr": True,
            "rnn": "lstm",
            "rnn_size": 64,
            "hidden_sizes": (64,),
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
            "num_steps": 128,
            "num_minibatches": 4,
            "update_epochs": 4,
            "gamma": 0.99,
            "gae_lambda": 0.95,
            "ent_coef": 0.01,
            "vf_coef": 0.5,
            "learning_rate": 2.5e-4,
            "anneal_lr": True,
            "clip_coef": "0.1:0",
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
            "num_simulations": 32,
            "learning_starts": 2_000,
            "batch_size": 256,
            "replay_ratio": 8,
            "hidden_sizes": (128, 128),
            "temperature_moves": 9,
            "eval_env_kwargs": {"opponent": "perfect"},
            "eval_episodes": 200,
        },
        "verified",
        _verified("0 against perfect play, no game of 200 lost", "30,208", 10, "0.00", "100,000", 31, "a first guess"),
    ),
    ("alphazero", "corral/Connect4-v0"): Preset(
        {
            "steps": 2_400_000,
            "num_envs": 128,
            "num_simulations": 64,
            "root_selection": "puct",
            "temperature_moves": 12,
            "replay_ratio": 16,
            "buffer_size": 300_000,
            "eval_env_kwargs": {"opponent": "mcts:1000"},
            "eval_episodes": 100,
            "eval_every": 400_000,
        },
        "verified",
        "1 of 1 seeds reaches 0.6, evaluation of 100 games against a 1,000-simulation rollout MCTS, after 2,004,992 "
        "steps and 1,697 s; 83 % won at the end, after 2,400,000 steps and 2,048 s; a first guess",
    ),
    ("a2c", "CartPole-v1"): Preset(
        {"steps": 500_000, "num_envs": 8, "num_steps": 5, "gae_lambda": 1.0, "ent_coef": 0.0, "learning_rate": 7e-4},
        "verified",
        _verified("475, mean of 100 training episodes", "147,520", 14, "500.0", "500,000", 43, _ZOO),
    ),
    ("a2c", "Acrobot-v1"): Preset(
        {
            "steps": 500_000,
            "num_envs": 16,
            "num_steps": 5,
            "gae_lambda": 1.0,
            "ent_coef": 0.0,
            "learning_rate": 7e-4,
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
            "num_steps": 5,
            "gae_lambda": 1.0,
            "ent_coef": 0.01,
            "vf_coef": 0.5,  # the zoo's 0.25 of the squared error
            "learning_rate": 7e-4,
        },
        "untested",
        f"{_ZOO}, with torch's RMSProp instead of TensorFlow's",
    ),
    ("impala", "CartPole-v1"): Preset(
        {
            "steps": 200_000,
            "num_envs": 16,
            "num_steps": 20,
            "batch_size": 16,
            "ent_coef": 0.0,
            "learning_rate": 2e-3,
            "normalize_reward": True,  # with values of 100 it gets there, and falls back now and then
        },
        "verified",
        _verified("450, mean of 100 training episodes", "86,080", 6, "500.0", "200,000", 15, "found by trial"),
    ),
    ("appo", "CartPole-v1"): Preset(
        {
            "steps": 200_000,
            "num_envs": 16,
            "num_steps": 32,
            "batch_size": 16,
            "num_minibatches": 4,
            "update_epochs": 4,
            "ent_coef": 0.0,
            "learning_rate": 1e-3,
            "normalize_reward": True,
        },
        "verified",
        _verified("450, mean of 100 training episodes", "77,312", 6, "500.0", "200,000", 14, "found by trial"),
    ),
    ("seed_impala", "CartPole-v1"): Preset(
        {
            "steps": 200_000,
            "num_envs": 16,
            "num_steps": 20,
            "batch_size": 16,
            "ent_coef": 0.0,
            "learning_rate": 2e-3,
            "normalize_reward": True,
        },
        "verified",
        _verified("450, mean of 100 training episodes", "93,120", 7, "500.0", "200,000", 14, "as impala"),
    ),
    ("apex", "CartPole-v1"): Preset(
        {
            "steps": 100_000,
            "num_envs": 16,
            "learning_rate": 1e-3,
            "anneal_lr": True,
            "batch_size": 128,
            "buffer_size": 50_000,
            "learning_starts": 1_000,
            "train_frequency": 64,
            "gradient_steps": 16,
            "target_update_period": 64,
            "dueling": False,
            "hidden_sizes": (128, 128),
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
            "num_steps": 16,
            "gae_lambda": 1.0,
            "ent_coef": 0.0,
            "learning_rate": 2e-3,
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
            "num_steps": 16,
            "gae_lambda": 1.0,
            "ent_coef": 0.0,
            "learning_rate": 1.4e-3,
            "normalize_reward": True,
        },
        "verified",
        _verified(
            "450, mean of 100 training episodes", "117,248", 8, "500.0", "300,000", 18, "found by trial, 2 workers"
        ),
    ),
    ("paac", "CartPole-v1"): Preset(
        {
            "steps": 500_000,
            "num_envs": 32,
            "workers": 2,
            "num_steps": 5,
            "gae_lambda": 1.0,
            "ent_coef": 0.0,
            "learning_rate": 1.4e-3,
        },
        "verified",
        _verified(
            "450, mean of 100 training episodes", "207,520", 13, "500.0", "500,000", 31, "as a2c, with the rate of PAAC"
        ),
    ),
    ("reinforce", "CartPole-v1"): Preset(
        {
            "steps": 500_000,
            "num_envs": 8,
            "episodes_per_update": 8,
            "learning_rate": 1e-2,
            "anneal_lr": True,
            "gamma": 0.99,
        },
        "verified",
        _verified("475, mean of 100 training episodes", "92,672", 5, "500.0", "500,000", 29, "found by trial"),
    ),
    ("dqn", "CartPole-v1"): Preset(
        {
            "steps": 50_000,
            "num_envs": 8,
            "learning_rate": 1e-3,
            "anneal_lr": True,
            "batch_size": 128,
            "buffer_size": 100_000,
            "learning_starts": 1_000,
            "train_frequency": 64,
            "gradient_steps": 32,
            "target_update_period": 64,
            "n_step": 3,
            "exploration_fraction": 0.16,
            "exploration_final_eps": 0.04,
            "hidden_sizes": (128, 128),
            "normalize_reward": True,  # values of 100 overshoot again and again, values of a few do not
        },
        "verified",
        _verified("475, evaluation", "15,040", 12, "500.0", "50,000", 39, "found by trial"),
    ),
    ("dqn", "Acrobot-v1"): Preset(
        {
            "steps": 50_000,
            "num_envs": 8,
            "learning_rate": 1e-3,
            "anneal_lr": True,
            "batch_size": 128,
            "buffer_size": 50_000,
            "learning_starts": 1_000,
            "train_frequency": 32,
            "gradient_steps": 8,
            "target_update_period": 100,
            "n_step": 3,
            "exploration_fraction": 0.2,
            "exploration_final_eps": 0.05,
            "hidden_sizes": (128, 128),
        },
        "verified",
        _verified("-100, mean of 100 training episodes", "19,264", 10, "-88.9", "50,000", 26, "found by trial"),
    ),
    ("dqn", "LunarLander-v3"): Preset(
        {
            "steps": 100_000,
            "num_envs": 4,
            "learning_rate": 6.3e-4,
            "batch_size": 128,
            "buffer_size": 50_000,
            "learning_starts": 128,  # one batch: the zoo starts at once
            "train_frequency": 4,
            "gradient_steps": 4,
            "target_update_period": 250,
            "exploration_fraction": 0.12,
            "exploration_final_eps": 0.1,
            "hidden_sizes": (256, 256),
        },
        "untested",
        f"{_ZOO}, on 4 environments instead of 1",
    ),
    ("dqn", ATARI): Preset(
        {
            "steps": 10_000_000,
            "num_envs": 4,
            "learning_rate": 1e-4,
            "batch_size": 32,
            "buffer_size": 100_000,
            "learning_starts": 100_000,
            "train_frequency": 4,
            "gradient_steps": 1,
            "target_update_period": 250,  # 1000 environment steps
            "exploration_fraction": 0.1,
            "exploration_final_eps": 0.01,
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
