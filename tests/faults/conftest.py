"""Runs that end with their test."""

import pytest
from helpers.run_process import Run


@pytest.fixture
def start(tmp_path):
    runs = []

    def make(algo, *options, **more):
        runs.append(Run(tmp_path, algo, *options, **more))
        return runs[-1]

    yield make
    for run in runs:
        run.process.kill()
        run.process.wait()
