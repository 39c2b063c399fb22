"""`python -m benchmarks learning`."""

from __future__ import annotations

import pytest
from command import run

from benchmarks.learning.claims import CLAIMS, Claim
from benchmarks.learning.table import MARKS, rivalries, section, table, write_section
from benchmarks.learning.trials import Finding, Trial, examine, read_trial
from corral.config.experiment import Experiment
from corral.config.presets import all_presets
from corral.core.errors import RunFailed, UserError
from corral.runs.folder import RunFolder
from corral.runs.sinks.csv import CsvSink

START, END = MARKS["learning"]


def test_claims_use_valid_settings_and_a_preset():
    for claim in CLAIMS:
        if claim.table == "precision":  # tasks of the benchmark, with settings of their own
            Experiment.make(claim.algo, claim.env, overrides={**claim.overrides, "steps": claim.steps})
            continue
        experiment = Experiment.make(claim.algo, claim.env, overrides={**claim.overrides, "steps": claim.steps})
        assert experiment.preset != "none", claim.name
        steps = all_presets()[claim.algo, experiment.preset].settings["steps"]
        more = 2 if "compress" in claim.overrides else 1  # few bytes take more steps
        assert claim.steps in (steps, more * steps), "schedules span the run"


def test_verified_presets_are_exactly_the_claims():
    claimed = {(claim.algo, claim.env) for claim in CLAIMS if claim.table != "precision"}
    assert claimed == {key for key, preset in all_presets().items() if preset.status == "verified"}


def write_run(path, rows):
    folder = RunFolder.create(path, {"algo": "ppo"})
    log = CsvSink(folder.metrics_csv)
    for env_steps, wall_s, values in rows:
        log.write(env_steps, {"wall_s": wall_s, **values})
    log.close()


def test_bar_is_reached_by_the_mean_of_100_episodes(tmp_path):
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


def test_bar_is_reached_by_one_evaluation(tmp_path):
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


def test_trial_records_search_cost_at_the_bar(tmp_path):
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


def test_game_claim_reports_games_won(tmp_path):
    few = {"num_simulations": "4", "learning_starts": "64", "batch_size": "32", "eval_episodes": "8"}
    easy = {"eval_env_kwargs": '{"opponent": "random"}'}
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


def test_precision_table_shows_what_was_chosen(tmp_path):
    settings = {
        "num_steps": "8",
        "num_minibatches": "1",
        "update_epochs": "1",
        "eval_episodes": "1",
        "precision": "bf16",
    }
    claim = Claim("ppo", "benchmarks.learning.pixels:MatchQuadrant", "eval", -1, 64, settings, table="precision")
    (finding,) = examine([claim], [1], tmp_path, 1, lambda text: None)
    assert finding.trials[0].precision == "bf16"
    head, _, row = table([finding])
    assert [line.split("|")[-2].strip() for line in (head, row)] == ["encoder in", "bf16"]


def test_claim_is_trained_with_each_seed(tmp_path):
    claim = Claim("ppo", "CartPole-v1", "train100", 10, 12_000, {"eval_episodes": "0"})
    said = []
    (finding,) = examine([claim], [1, 2], tmp_path, 2, said.append)
    assert [trial.seed for trial in finding.trials] == [1, 2]
    assert finding.held
    assert all(trial.steps <= 12_000 and trial.final > 10 for trial in finding.trials)
    assert said == ["1 of 2: ppo CartPole-v1, seed 1", "2 of 2: ppo CartPole-v1, seed 2"]


def test_claims_share_a_run(tmp_path):
    settings = 2_048, {"eval_episodes": "2"}
    by_training = Claim("ppo", "CartPole-v1", "train100", 0, *settings)
    by_evaluation = Claim("ppo", "CartPole-v1", "eval", 0, *settings, rival="ppo")
    said = []
    findings = examine([by_training, by_evaluation], [1], tmp_path, 1, said.append)
    assert said == ["1 of 1: ppo CartPole-v1, seed 1"]
    assert [finding.claim for finding in findings] == [by_training, by_evaluation]
    assert findings[0].trials[0].final != findings[1].trials[0].final
    assert "times the environment steps of ppo to 0, evaluation" in rivalries(findings)[0]


def test_failed_run_reports_why(tmp_path):
    claim = Claim("dqn", "Pendulum-v1", "eval", 0, 100)
    with pytest.raises(RunFailed, match=r"dqn Pendulum-v1, seed 1 failed: corral: .*discrete actions"):
        examine([claim], [1], tmp_path, 1, lambda text: None)


def test_table_counts_seeds_that_reached_the_bar():
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


def test_empty_columns_are_left_out():
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


def test_rivals_are_paired_by_seed():
    base = Claim("ppo", "CartPole-v1", "train100", 475, 100_000)
    other = Claim("ppo-search", "CartPole-v1", "train100", 475, 100_000, rival="ppo")
    rivals = Finding(base, [Trial(1, 40_000, 1.0, 500.0, 2.0), Trial(2, 80_000, 1.0, 500.0, 2.0)])
    finding = Finding(other, [Trial(1, 30_000, 1.0, 500.0, 2.0), Trial(2, 20_000, 1.0, 500.0, 2.0)])
    (line,) = rivalries([rivals, finding])
    assert line.startswith("- ppo-search CartPole-v1: 0.50 (0.25 to 0.75) times the environment steps of ppo")
    (line,) = rivalries([rivals, Finding(other, [Trial(1, None, None, 9.0, 2.0)])])
    assert "no known number" in line
    assert rivalries([finding]) == []


def test_table_replaces_only_text_between_markers(tmp_path):
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


def test_section_names_machine_versions_and_command():
    facts = {"date": "2026-01-01T00:00:00", "cores": 2, "cpu": "a processor", "python": "3.11", "versions": {"x": "1"}}
    text = "\n".join(section([], facts, "python -m benchmarks learning --seeds 5", 2))
    for words in (
        "`python -m benchmarks learning --seeds 5` on 2026-01-01",
        "2 cores of a processor",
        "x 1",
        "side by side",
    ):
        assert words in text


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["learning", "--seeds", "0"], "--seeds must be at least 1"),
        (["learning", "--only", "chess"], "No claim contains 'chess': choose from ppo CartPole-v1"),
    ],
)
def test_user_error_is_one_line(args, words):
    done = run(*args)
    assert done.returncode == 2
    assert words in done.stderr
    assert done.stderr.count("\n") == 1
