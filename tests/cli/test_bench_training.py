"""`corral bench training`, `corral bench replay` and `corral bench learning`."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest

from corral.bench import replay, training
from corral.bench.claims import CLAIMS, Claim
from corral.bench.learning import Finding, Trial, examine, read_trial
from corral.bench.learning_table import MARKS, rivalries, section, table, write_section
from corral.bench.rounds import Outcome, Spread, play
from corral.bench.time_to_score import Arrival, Race
from corral.config.experiment import Experiment
from corral.config.presets import PRESETS
from corral.core.errors import RunFailed, UserError
from corral.runs.folder import RunFolder
from corral.runs.sinks.csv import CsvSink
from corral.testing.tasks import HybridWalk, MoveOrShoot, StatelessCartPole

COMMAND = [sys.executable, "-m", "corral.cli.main", "bench"]
START, END = MARKS["learning"]


def run(*args):
    return subprocess.run([*COMMAND, *map(str, args)], capture_output=True, text=True, timeout=280)


# -- training ------------------------------------------------------------------------------------------------------


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


def test_everybody_makes_the_same_number_of_updates_per_step():
    """Four DQN environments or sixteen: one update for every four steps."""
    for num_envs in (1, 4, 16):
        player = training.Training("dqn", num_envs, learning_starts=32, train_every=4, updates=1)
        try:
            while player._sync.env_steps < 1_000:
                player.run(0.001)
            assert player._sync.learner.version == pytest.approx((player._sync.env_steps - 32) / 4, abs=8)
        finally:
            player.close()


def test_sb3_is_compared_at_its_better_number_of_threads():
    case = training.TrainingCase("ppo", "PPO", [], ["corral"], ["SB3, 1 thread", "SB3, 2 threads"], 3.0, "corral")
    rates = {"corral": [400.0, 200.0], "SB3, 1 thread": [100.0, 50.0], "SB3, 2 threads": [110.0, 20.0]}
    outcome = Outcome(rates, {})
    assert case.base(outcome) == "SB3, 1 thread"
    (verdict,) = case.verdicts(outcome, [])
    assert (verdict.figure, verdict.contestant, verdict.reached) == (Spread(4.0, 4.0, 4.0), "corral", True)
    assert str(verdict).startswith("reached: PPO, corral over SB3, 1 thread >= 3: 4.00")
    assert case.verdicts(Outcome({"corral": [1.0]}, {}), []) == []


def test_layers_are_differences_and_the_largest_is_named_as_the_bound():
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


def test_times_to_a_score_are_compared_seed_by_seed_where_both_arrived():
    arrivals = {
        "corral": [Arrival(1, 2.0, 4_096), Arrival(2, 4.0, 8_192), Arrival(3, None, None)],
        "SB3": [Arrival(1, 8.0, 4_096), Arrival(2, 12.0, 6_144), Arrival(3, 5.0, 2_048)],
    }
    assert Race(arrivals, {}).ratio() == Spread(3.5, 3.0, 4.0)
    data = json.loads(json.dumps(Race(arrivals, {}).to_json(), allow_nan=False))
    assert data["arrivals"]["corral"][2] == {"seed": 3, "seconds": None, "steps": None}
    assert Race({"corral": arrivals["corral"]}, {"SB3": "not installed"}).to_json()["ratio"] is None


def test_the_training_command_gives_tables_and_numbers(tmp_path):
    done = run("training", "--case", "a2c", "--rounds", "1", "--seconds", "0.05", "--out", tmp_path)
    assert done.returncode == 0, done.stderr
    for words in ("A2C CartPole, 8 x 5 steps, steps per second", "milliseconds per 1,024 steps", "| corral ", "Wrote "):
        assert words in done.stdout
    data = json.loads((tmp_path / "training.json").read_text())
    (case,) = data["cases"]
    assert case["unit"] == "steps per second"
    assert not [why for why in case["skipped"].values() if why.startswith("failed")], case["skipped"]
    assert data["facts"]["versions"]["gymnasium"]


# -- replay --------------------------------------------------------------------------------------------------------


def test_both_replays_add_and_sample_the_same_experience(monkeypatch):
    monkeypatch.setattr(replay, "CAPACITY", 20_000)
    for case in replay.make_cases():
        outcome = play(case.entries, rounds=1, seconds=0.02)
        assert replay.CORRAL in outcome.rates
        assert not [why for why in outcome.skipped.values() if why.startswith("failed")], outcome.skipped


def test_a_missing_cpprb_is_named_and_skipped(monkeypatch):
    monkeypatch.setattr(replay, "CAPACITY", 20_000)
    monkeypatch.setitem(sys.modules, "cpprb", None)
    case = replay.make_cases()[0]
    outcome = play(case.entries, rounds=1, seconds=0.02)
    assert "pip install cpprb" in outcome.skipped[replay.CPPRB]
    assert case.verdicts(outcome) == []


# -- learning ------------------------------------------------------------------------------------------------------


def test_every_claim_is_of_settings_that_exist_and_a_preset_made_for_it():
    for claim in CLAIMS:
        experiment = Experiment.make(claim.algo, claim.env, overrides={**claim.overrides, "steps": claim.steps})
        assert experiment.preset != "none", claim.name
        steps = PRESETS[claim.algo, experiment.preset].settings["steps"]
        more = 2 if "compress" in claim.overrides else 1  # few bytes take more steps
        assert claim.steps in (steps, more * steps), "schedules span the run"


def test_presets_are_verified_by_the_claims_of_the_tables_and_by_nothing_else():
    claimed = {(claim.algo, claim.env) for claim in CLAIMS}
    assert claimed == {key for key, preset in PRESETS.items() if preset.status == "verified"}


def write_run(path, rows):
    folder = RunFolder.create(path, {"algo": "ppo"})
    log = CsvSink(folder.metrics_csv)
    for env_steps, wall_s, values in rows:
        log.write(env_steps, {"wall_s": wall_s, **values})
    log.close()


def test_a_bar_is_reached_when_a_hundred_episodes_say_so(tmp_path):
    write_run(
        tmp_path / "a",
        [
            (10, 1.0, {"train/return": 99.0, "train/episodes": 99.0}),  # one short of a hundred
            (20, 2.0, {"train/return": 40.0, "train/episodes": 150.0}),
            (30, 3.0, {"train/return": 60.0, "train/episodes": 160.0}),
            (40, 4.5, {"train/return": 45.0, "train/episodes": 170.0}),
        ],
    )
    claim = Claim("ppo", "CartPole-v1", "train100", 50, 100)
    assert read_trial(claim, 7, tmp_path / "a") == Trial(7, 30, 3.0, 45.0, 4.5)
    too_late = Claim("ppo", "CartPole-v1", "train100", 50, 25)
    assert read_trial(too_late, 7, tmp_path / "a").steps is None


def test_evaluations_count_by_themselves(tmp_path):
    write_run(
        tmp_path / "a",
        [
            (10, 1.0, {"train/return": 500.0, "train/episodes": 200.0}),
            (20, 2.0, {"train/return": 500.0, "train/episodes": 300.0, "eval/return": 48.0}),
            (30, 3.0, {"train/return": 500.0, "train/episodes": 400.0, "eval/return": 51.0}),
            (40, 4.0, {"train/return": 500.0, "train/episodes": 400.0}),
        ],
    )
    claim = Claim("dqn", "CartPole-v1", "eval", 50, 100)
    assert read_trial(claim, 1, tmp_path / "a") == Trial(1, 30, 3.0, 51.0, 4.0)


def test_what_searches_had_cost_when_the_bar_was_reached_is_on_record(tmp_path):
    searched = "search/simulator_steps"
    write_run(
        tmp_path / "a",
        [
            (10, 1.0, {"eval/return": 48.0, searched: 160.0}),
            (20, 2.0, {"eval/return": 51.0, searched: 320.0}),
            (30, 3.0, {"eval/return": 52.0, searched: 480.0}),
        ],
    )
    claim = Claim("ppo-search", "CartPole-v1", "eval", 50, 100)
    assert read_trial(claim, 1, tmp_path / "a").simulator_steps == 320
    hurried = Claim("ppo-search", "CartPole-v1", "eval", 50, 100, within_s=1.5)
    assert (trial := read_trial(hurried, 1, tmp_path / "a")).steps is None
    assert trial.simulator_steps is None


def test_a_game_is_trained_by_search_and_says_how_many_games_were_won(tmp_path):
    few = {"sims": "4", "learning_starts": "64", "batch_size": "32", "evaluation.episodes": "8"}
    easy = {"evaluation.env_kwargs": '{"opponent": "random"}'}
    small = ("--num-envs", "8")
    claim = Claim("alphazero", "corral/TicTacToe-v0", "eval", -1, 512, few | easy, options=small, game=True)
    (finding,) = examine([claim], [1], tmp_path, 1, lambda text: None)
    (trial,) = finding.trials
    assert finding.held
    assert trial.simulator_steps > 100
    assert 0.5 <= trial.won <= 1
    row = table([finding])[-1]
    assert f"{trial.won:.1%}" in row
    assert f"{trial.simulator_steps:,}" in row


def test_a_claim_is_trained_as_a_user_would_with_each_seed(tmp_path):
    claim = Claim("ppo", "CartPole-v1", "train100", 10, 12_000, {"evaluation.episodes": "0"})
    said = []
    (finding,) = examine([claim], [1, 2], tmp_path, 2, said.append)
    assert [trial.seed for trial in finding.trials] == [1, 2]
    assert finding.held
    assert all(trial.steps <= 12_000 and trial.final > 10 for trial in finding.trials)
    assert said == ["1 of 2: ppo CartPole-v1, seed 1", "2 of 2: ppo CartPole-v1, seed 2"]


def test_claims_that_one_run_tells_about_share_it(tmp_path):
    settings = 2_048, {"evaluation.episodes": "2"}
    by_training = Claim("ppo", "CartPole-v1", "train100", 0, *settings)
    by_evaluation = Claim("ppo", "CartPole-v1", "eval", 0, *settings, rival="ppo")
    said = []
    findings = examine([by_training, by_evaluation], [1], tmp_path, 1, said.append)
    assert said == ["1 of 1: ppo CartPole-v1, seed 1"]
    assert [finding.claim for finding in findings] == [by_training, by_evaluation]
    assert findings[0].trials[0].final != findings[1].trials[0].final
    assert "times the environment steps of ppo to 0, evaluation" in rivalries(findings)[0]


def test_a_run_that_fails_says_why(tmp_path):
    claim = Claim("dqn", "Pendulum-v1", "eval", 0, 100)
    with pytest.raises(RunFailed, match=r"dqn Pendulum-v1, seed 1 failed: corral: .*discrete actions"):
        examine([claim], [1], tmp_path, 1, lambda text: None)


def test_the_table_says_how_many_seeds_reached_the_bar():
    claim = Claim("ppo", "CartPole-v1", "train100", 475, 100_000)
    trials = [Trial(1, 60_000, 10.0, 500.0, 20.0), Trial(2, 80_000, 14.0, 490.0, 22.0), Trial(3, None, None, 9.0, 21.0)]
    finding = Finding(claim, trials)
    assert not finding.held
    row = table([finding])[-1]
    for words in ("CartPole-v1", "475, mean of 100 training episodes", "2 of 3", "70,000 (60,000 to 80,000)"):
        assert words in row
    assert "490.0 (9.0 to 500.0)" in row
    assert len({line.count("|") for line in table([finding])}) == 1
    never = table([Finding(claim, trials[2:])])[-1]
    assert "| 0 of 1 | -" in never


def test_columns_that_nobody_has_anything_to_say_in_are_left_out():
    plain = Claim("ppo", "CartPole-v1", "train100", 475, 100_000, table="planning")
    planned = Claim("ppo-search", "CartPole-v1", "train100", 475, 100_000, rival="ppo", within_s=3600)
    without = Finding(plain, [Trial(1, 60_000, 10.0, 500.0, 20.0)])
    searched = Finding(planned, [Trial(1, 30_000, 40.0, 500.0, 90.0, simulator_steps=120_000)])
    assert "simulator steps" not in table([without])[0]
    head, _, first, second = table([without, searched])
    assert head.split("|")[-2].strip() == "simulator steps"
    assert first.split("|")[-2].strip() == "-"
    assert second.split("|")[-2].strip() == "120,000 (120,000 to 120,000)"
    assert "100,000, 60 min" in second


def test_rivals_are_compared_seed_by_seed_by_their_steps_to_the_bar():
    base = Claim("ppo", "CartPole-v1", "train100", 475, 100_000)
    other = Claim("ppo-search", "CartPole-v1", "train100", 475, 100_000, rival="ppo")
    rivals = Finding(base, [Trial(1, 40_000, 1.0, 500.0, 2.0), Trial(2, 80_000, 1.0, 500.0, 2.0)])
    finding = Finding(other, [Trial(1, 30_000, 1.0, 500.0, 2.0), Trial(2, 20_000, 1.0, 500.0, 2.0)])
    (line,) = rivalries([rivals, finding])
    assert line.startswith("- ppo-search CartPole-v1: 0.50 (0.25 to 0.75) times the environment steps of ppo")
    (line,) = rivalries([rivals, Finding(other, [Trial(1, None, None, 9.0, 2.0)])])
    assert "no known number" in line
    assert rivalries([finding]) == []


def test_the_table_replaces_what_is_between_its_markers_and_nothing_else(tmp_path):
    path = tmp_path / "BENCHMARKS.md"
    path.write_text(f"# Mine\n{START}\nold\n{END}\n\nkeep\n")
    write_section(path, ["new", "lines"])
    write_section(path, ["newer", "lines"])
    assert path.read_text() == f"# Mine\n{START}\nnewer\nlines\n{END}\n\nkeep\n"
    path.write_text("no markers")
    with pytest.raises(UserError, match="no place for the table"):
        write_section(path, ["new"])
    write_section(tmp_path / "other.md", ["new"])
    assert f"{START}\nnew\n{END}\n" in (tmp_path / "other.md").read_text()
    write_section(tmp_path / "shared.md", ["new"], "sharing")
    before, after = MARKS["sharing"]
    assert f"{before}\nnew\n{after}\n" in (tmp_path / "shared.md").read_text()


def test_the_section_names_machine_versions_and_command():
    facts = {"date": "2026-01-01T00:00:00", "cores": 2, "cpu": "a processor", "python": "3.11", "versions": {"x": "1"}}
    text = "\n".join(section([], facts, "corral bench learning --seeds 5", 2))
    for words in ("`corral bench learning --seeds 5` on 2026-01-01", "2 cores of a processor", "x 1", "side by side"):
        assert words in text


# -- tasks ---------------------------------------------------------------------------------------------------------


def mean_return(env, policy, episodes=400):
    total = 0.0
    for seed in range(episodes):
        obs, _ = env.reset(seed=seed)
        over = False
        while not over:
            obs, reward, terminated, truncated, _ = env.step(policy(obs))
            total, over = total + reward, terminated or truncated
    return total / episodes


def test_move_or_shoot_needs_both_the_choice_and_the_number():
    env = MoveOrShoot()
    env.action_space.seed(0)

    def aim(obs):
        return {"shoot": 1, "by": np.clip(obs[:1] / env.reach, -1, 1)}

    def best(obs):
        near = abs(obs[0]) <= env.reach + env.tolerance
        return aim(obs) if near else {"shoot": 0, "by": np.clip(obs[:1] / env.step_size, -1, 1)}

    assert mean_return(env, best) == pytest.approx(env.best_return, abs=0.02)
    assert mean_return(env, aim) < 0
    assert mean_return(env, lambda obs: {**best(obs), "by": np.zeros(1)}) < 0
    assert mean_return(env, lambda obs: env.action_space.sample()) < -0.5


def test_hybrid_walk_needs_both_the_direction_and_the_distance():
    env = HybridWalk()

    def best(obs):
        return {"sign": int(obs[0] < 0), "far": np.minimum(abs(obs), 1)}

    assert mean_return(env, best) == pytest.approx(env.best_return, abs=0.1)
    assert mean_return(env, lambda obs: {**best(obs), "sign": 1}) < -8
    assert mean_return(env, lambda obs: {**best(obs), "far": np.ones(1)}) < -4
    assert mean_return(env, lambda obs: {**best(obs), "far": np.zeros(1)}) == pytest.approx(-12, abs=0.6)


def test_stateless_cartpole_shows_place_and_angle_alone():
    env, whole = StatelessCartPole(), StatelessCartPole().env
    seen, _ = env.reset(seed=3)
    full, _ = whole.reset(seed=3)
    assert env.observation_space.contains(seen)
    np.testing.assert_array_equal(seen, full[[0, 2]])


# -- mistakes ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["training", "--rounds", "0"], "--rounds must be at least 1"),
        (["training", "--seconds", "nan"], "--seconds must be positive"),
        (["training", "--case", "sac"], "sac"),
        (["replay", "--out", __file__], "cannot be a folder"),
        (["learning", "--seeds", "0"], "--seeds must be at least 1"),
        (["learning", "--only", "chess"], "No claim has 'chess' in its name; there are ppo CartPole-v1"),
    ],
)
def test_a_mistake_is_one_sentence(args, words):
    done = run(*args)
    assert done.returncode == 2
    assert words in done.stderr
    assert done.stderr.count("\n") == 1
