"""Runs that earlier versions wrote are resumed, evaluated and loaded."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import yaml

import corral
from corral.cli.main import main
from corral.runs.sinks.csv import read_metrics

OLD_RUNS = Path(__file__).with_name("old_runs")
NAMES = sorted(path.parent.name for path in OLD_RUNS.glob("*/config.yaml"))


@pytest.fixture
def old_run(request, tmp_path):
    folder = tmp_path / request.param
    shutil.copytree(OLD_RUNS / request.param, folder, symlinks=True)
    return folder


@pytest.mark.parametrize("old_run", NAMES, indirect=True)
def test_old_run_resumes(old_run):
    config = old_run / "config.yaml"
    config.write_text(config.read_text().replace("runtime: auto", "runtime: inline"))  # processes take seconds to start
    steps = yaml.safe_load(config.read_text())["steps"]
    result = corral.resume(old_run, steps=steps + 300, quiet=True)
    assert result.steps >= steps + 300
    rows = (old_run / "metrics.csv").read_text().splitlines()
    assert len(rows) > 3


@pytest.mark.parametrize("old_run", ["ppo_normalized_reward"], indirect=True)
def test_an_evaluation_without_a_row_gets_one_at_its_step(old_run):
    """The checkpoint of step 768 was saved before the row of its evaluation was written."""
    shutil.rmtree(old_run / "checkpoints/step_000001024")
    corral.resume(old_run, quiet=True)
    rows = read_metrics(old_run)
    assert rows["eval/return"][rows["env_steps"] == 768].tolist() == [28.0]


@pytest.mark.parametrize("old_run", ["ppo_search"], indirect=True)
def test_an_old_metric_continues_in_its_new_column(old_run):
    old, new = "search/learned_share", "search/learned_fraction"
    columns = (old_run / "metrics.csv").read_text().splitlines()
    at = columns[0].split(",").index(old)
    before = [float(line.split(",")[at] or "nan") for line in columns[1:]]
    corral.resume(old_run, steps=768, quiet=True)
    header = (old_run / "metrics.csv").read_text().splitlines()[0].split(",")
    assert new in header
    assert old not in header
    after = read_metrics(old_run)[new]
    np.testing.assert_array_equal(after[: len(before)], before)
    assert np.isfinite(after[len(before) :]).any()


@pytest.mark.parametrize("old_run", NAMES, indirect=True)
def test_old_run_evaluates(old_run, capsys):
    assert main(["eval", str(old_run), "--episodes", "2"]) == 0
    assert "return" in capsys.readouterr().out


@pytest.mark.parametrize("old_run", NAMES, indirect=True)
def test_old_run_loads(old_run):
    policy = corral.load_policy(old_run)
    table = policy.spec.observation
    obs = table.unflatten([np.ones(leaf.shape, leaf.dtype) for leaf in table.leaves])
    assert policy.spec.action.space.contains(policy(obs))
