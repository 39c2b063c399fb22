"""`python -m benchmarks training`."""

from __future__ import annotations

import json

import pytest
from command import run

from benchmarks.common.rounds import Outcome, Spread, play
from benchmarks.training import cases as training
from benchmarks.training.time_to_score import Arrival, Race


@pytest.mark.parametrize("name", training.CASES)
def test_every_contestant_of_a_case_trains(name):
    if name == "ppo":
        pytest.importorskip("stable_baselines3")
    case = training.make_case(name)
    outcome = play([e for e in case.entries if "2 threads" not in e.name], rounds=1, seconds=0.05)
    assert not [why for why in outcome.skipped.values() if why.startswith("failed")], outcome.skipped
    assert {*case.ours, training.BARE, training.DRAWN, training.ACTING} <= set(outcome.rates)
    (row,) = case.layers(outcome)
    assert list(row.layers) == list(training.COLUMNS)
    assert sum(part.median for part in row.layers.values()) == pytest.approx(row.total.median)


def test_all_contestants_update_equally_often():
    """Four DQN environments or sixteen: one update for every four steps."""
    for num_envs in (1, 4, 16):
        player = training.Training("dqn", num_envs, learning_starts=32, train_frequency=4, gradient_steps=1)
        try:
            while player._sync.env_steps < 1_000:
                player.run(0.001)
            assert player._sync.learner.version == pytest.approx((player._sync.env_steps - 32) / 4, abs=8)
        finally:
            player.close()


def test_ratio_uses_the_best_thread_count_of_sb3():
    case = training.TrainingCase("ppo", "PPO", [], ["corral"], ["SB3, 1 thread", "SB3, 2 threads"], 3.0, "corral")
    rates = {"corral": [400.0, 200.0], "SB3, 1 thread": [100.0, 50.0], "SB3, 2 threads": [110.0, 20.0]}
    outcome = Outcome(rates, {})
    assert case.base(outcome) == "SB3, 1 thread"
    (verdict,) = case.verdicts(outcome, [])
    assert (verdict.figure, verdict.contestant, verdict.reached) == (Spread(4.0, 4.0, 4.0), "corral", True)
    assert str(verdict).startswith("PPO, corral over SB3, 1 thread: 4.00 (target: at least 3). Met. Measured: corral.")
    assert case.verdicts(Outcome({"corral": [1.0]}, {}), []) == []


def test_largest_layer_is_named_as_the_bound():
    case = training.TrainingCase("a2c", "A2C", [], ["corral"], ["SB3"], 2.0, "corral")
    seconds = {training.BARE: 0.010, training.DRAWN: 0.015, training.ACTING: 0.022, "corral": 0.042, "SB3": 0.1}
    outcome = Outcome({name: [1024 / s, 1024 / s / 2] for name, s in seconds.items()}, {})
    (row,) = case.layers(outcome)
    assert {k: v.low for k, v in row.layers.items()} == pytest.approx(
        {"simulator": 10.0, "bookkeeping": 5.0, "acting": 7.0, "learning": 20.0}
    )
    (verdict,) = case.verdicts(outcome, [row])
    assert "learning takes 30.0 of 63.0 ms per 1,024 steps; the simulator alone 15.0 ms" in str(verdict)
    assert case.layers(Outcome({"corral": [1.0]}, {})) == []


def test_time_to_score_is_paired_by_seed():
    arrivals = {
        "corral": [Arrival(1, 2.0, 4_096), Arrival(2, 4.0, 8_192), Arrival(3, None, None)],
        "SB3": [Arrival(1, 8.0, 4_096), Arrival(2, 12.0, 6_144), Arrival(3, 5.0, 2_048)],
    }
    assert Race(arrivals, {}).ratio() == Spread(3.5, 3.0, 4.0)
    data = json.loads(json.dumps(Race(arrivals, {}).to_json(), allow_nan=False))
    assert data["arrivals"]["corral"][2] == {"seed": 3, "seconds": None, "steps": None}
    assert Race({"corral": arrivals["corral"]}, {"SB3": "not installed"}).to_json()["ratio"] is None


def test_command_prints_tables_and_writes_json(tmp_path):
    done = run("training", "--case", "a2c", "--rounds", "1", "--seconds", "0.05", "--out", tmp_path)
    assert done.returncode == 0, done.stderr
    for words in ("A2C CartPole, 8 x 5 steps, steps per second", "milliseconds per 1,024 steps", "| corral ", "Wrote "):
        assert words in done.stdout
    data = json.loads((tmp_path / "training.json").read_text())
    (case,) = data["cases"]
    assert case["unit"] == "steps per second"
    assert not [why for why in case["skipped"].values() if why.startswith("failed")], case["skipped"]
    assert data["facts"]["versions"]["gymnasium"]


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["training", "--rounds", "0"], "--rounds must be at least 1"),
        (["training", "--seconds", "nan"], "--seconds must be positive"),
        (["training", "--case", "sac"], "sac"),
    ],
)
def test_user_error_is_one_line(args, words):
    done = run(*args)
    assert done.returncode == 2
    assert words in done.stderr
    assert done.stderr.count("\n") == 1
