"""`python -m benchmarks replay`."""

from __future__ import annotations

import sys

import pytest
from command import run

from benchmarks import replay
from benchmarks.common.rounds import play


def test_replays_add_and_sample_the_same_experience(monkeypatch):
    monkeypatch.setattr(replay, "CAPACITY", 20_000)
    for case in replay.make_cases():
        outcome = play(case.entries, rounds=1, seconds=0.02)
        assert replay.CORRAL in outcome.rates
        assert not [why for why in outcome.skipped.values() if why.startswith("failed")], outcome.skipped


def test_missing_cpprb_is_named_and_skipped(monkeypatch):
    monkeypatch.setattr(replay, "CAPACITY", 20_000)
    monkeypatch.setitem(sys.modules, "cpprb", None)
    case = replay.make_cases()[0]
    outcome = play(case.entries, rounds=1, seconds=0.02)
    assert "pip install cpprb" in outcome.skipped[replay.CPPRB]
    assert case.verdicts(outcome, []) == []


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["replay", "--out", __file__], "cannot be created as a folder"),
    ],
)
def test_user_error_is_one_line(args, words):
    done = run(*args)
    assert done.returncode == 2
    assert words in done.stderr
    assert done.stderr.count("\n") == 1
