"""Whole runs of PPO with search: what they count and evaluate, and what they refuse."""

import csv
import os

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

import corral
from corral.algos.search.ppo_search import Config
from corral.cli.main import main
from corral.core.errors import UserError
from corral.testing.tasks import HybridWalk


@pytest.mark.slow
def test_hybrid_task_is_learned_from_searches(tmp_path):
    result = corral.train(
        "ppo-search", env=HybridWalk, preset="none", steps=6_000, seed=1, run_dir=tmp_path / "x", num_envs=8,
        learning_rate=3e-3,
        num_steps=32, search_fraction=1.0, num_simulations=12, distill_coef=1.0, min_explained_variance=-9.0,
        ent_coef=0.0, eval_episodes=20,
        eval_every=6_000,
    )  # fmt: skip
    assert result.eval_return > -5.5  # at best -0.83; standing still gives -12
    with (tmp_path / "x" / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert float(rows[-1]["search/simulator_steps"]) > 12 * 5_000


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"num_simulations": 0}, "num_simulations must be at least 1"),
        ({"search_fraction": 1.5}, "search_fraction must be at most 1"),
        ({"num_simulations": "many"}, "schedule such as"),
        ({"max_importance_weight": 0.5}, "max_importance_weight"),
    ],
)
def test_invalid_settings_are_refused(changes, sentence):
    with pytest.raises(UserError, match=sentence):
        Config(**changes)


@pytest.mark.parametrize("topology", ["actor_learner", "data_parallel"])
def test_simulator_steps_of_searches_are_counted(tmp_path, topology):
    corral.train(
        "ppo-search", env="CartPole-v1", steps=200, num_envs=4, topology=topology, actors=2, runtime="inline",
        num_steps=16, num_simulations=4, search_fraction=1.0, eval_episodes=0, run_dir=tmp_path,
    )  # fmt: skip
    with (tmp_path / "metrics.csv").open() as file:
        row = list(csv.DictReader(file))[-1]
    assert float(row["search/simulator_steps"]) > 3 * float(row["env_steps"]) * 0.8


def test_actors_report_reward_scale_for_searching_evaluations(tmp_path):
    corral.train(
        "ppo-search", env="Pendulum-v1", search_mode="eval", steps=400, num_envs=2, topology="actor_learner", actors=2,
        runtime="inline", num_steps=50, num_simulations=2, eval_episodes=1, normalize_reward=True, run_dir=tmp_path,
    )  # fmt: skip
    assert 0 < corral.load_policy(tmp_path).reward_scale < 0.5  # costs add up to many times 1


class Live(gymnasium.Env):
    """Shows what nobody can bring back."""

    observation_space, action_space = spaces.Box(0, 1e10, (1,), np.float64), spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self._obs(), {}

    def step(self, action):
        return self._obs(), 0.0, False, False, {}

    def _obs(self):
        return np.frombuffer(os.urandom(4), np.uint32).astype(np.float64)


def test_env_without_states_is_refused_with_remedy(tmp_path):
    with pytest.raises(UserError, match=r"Live cannot be saved: .*implement state_dict\(\) and load_state_dict"):
        corral.train(
            "ppo-search", Live, 64, 1, tmp_path / "x", quiet=True, **{"ppo.num_steps": 16, "search_fraction": 1.0}
        )


def test_envs_in_other_processes_are_refused_with_remedy(tmp_path):
    with pytest.raises(UserError, match="backend=local"):
        corral.train(
            "ppo-search", env="CartPole-v1", steps=1_000, run_dir=tmp_path / "x", backend="process", num_envs=4
        )


def test_searching_evaluation_runs_in_this_process(tmp_path, capsys):
    corral.train(
        "ppo-search", env="CartPole-v1", search_mode="eval", steps=64, num_envs=2, num_steps=16, num_simulations=2,
        eval_episodes=1,
        backend="process", workers=1, run_dir=tmp_path,
    )  # fmt: skip
    assert main(["eval", str(tmp_path), "--episodes", "1", "--deterministic"]) == 0
    assert "deterministic" in capsys.readouterr().out


def test_a_game_of_two_is_left_to_alphazero(tmp_path):
    with pytest.raises(UserError, match="alphazero"):
        corral.train("ppo-search", env="corral/TicTacToe-v0", steps=1_000, run_dir=tmp_path / "x")
