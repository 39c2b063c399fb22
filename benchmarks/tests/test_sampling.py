from __future__ import annotations

import json
import os
import signal
import struct
import subprocess
import sys
import threading
import time

import pytest
from command import COMMAND, run

from benchmarks.common.chart import save_chart
from benchmarks.common.children import child_env
from benchmarks.common.deadline import TookTooLong, deadline
from benchmarks.common.facts import CpuTimes
from benchmarks.common.report import CaseReport, Report
from benchmarks.common.rounds import Entry, Outcome, Slice, Spread, play, rotated
from benchmarks.sampling import names
from benchmarks.sampling.cases import SamplingCase, make_cases
from benchmarks.sampling.layers import layers_of
from benchmarks.sampling.targets import verdicts


class LoggingContestant:
    """Writes down when it is called, and is as fast as it is told."""

    def __init__(self, name, log, rates, fails=None):
        self.name, self.log, self.rates, self.fails = name, log, iter(rates), fails

    def run(self, seconds):
        self.log.append(self.name)
        if self.fails:
            raise self.fails
        return Slice(round(next(self.rates) * seconds), seconds)

    def close(self):
        self.log.append(f"close {self.name}")


def entry(name, log, rates, kind="peer", fails=None):
    return Entry(name, kind, lambda: LoggingContestant(name, log, rates, fails), "pip install it")


def in_turns(*rates):
    """The warm-up's rate, and then each round's rate for all its turns."""
    return [1, *(rate for rate in rates for _ in range(5))]


def test_each_contestant_runs_five_times_per_round():
    log = []
    rates = in_turns(10, 20, 30)
    entries = [entry(name, log, rates) for name in "abc"]
    outcome = play(entries, rounds=3, seconds=1.0)
    assert log[:3] == ["a", "b", "c"]
    played = ["".join(log[3 + 3 * k : 6 + 3 * k]) for k in range(15)]
    assert played == ["abc", "bca", "cab"] * 5
    assert log[48:] == ["close c", "close b", "close a"]
    assert outcome.rates == {name: [10.0, 20.0, 30.0] for name in "abc"}
    assert outcome.skipped == {}


def test_rounds_start_with_different_contestants():
    entries = [entry(str(k), [], []) for k in range(10)]
    assert [rotated(entries, r, 5)[0].name for r in range(5)] == ["0", "2", "4", "6", "8"]
    assert [rotated(entries[:2], r, 5)[0].name for r in range(5)] == ["0", "1", "0", "1", "0"]
    assert all(len(set(rotated(entries, r, 5))) == 10 for r in range(5))


def test_ratios_are_taken_within_rounds():
    # The machine slows down to a third; ours is always twice as fast.
    outcome = Outcome({"ours": [600.0, 400.0, 200.0], "theirs": [300.0, 200.0, 100.0]}, {})
    assert outcome.ratios("ours", "theirs") == [2.0, 2.0, 2.0]
    assert outcome.ratio("ours", "theirs") == Spread(2.0, 2.0, 2.0)
    assert outcome.spread("ours") == Spread(400.0, 200.0, 600.0)
    assert outcome.ratios("ours", "nobody") == []


def test_spread_is_median_and_range():
    assert Spread.of([5.0, 1.0, 9.0]) == Spread(5.0, 1.0, 9.0)
    assert Spread.of([4.0, 1.0, 2.0, 9.0]) == Spread(3.0, 1.0, 9.0)
    nothing = Spread.of([])
    assert nothing.median != nothing.median


def test_failing_contestant_is_skipped_with_reason_and_closed():
    log = []
    entries = [entry("good", log, in_turns(20, 30)), entry("bad", log, [], fails=RuntimeError("it\nbroke"))]
    outcome = play(entries, rounds=2, seconds=1.0)
    assert outcome.rates == {"good": pytest.approx([20.0, 30.0])}
    assert outcome.skipped == {"bad": "failed: RuntimeError: it broke"}
    assert "close bad" in log
    assert log.count("bad") == 1, "not asked again"


def test_contestant_failing_midway_has_no_rates():
    outcome = play([entry("a", [], in_turns(20, 30)), entry("b", [], in_turns(20))], rounds=2, seconds=1.0)
    assert outcome.rates == {"a": pytest.approx([20.0, 30.0])}
    assert list(outcome.skipped) == ["b"]


@pytest.mark.parametrize("module", ["envpool", "stable_baselines3", "ale_py"])
def test_missing_peer_is_named_and_skipped(monkeypatch, module):
    for name in [module, *(n for n in sys.modules if n.startswith(f"{module}."))]:
        monkeypatch.setitem(sys.modules, name, None)  # makes the import fail, whatever was imported before
    chosen = {
        "envpool": ("cartpole", "EnvPool sync"),
        "stable_baselines3": ("cartpole", "SB3 Dummy"),
        "ale_py": ("pong", "ALE vector"),
    }
    case_name, name = chosen[module]
    (case,) = make_cases([case_name], 2)
    wanted = [e for e in case.entries if e.name == name]
    outcome = play(wanted, rounds=1, seconds=0.01)
    assert outcome.rates == {}
    assert "pip install 'corral-rl[" in outcome.skipped[name]
    assert module in outcome.skipped[name]


@pytest.mark.skipif(not hasattr(signal, "SIGALRM"), reason="needs SIGALRM")
def test_deadline_ends_an_endless_wait():
    ours, theirs = os.pipe()
    try:
        with pytest.raises(TookTooLong), deadline(0.05):
            os.read(ours, 1)
    finally:
        os.close(ours)
        os.close(theirs)
    with deadline(0.05):
        pass
    time.sleep(0.1)  # the alarm of a block that is over does not ring


def test_layers_are_differences_within_rounds():
    outcome = Outcome(
        {
            names.BARE_ONE: [1e5, 0.5e5],  # 10 and 20 us
            names.GROUP_ONE: [0.8e5, 0.4e5],  # 12.5 and 25
            names.LOCAL: [0.5e5, 0.25e5],  # 20 and 40
            names.LOCAL_SAMPLER: [0.4e5, 0.2e5],  # 25 and 50
            names.BARE_ALL: [2e5, 1e5],
            names.GROUP_ALL: [1.6e5, 0.8e5],
            names.LOCKSTEP: [1e5, 0.5e5],
            names.HALVES: [1.25e5, 0.625e5],
            names.SAMPLER: [1e5, 0.5e5],
        },
        {},
    )
    local, lockstep, halves = layers_of(outcome)
    assert local.layers["simulator"].low == pytest.approx(10)
    assert local.layers["group"].low == pytest.approx(2.5)
    assert local.layers["group"].high == pytest.approx(5)
    assert local.layers["send/recv"].median == pytest.approx(11.25)
    assert local.total.median == pytest.approx(37.5)
    assert sum(part.median for part in local.layers.values()) == pytest.approx(local.total.median)
    assert lockstep.layers["IPC"].low == pytest.approx(10 - 6.25)
    assert halves.layers["sampler"].low == pytest.approx(2)
    assert layers_of(Outcome({names.BARE_ONE: [1.0]}, {})) == []


def test_verdicts_state_target_figure_and_bound():
    case = SamplingCase("cartpole", "CartPole", 64, [])
    rates = {
        names.SYNC: [50_000.0, 25_000.0],
        names.ASYNC: [4_000.0, 2_000.0],
        names.LOCKSTEP: [60_000.0, 30_000.0],
        names.FIRST: [75_000.0, 37_500.0],
        names.BARE_ONE: [80_000.0, 40_000.0],
        names.BARE_ALL: [128_000.0, 64_000.0],
        names.BARE_LOCKSTEP: [85_000.0, 42_500.0],
    }
    sync, async_ = verdicts(case, Outcome(rates, {}))
    assert (sync.figure, sync.contestant, sync.reached) == (Spread(1.5, 1.5, 1.5), names.FIRST, False)
    assert str(sync).startswith("CartPole x 64, process over gymnasium Sync: 1.50 (target: at least 1.6). Not met. ")
    for words in ("reach 2.56", "1.60 times one process", "1.70 if they are woken"):
        assert words in str(sync)
    assert async_.reached
    assert str(async_).startswith("CartPole x 64, process over gymnasium Async: 18.75 (target: at least 10). Met. ")
    assert verdicts(SamplingCase("cartpole", "CartPole", 8, []), Outcome(rates, {})) == []
    assert verdicts(case, Outcome({names.SYNC: [1.0]}, {})) == []


def test_verdict_of_slow_envs_is_share_of_ideal():
    case = SamplingCase("slow", "slow", 16, [], ideal=500.0)
    (verdict,) = verdicts(case, Outcome({names.FIRST: [480.0, 490.0, 470.0]}, {}))
    assert (verdict.figure, verdict.reached) == (Spread(0.96, 0.94, 0.98), True)


def test_report_json_and_chart(tmp_path):
    case = SamplingCase("cartpole", "CartPole", 2, [entry("a", [], []), entry("b", [], [], "corral")])
    outcome = Outcome({"a": [1.0, 3.0], "b": [2.0, 4.0]}, {"c": "not installed"})
    facts = {"cores": 2, "cpu": "a processor", "date": "2026-01-01T00:00:00"}
    report = Report(
        {"rounds": 2, "seconds": 1.0}, facts, [CaseReport(case, outcome, [], [], None, names.SYNC, case.scale)]
    )
    data = json.loads(json.dumps(report.to_json(), allow_nan=False))
    assert [c["rates"] for c in data["cases"][0]["contestants"]] == [[1.0, 3.0], [2.0, 4.0]]
    assert data["cases"][0]["contestants"][0]["ratio_to_sync"] is None
    assert data["cases"][0]["skipped"] == {"c": "not installed"}
    assert report.cases[0].ranking() == [("b", "corral"), ("a", "peer")]
    pytest.importorskip("matplotlib")
    save_chart(report, tmp_path / "x.png")
    assert png_size(tmp_path / "x.png") > (400, 100)


def test_cpu_time_of_other_programs():
    before, after = CpuTimes(100.0, 50.0, 7.0), CpuTimes(110.0, 62.0, 10.0)
    assert after.others_since(before) == pytest.approx(9.0 / 10.0 / os.cpu_count())
    read = CpuTimes.now()
    assert read is None or read.total >= read.ours > 0


def test_command_writes_tables_chart_and_json(tmp_path):
    pytest.importorskip("matplotlib")
    done = run(
        "sampling", "--rounds", "1", "--seconds", "0.05", "--num-envs", "3", "--out", tmp_path / "new" / "folder"
    )
    assert done.returncode == 0, done.stderr
    for words in (
        "CartPole x 3, steps per second",
        "microseconds per step and layer",
        "| gymnasium Sync ",
        "Pong 84x84x4 x 3",
        "% of ideal",
        "No target" if "skipped ALE vector" in done.stdout else "(target: at least 0.95)",
        "waking a process takes",
        "Wrote ",
    ):
        assert words in done.stdout
    data = json.loads((tmp_path / "new" / "folder" / "sampling.json").read_text())
    assert [case["case"] for case in data["cases"]] == ["cartpole", "pong", "slow"]
    for case in data["cases"]:
        assert not [why for why in case["skipped"].values() if why.startswith("failed")], case["skipped"]
        assert all(c["rates"][0] > 0 for c in case["contestants"])
    assert data["facts"]["cores"] >= 1
    assert data["facts"]["versions"]["gymnasium"]
    assert png_size(tmp_path / "new" / "folder" / "sampling.png") > (800, 600)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--rounds", "0"], "--rounds must be at least 1"),
        (["--num-envs", "-3"], "--num-envs must be at least 1"),
        (["--seconds", "0"], "--seconds must be positive"),
        (["--seconds", "nan"], "--seconds must be positive"),
        (["--case", "doom"], "doom"),
        (["--out", __file__], "cannot be created as a folder"),
    ],
)
def test_user_error_is_one_line(args, words):
    done = run("sampling", *args)
    assert done.returncode == 2
    assert words in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.skipif(not os.path.isdir("/proc"), reason="looks at /proc")
@pytest.mark.parametrize("to_the_group", [True, False], ids=["as a terminal sends it", "to the command alone"])
def test_ctrl_c_leaves_no_process(tmp_path, to_the_group):
    """The children are found by a mark in their environment."""
    mark = f"CORRAL_TEST_MARK={os.getpid()}-{time.monotonic_ns()}"
    name, _, value = mark.partition("=")
    process = subprocess.Popen(
        [*COMMAND, "sampling", "--case", "cartpole", "--num-envs", "3", "--rounds", "1000", "--seconds", "0.05",
         "--out", tmp_path],
        env=child_env(**{name: value}),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )  # fmt: skip
    timer = threading.Timer(120, process.kill)
    timer.start()
    try:
        most = 0
        until = time.monotonic() + 90
        while time.monotonic() < until and most < 10:  # async, subproc, loops, workers
            most = max(most, len(marked(mark)))
            time.sleep(0.1)
        assert most >= 10
        time.sleep(3.0)
        (os.killpg if to_the_group else os.kill)(process.pid, signal.SIGINT)
        _, errors = process.communicate(timeout=90)
    finally:
        timer.cancel()
        process.kill()
    assert process.returncode == 130, errors
    assert errors.endswith("python -m benchmarks: interrupted\n")  # a peer's worker may print more before it
    until = time.monotonic() + 10
    while marked(mark) and time.monotonic() < until:
        time.sleep(0.05)
    assert marked(mark) == []


def marked(mark):
    """Processes that have this in their environment."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/environ", "rb") as file:
                if mark.encode() in file.read():
                    found.append(int(pid))
        except OSError:
            continue
    return found


def png_size(path):
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    return struct.unpack(">II", data[16:24])
