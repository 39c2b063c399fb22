"""Runs that earlier versions wrote are resumed, evaluated and loaded."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import yaml

import corral
from corral.cli.main import main

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
