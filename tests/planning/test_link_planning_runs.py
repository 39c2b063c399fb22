"""Training and policies that search in C++ simulators."""

import re
import subprocess

import pytest
from helpers.sims import free_url

import corral
from corral.cli.main import main
from corral.envs.supervision import Supervision
from corral.planning.shooting import Shooting
from corral.runs.sinks.csv import read_metrics

FEW = {"step_timeout_s": 20.0, "start_timeout_s": 30.0}


@pytest.mark.parametrize(
    "policy",
    [lambda: corral.Search(None, sims=12, rollout_steps=3), lambda: Shooting(8, 4)],
    ids=["search", "shooting"],
)
def test_planning_policy_survives_killed_simulator(built, policy):
    url = free_url()
    running = [subprocess.Popen([built / "cartpole", "--connect", url]) for _ in range(2)]
    try:
        with (
            corral.make_vec(url, 4, workers=2, supervision=Supervision(**FEW), env_kwargs={"reconnect_s": 0.3}) as vec,
            corral.Sampler(vec, policy()) as sampler,
        ):
            rollouts = sampler.rollouts(steps=5)
            assert not next(rollouts).faulty.any()
            running[0].kill()
            assert next(rollouts).faulty.sum() == 2
            assert not next(rollouts).faulty.any()
    finally:
        for process in running:
            process.kill()
            process.wait()


@pytest.mark.parametrize("topology", ["sync", "central_inference"])
def test_searching_simulators_share_one_evaluator(built, tmp_path, topology):
    result = corral.train(
        "ppo-search", "tcp://127.0.0.1:0", 512, 1, tmp_path / "x", preset="CartPole-v1", topology=topology, quiet=True,
        env_kwargs={"sim": f"{built / 'cartpole'} --connect {{url}}", "sims": 2}, num_envs=4,
        **{"ppo.num_steps": 32, "num_simulations": 8, "search_fraction": 1.0, "eval_episodes": 0, "log_every": 1},
    )  # fmt: skip
    metrics = read_metrics(result.run_dir)
    assert metrics["search/simulator_steps"][-1] > 7 * metrics["env_steps"][-1] > 7 * 500


@pytest.mark.parametrize("opponent", [None, "random"])
def test_alphazero_in_simulators_keeps_best_only_vs_opponent(built, tmp_path, opponent, capsys):
    against = {} if opponent is None else {"eval_env_kwargs": {"opponent": opponent}}
    corral.train(
        "alphazero", "tcp://127.0.0.1:0", 64, 1, tmp_path / "x", quiet=True, num_envs=4,
        env_kwargs={"sim": f"{built / 'connect4'} --connect {{url}}"}, hidden_sizes=(16,), eval_episodes=2,
        num_simulations=2, learning_starts=32, batch_size=16, **against,
    )  # fmt: skip
    assert (tmp_path / "x" / "checkpoints" / "best").exists() == (opponent is not None)
    assert ("no_opponent" in (tmp_path / "x" / "events.jsonl").read_text()) == (opponent is None)
    assert main(["eval", str(tmp_path / "x"), "--opponent", "mcts:8", "--episodes", "4", "--deterministic"]) == 0
    won, drawn, lost = map(
        int, re.search(r"mcts:8, .*: (\d) won, (\d) drawn, (\d) lost", capsys.readouterr().out).groups()
    )
    assert won + drawn + lost == 4
    assert main(["eval", str(tmp_path / "x"), "--opponent", "perfect"]) == 2
    assert "use random or mcts:1000" in capsys.readouterr().err
