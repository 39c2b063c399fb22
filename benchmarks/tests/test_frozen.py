"""`python -m benchmarks frozen`."""

from __future__ import annotations

import json
import subprocess

import pytest
from command import run

from benchmarks.common.rounds import Spread
from benchmarks.frozen import ROOT, CaseRatio


def worktrees():
    return subprocess.run(["git", "worktree", "list"], cwd=ROOT, capture_output=True, text=True, check=True).stdout


def test_ratio_is_taken_within_rounds():
    assert CaseRatio("ppo", [100.0, 200.0, 400.0], [110.0, 200.0, 360.0]).ratio == Spread(1.0, 0.9, 1.1)


def test_trees_take_turns_and_the_worktree_is_removed(tmp_path):
    before, out = worktrees(), tmp_path / "frozen.json"
    done = run("frozen", "sampling-local", "--commit", "HEAD", "--rounds", "2", "--seconds", "0.1", "--out", out)
    assert done.returncode == 0, done.stderr
    assert "over HEAD:" in done.stdout
    assert "| sampling-local |" in done.stdout
    (case,) = json.loads(out.read_text())["cases"]
    assert len(case["frozen"]) == len(case["here"]) == 2
    assert min(case["frozen"] + case["here"]) > 0
    assert worktrees() == before


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["chess"], "Unknown case 'chess': choose from sampling-local"),
        (["--rounds", "0"], "--rounds must be at least 1"),
        (["--seconds", "nan"], "--seconds must be positive"),
        (["ppo", "--commit", "nothing"], "git worktree failed"),
    ],
)
def test_user_error_is_one_line(args, message):
    done = run("frozen", *args)
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stderr.count("\n") == 1
