"""Fixtures that tests of runs share."""

import pytest

from corral.runs.folder import RunFolder


@pytest.fixture
def run(tmp_path):
    return RunFolder.create(tmp_path / "run", {"algo": "ppo", "env": "CartPole-v1", "seed": 0})
